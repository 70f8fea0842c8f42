"""`vitclinic demo`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from vitclinic.cli.common import Quiet, app, console_for, free_path, named_path, resumable


@app.command()
def demo(
    out: Annotated[
        Path | None,
        typer.Option(parser=named_path, metavar="DIR", help="Folder; default: runs/demo. Continues an unfinished one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train a plain ViT and the recommended recipe on embedded images for the same time, and compare them in one page.

    Takes under five minutes on two cores. Open report.html in any browser.
    """
    path = out or free_path(Path("runs") / "demo")
    with resumable(f"go on with: vitclinic demo --out {shlex.quote(str(path))}", same=False):
        from rich.markup import escape

        from vitclinic.exam.display import Display as ExamDisplay
        from vitclinic.exam.display import show_exams
        from vitclinic.experiments.demo import compare, train_both
        from vitclinic.training.display import Display

        console = console_for(verbose=False, quiet=quiet or as_json)
        with Display(console) as training:
            runs = train_both(path, callbacks=[training])
        with ExamDisplay(console) as examining:
            done = compare(*runs, path / "report.html", callbacks=[examining])
        if as_json:
            found = [{"title": one.title, "statement": one.statement} for one in done.expected]
            facts = {"runs": [str(run.path) for run in runs], "report": str(done.page), "headline": done.headline}
            typer.echo(json.dumps({**facts, "expected": found}, indent=2))
        show_exams(done.exams, console, whole=False)
        console.print(f"[bold green]{escape(done.headline)}[/]", soft_wrap=True)
        for finding in done.expected:
            console.print(f"[bold]{escape(finding.title)}[/]: {escape(finding.statement)}", soft_wrap=True)
        console.print(f"report: [bold]{escape(str(done.page))}[/]", soft_wrap=True, highlight=False)
