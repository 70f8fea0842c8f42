"""`vitclinic examine`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitclinic._core.errors import RecipeError, VitclinicError
from vitclinic.cli.common import (
    GATE_FAILED,
    PROBE_FAILED,
    Quiet,
    Verbose,
    app,
    check_data,
    console_for,
    follows,
    named_page,
    named_path,
    named_xml,
    resumable,
)

if TYPE_CHECKING:
    from rich.console import Console

    from vitclinic.exam import Exams
    from vitclinic.exam.gates import Gate, GateResult


Targets = Annotated[list[str], typer.Argument(metavar="TARGET", help="Networks to examine, as in the examples.")]
Data = Annotated[str | None, typer.Option(metavar="D", help="Images to measure on; default: the run's own.")]
Probes = Annotated[
    str | None, typer.Option(metavar="A,B", help="Probes to run; default: all that fit into the budget.")
]
Budget = Annotated[
    str | None, typer.Option(metavar="TIME", help="Time for all targets together, such as 20m; default: 5m.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Only what one pass over the images can measure.")]
Full = Annotated[bool, typer.Option("--full", help="Every probe that applies, however long it takes.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PROBE.OPTION=VALUE", help="Set an option of a probe; can be repeated."),
]
Split = Annotated[str, typer.Option(help="Images to measure on: train, val or test.")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most this many images, class-balanced.")]
Size = Annotated[int | None, typer.Option(min=1, help="Pixels a side, for networks that take any size.")]
BatchSize = Annotated[int, typer.Option(help="Images per batch; halved if memory runs out.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of whatever a probe draws at random.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
RandomWeights = Annotated[bool, typer.Option("--random-weights", help="Untrained weights, instead of published ones.")]
Out = Annotated[
    Path | None,
    typer.Option(parser=named_path, metavar="DIR", help="Folder for results; default: the run's exams/, or ./exams."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again what is already stored.")]
Page = Annotated[
    Path | None,
    typer.Option(parser=named_page, metavar="FILE", help="The page; default: report.html in the run, or in ./exams."),
]
Curves = Annotated[
    Path | None,
    typer.Option(
        parser=named_path,
        metavar="FILE",
        help="Training curves logged by another library: CSV, or TensorBoard's events.",
    ),
]
NoPage = Annotated[bool, typer.Option("--no-report", help="Do not write a page.")]
NoImages = Annotated[bool, typer.Option("--no-images", help="Leave your images out of the page.")]
FailOn = Annotated[
    list[str] | None,
    typer.Option(metavar="PROBE.SCALAR<X", help="Exit with code 9 if this is so; can be repeated."),
]
Baseline = Annotated[
    str | None,
    typer.Option(metavar="TARGET", help="Exit with code 9 if accuracy is significantly below this target's."),
]
JUnit = Annotated[
    Path | None,
    typer.Option(parser=named_xml, metavar="FILE", help="Also write what passed and failed as JUnit's XML."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")]


@app.command()
def examine(
    targets: Targets,
    data: Data = None,
    probes: Probes = None,
    budget: Budget = None,
    quick: Quick = False,
    full: Full = False,
    settings: Settings = None,
    split: Split = "test",
    limit: Limit = None,
    size: Size = None,
    batch_size: BatchSize = 64,
    seed: Seed = 0,
    device: Device = "auto",
    random_weights: RandomWeights = False,
    out: Out = None,
    fresh: Fresh = False,
    report: Page = None,
    curves: Curves = None,
    no_report: NoPage = False,
    no_images: NoImages = False,
    fail_on: FailOn = None,
    baseline: Baseline = None,
    junit: JUnit = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Measure one or more networks with probes, within a time budget, and write one page about them.

    \b
    vitclinic examine runs/photos-...                a run, on its own test images
    vitclinic examine runs/a runs/b --budget 20m     two runs, compared
    vitclinic examine runs/a@epoch-3                 another checkpoint of a run
    vitclinic examine runs/a --probes norms,fourier  these probes only
    vitclinic examine timm:resnet18 --data photos/   published weights of timm
    vitclinic examine 'timm:NAME?img_size=32@FILE' --data photos/
    vitclinic examine torchvision:NAME hf:NAME mynets:build --data photos/
    vitclinic examine timm:NAME@model_best.pth.tar --data D --curves summary.csv
    torchrun --nproc-per-node 4 -m vitclinic examine runs/a
    vitclinic examine runs/b --fail-on 'accuracy.accuracy<0.9' --baseline runs/a

    `NAME?keyword=value@FILE` sets keywords of the network and loads your weights;
    `mynets:build` calls the function `build` of your module mynets.py.

    `vitclinic list probes` shows the probes. Results are stored and reused: after
    an interruption, run the same command to continue. More: docs/examine.md.
    """
    gates, chosen = _read_gates(fail_on, baseline, junit), _names(probes)
    if (gates or baseline) and chosen is None and not (quick or full or budget):  # what the gates need, and no more
        chosen = list(dict.fromkeys(gate.probe for gate in gates)) or ["accuracy"]
    extent = {"probes": chosen, "budget": budget, "quick": quick, "full": full, "settings": _settings(settings or [])}
    _refuse_typos(targets, data, split, extent, baseline, curves)
    images = {"split": split, "limit": limit, "size": size, "batch_size": batch_size, "seed": seed}
    network = {"device": device, "random_weights": random_weights}
    request = {**extent, **images, **network, "fresh": fresh, "out": out}
    with resumable():  # the imports, too, are long enough to be interrupted
        console = console_for(verbose, quiet or as_json)
        exams = _run([*([] if baseline is None else [baseline]), *targets], data, request, console)
        results = _check_gates(exams, gates, targets, baseline, data, request, junit)
        if curves is not None and targets[0] not in exams.failures:
            exams[-1].add_curves(curves)
        _show(exams, console, as_json, results, whole=chosen is not None)
        if not no_report and not follows():
            _write_page(exams, report or _report_path(exams, out), not no_images, console)
    _end(exams, results, gates)


