"""`vitclinic examine`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitclinic._core.errors import RecipeError
from vitclinic.cli.common import PROBE_FAILED, Quiet, Verbose, app, console_for, follows, resumable

if TYPE_CHECKING:
    from rich.console import Console

    from vitclinic.exam import Exams


@app.command()
def examine(
    targets: Annotated[list[str], typer.Argument(metavar="TARGET...", help="What to examine; see below.")],
    data: Annotated[str | None, typer.Option(metavar="D", help="Data to measure on; a run has its own.")] = None,
    probes: Annotated[str | None, typer.Option(metavar="A,B", help="Which probes; else those in time.")] = None,
    budget: Annotated[str | None, typer.Option(metavar="TIME", help="Of all targets together; else 5m.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only what one pass over the images shows.")] = False,
    full: Annotated[bool, typer.Option("--full", help="All probes that apply, whatever they take.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="PROBE.OPTION=VALUE", help="An option of a probe.")
    ] = None,
    split: Annotated[str, typer.Option(help="train, val or test.")] = "test",
    limit: Annotated[int | None, typer.Option(help="At most so many images, stratified.")] = None,
    size: Annotated[int | None, typer.Option(help="Pixels a side, where the network takes any.")] = None,
    batch_size: Annotated[int, typer.Option(help="Images at a time; halved when memory runs out.")] = 64,
    seed: Annotated[int, typer.Option(help="Of whatever is random in measuring.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Do not ask for pretrained ones.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where results go; a run's own exams/, or ./exams.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is stored.")] = False,
    report: Annotated[Path | None, typer.Option(help="The page; report.html of one run, or of ./exams.")] = None,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no page.")] = False,
    no_images: Annotated[bool, typer.Option("--no-images", help="Leave your pictures out of the page.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Run the probes that apply on one or several networks, within a budget, and write one page about them.

    \b
    vitclinic examine runs/photos-...                       a run, on its own test images
    vitclinic examine runs/a runs/b --budget 20m            two of them side by side, the first as the reference
    vitclinic examine runs/a --quick                        only what one pass over the images shows
    vitclinic examine runs/a --probes norms,landscape       these probes
    vitclinic examine timm:resnet18 --data photos/          a timm network with its published weights
    vitclinic examine 'timm:NAME?img_size=32@FILE' --data D  keywords, and a checkpoint
    vitclinic examine torchvision:NAME hf:NAME mynets:build --data D
    torchrun --nproc-per-node 4 -m vitclinic examine ...    curvature probes divide their work

    Probes: `vitclinic list probes`. What is stored is not measured again: docs/examine.md.
    """
    with resumable():  # the imports, too, are long enough to be interrupted
        from rich.markup import escape

        from vitclinic._core.distributed import join_processes, pick_device
        from vitclinic.exam import Examination
        from vitclinic.exam.display import Display

        console = console_for(verbose, quiet or as_json)
        with Display(console) as display, join_processes(pick_device(device)):
            examination = Examination(
                data,
                probes=_names(probes),
                budget=budget,
                quick=quick,
                full=full,
                settings=_settings(settings or []),
                split=split,
                limit=limit,
                size=size,
                batch_size=batch_size,
                seed=seed,
                device=device,
                random_weights=random_weights,
                out=out,
                fresh=fresh,
                together=True,
                callbacks=[display],
            )
            exams = examination.run_all(targets)
        _show(exams, console, as_json, whole=probes is not None)
        if not no_report and not follows():
            page = exams.report(report or _report_path(exams, out), images=not no_images)
            console.print(f"report: [bold]{escape(str(page))}[/]", soft_wrap=True, highlight=False)
    for error in exams.failures.values():
        raise error
    if any(measurement.status == "failed" for exam in exams for measurement in exam.values()):
        raise typer.Exit(PROBE_FAILED)


def _report_path(exams: Exams, out: Path | None) -> Path:
    """`report.html` of the run that was examined or, where there is none or several, of the folder of exams."""
    if out is None and len(exams) == 1 and exams[0].run is not None:
        return exams[0].run.path / "report.html"
    return (out or Path("exams")) / "report.html"


def _show(exams: Exams, console: Console, as_json: bool, whole: bool) -> None:
    from vitclinic.exam.display import show_exams, to_json

    if as_json and not follows():
        typer.echo(json.dumps([to_json(exam) for exam in exams], indent=2, allow_nan=False))
    show_exams(exams, console, whole=whole)


def _names(probes: str | None) -> list[str] | None:
    return None if probes is None else [name.strip() for name in probes.split(",") if name.strip()]


def _settings(words: list[str]) -> dict[str, dict[str, Any]]:
    """`probe.option=value` as {probe: {option: value}}."""
    from vitclinic.training.overrides import parse_yaml

    options: dict[str, dict[str, Any]] = {}
    for word in words:
        path, equals, value = word.partition("=")
        probe, dot, option = path.partition(".")
        if not (equals and dot and option):
            raise RecipeError(f"--set takes PROBE.OPTION=VALUE (got '{word}').")
        options.setdefault(probe, {})[option] = parse_yaml(value, f"--set {word}")
    return options
