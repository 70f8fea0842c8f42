"""`vitclinic report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from vitclinic._core.errors import RecipeError
from vitclinic.cli.common import Quiet, Verbose, app, console_for, named_page


@app.command()
def report(
    targets: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Runs, or folders exams/NAME-DIGEST.")
    ] = None,
    all_studies: Annotated[
        bool, typer.Option("--all", help="All studies in a folder (default: studies), with an index.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=named_page, metavar="FILE", help="The page; default: the run's report.html, or ./report.html."
        ),
    ] = None,
    no_images: Annotated[bool, typer.Option("--no-images", help="Leave out images from the data.")] = False,
    title: Annotated[str | None, typer.Option(help="Title; default: the names of the networks.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Write one HTML page from stored measurements: findings, numbers side by side, figures.

    \b
    vitclinic report runs/photos                    runs/photos/report.html
    vitclinic report runs/plain runs/sam            the second against the first
    vitclinic report runs/photos@epoch-3            another checkpoint
    vitclinic report exams/timm-resnet18-1a2b3c4d   a network without a run
    vitclinic report --all                          studies/index.html, of all
    vitclinic report --all elsewhere                elsewhere/index.html

    The page is one file that opens offline. More: docs/report.md.
    """
    console = console_for(verbose, quiet or as_json)
    if all_studies:
        page = _all_studies(targets or ["studies"], out, title)
    elif targets:
        from vitclinic.exam.request import check_stored

        for target in targets:
            check_stored(target)
        from vitclinic.exam.reporting import report as write

        page = write(targets, out, title=title, images=not no_images)
    else:
        raise RecipeError("Name a run that was examined, or use --all for all studies.")
    if as_json:
        typer.echo(json.dumps({"report": str(page)}, indent=2))
    console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)


def _all_studies(folders: list[str], out: Path | None, title: str | None) -> Path:
    from vitclinic.experiments.study.store import report_studies

    if len(folders) > 1:
        raise RecipeError(f"--all takes one folder of studies (got {', '.join(folders)}).")
    if out is not None:
        raise RecipeError("--all writes pages next to the results, which they link to: remove --out.")
    return report_studies(folders[0], title=title)