def _read_gates(fail_on: list[str] | None, baseline: str | None, junit: Path | None) -> list[Gate]:
    from vitclinic.exam.gates import Gate

    gates = [Gate.parse(text) for text in fail_on or []]
    if junit is not None and not gates and baseline is None:
        raise RecipeError("--junit writes what gates say: give --fail-on or --baseline.")
    return gates


def _write_page(exams: Exams, path: Path, images: bool, console: Console) -> None:
    from rich.markup import escape

    from vitclinic._core.callback import say

    page = exams.report(path, images=images)
    say(console, f"report: [bold]{escape(str(page))}[/]")


def _end(exams: Exams, results: list[GateResult], gates: list[Gate]) -> None:
    """Raise for a target that could not be examined, and exit with a code of its own unless all went well."""
    for error in exams.failures.values():
        raise error
    for typo in (gate.find_typo(exam) for exam in exams for gate in gates):
        if typo is not None:
            raise RecipeError(typo)
    if any(measurement.status == "failed" for exam in exams for measurement in exam.values()):
        raise typer.Exit(PROBE_FAILED)
    if not all(result.passed for result in results):
        raise typer.Exit(GATE_FAILED)


def _run(targets: list[str], data: str | None, request: dict[str, Any], console: Console) -> Exams:
    from vitclinic._core.distributed import join_processes, pick_device
    from vitclinic.exam import Examination
    from vitclinic.exam.display import Display

    with Display(console) as display, join_processes(pick_device(request["device"])):
        return Examination(data, **request, together=True, callbacks=[display]).run_all(targets)


def _check_gates(
    exams: Exams,
    gates: list[Gate],
    targets: list[str],
    baseline: str | None,
    data: str | None,
    request: dict[str, Any],
    junit: Path | None,
) -> list[GateResult]:
    """Return what passed and failed: every gate for every target, and each target beside the baseline."""
    if not gates and baseline is None:
        return []
    from vitclinic.exam import Examination
    from vitclinic.exam.gates import compare, write_junit

    examined = [exam for exam in exams if exam.name != baseline or baseline in targets]
    results = [gate.check(exam.name, exam) for exam in examined for gate in gates]
    if baseline is not None and baseline not in exams.failures:
        examination = Examination(data, **request)
        try:
            other = examination.open(baseline)
            results += [compare(examination.open(exam.name), other) for exam in examined]
        except VitclinicError as error:  # what else passed or failed is told before it
            exams.failures[baseline] = error
    if junit is not None and not follows():
        write_junit(junit, results, {name: str(error) for name, error in exams.failures.items()})
    return results


def _refuse_typos(
    targets: list[str],
    data: str | None,
    split: str,
    extent: dict[str, Any],
    baseline: str | None,
    curves: Path | None,
) -> None:
    """Raise for probes, targets, data or a split that are not there, before torch is loaded.

    One wrong target of several is reported at the end: the others are examined.
    """
    from vitclinic.exam.request import check_request, check_split, check_target

    check_request(**extent)
    check_split(split)
    check_data(data)
    if len(targets) == 1:
        check_target(targets[0])
    if baseline is not None:
        check_target(baseline)
    if curves is not None:
        _refuse_curves(curves, targets)


def _refuse_curves(curves: Path, targets: list[str]) -> None:
    """Raise for curves that cannot be those of the target, before anything is measured."""
    from vitclinic.training.rows import read_curves
    from vitclinic.training.run import find_run

    if len(targets) > 1:
        raise RecipeError(f"--curves are those of one network (got {len(targets)} targets).")
    if find_run(targets[0]) is not None:
        raise RecipeError(f"'{targets[0]}' is a run, which has its own curves: remove --curves.")
    read_curves(curves)


def _report_path(exams: Exams, out: Path | None) -> Path:
    """Return `report.html` of the run that was examined or, where there is none or several, of the folder of exams."""
    if out is None and len(exams) == 1 and exams[0].run is not None:
        return exams[0].run.path / "report.html"
    return (out or Path("exams")) / "report.html"


def _show(exams: Exams, console: Console, as_json: bool, results: list[GateResult], whole: bool) -> None:
    from rich.markup import escape

    from vitclinic._core.callback import say
    from vitclinic.exam import gates
    from vitclinic.exam.display import show_exams, to_json

    if as_json and not follows():
        printed: Any = [to_json(exam) for exam in exams]
        if results:
            printed = {"exams": printed, "gates": gates.to_json(results)}
        typer.echo(json.dumps(printed, indent=2, allow_nan=False))
    show_exams(exams, console, whole=whole)
    for result in results:
        word = "[green]passed[/]" if result.passed else "[bold red]failed[/]"
        gate = result.gate if " " in result.gate else f"fail-on {result.gate}"
        say(console, f"{word}: {escape(gate)} ({escape(result.network)}; {escape(result.statement.rstrip('.'))})")


def _names(probes: str | None) -> list[str] | None:
    return None if probes is None else [name.strip() for name in probes.split(",") if name.strip()]


def _settings(words: list[str]) -> dict[str, dict[str, Any]]:
    """Parse `probe.option=value` into {probe: {option: value}}."""
    from vitclinic._core.io import parse_yaml

    options: dict[str, dict[str, Any]] = {}
    for word in words:
        path, equals, value = word.partition("=")
        probe, dot, option = path.partition(".")
        if not (equals and dot and option):
            raise RecipeError(f"--set takes PROBE.OPTION=VALUE (got '{word}').")
        options.setdefault(probe, {})[option] = parse_yaml(value, f"--set {word}")
    return options
