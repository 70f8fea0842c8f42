"""The command line: thin verbs over the Python interface.

Exit codes: 0 done; 1 a bug in vitclinic; 2 a mistake in the command, recipe or model; 3 the data; 4 the run
directory; 5 the training diverged; 6 a probe failed; 7 some runs of a study failed; 130 and 143 interrupted by Ctrl-C
and SIGTERM, saved.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitclinic.errors import RecipeError, VitclinicError

if TYPE_CHECKING:
    from rich.console import Console

    from vitclinic.clinic import Exam
    from vitclinic.training import Run

DIVERGED = 5
PROBE_FAILED = 6
RUNS_FAILED = 7
INTERRUPTED = 130

app = typer.Typer(
    name="vitclinic",
    help="Train vision transformers that work on the data you have, and see why.",
    epilog="Start with: vitclinic demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more about what is going on.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


class Listed(StrEnum):
    """What `list` knows."""

    recipes = "recipes"
    models = "models"
    treatments = "treatments"
    datasets = "datasets"
    probes = "probes"
    studies = "studies"


def _version(asked: bool) -> None:
    if asked:
        from vitclinic import __version__

        typer.echo(f"vitclinic {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe's name or file, then changes to it."),
    ] = None,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="RUN", help="Continue an interrupted run.")] = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Train a network: on a folder of images, parquet, a torchvision or hub set, or an embedded one.

    \b
    vitclinic train data=photos/                 one sub-folder per class
    vitclinic train shapes epochs=5              a shipped recipe, changed
    vitclinic train my.yaml optimizer.lr=3e-4    your own recipe file
    vitclinic train data=photos/ max_time=30m    as many steps as fit
    vitclinic train --resume runs/photos-...     after Ctrl-C or a crash
    torchrun --nproc-per-node 4 -m vitclinic train data=photos/

    Keys: model, data, treatments, loss, optimizer, schedule, epochs or steps or max_time, batch_size, accumulate,
    clip, ema, precision, compile, checkpoint, validation, test, seed, out, workers, device, logging.

    Sections have keys of their own, as in data.limit=500: docs/train.md lists them all. Values are YAML.
    """
    from vitclinic.training import resume as resume_run
    from vitclinic.training import train as train_run
    from vitclinic.training.display import Display

    console = _console(verbose, quiet)
    recipe, changes = _recipe_and_changes(words or [])
    if resume is not None and recipe is not None:
        raise RecipeError(f"--resume takes the run's own recipe; remove '{recipe}'.")
    with Display(console) as display:
        if resume is not None:
            run = resume_run(resume, *changes, observers=[display], progress=display.on_reading)
        else:
            run = train_run(recipe, *changes, observers=[display], progress=display.on_reading)
    _finish(run, console)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Run directory; runs/demo unless given.")] = None,
    quiet: Quiet = False,
) -> None:
    """Train a small vision transformer on the embedded `shapes` set: about two minutes on two cores."""
    from vitclinic.training import train as train_run
    from vitclinic.training.display import Display

    console = _console(verbose=False, quiet=quiet)
    path = out or _free_path(Path("runs") / "demo")
    with Display(console) as display:
        run = train_run("shapes", f"out={path}", observers=[display], progress=display.on_reading)
    _finish(run, console)


@app.command()
def examine(
    targets: Annotated[list[str], typer.Argument(metavar="TARGET...", help="What to examine; see below.")],
    data: Annotated[str | None, typer.Option(metavar="D", help="Data to measure on; a run has its own.")] = None,
    probes: Annotated[str | None, typer.Option(metavar="A,B", help="Which probes; quick ones unless given.")] = None,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Run probes on one or several networks, print their results side by side and store them.

    \b
    vitclinic examine runs/photos-...                       a run, on its own test images
    vitclinic examine runs/a runs/b --probes norms          two of them, one probe
    vitclinic examine timm:resnet18 --data photos/          a timm network with its published weights
    vitclinic examine 'timm:NAME?img_size=32@FILE' --data D  keywords, and a checkpoint
    vitclinic examine torchvision:NAME hf:NAME mynets:build --data D
    torchrun --nproc-per-node 4 -m vitclinic examine ...    curvature probes divide their work

    Probes: `vitclinic list probes`. What is stored is not measured again: docs/examine.md.
    """
    exams: list[Exam] = []
    with _resumable():  # the imports, too, are long enough to be interrupted
        from vitclinic.clinic import Examination
        from vitclinic.clinic.display import Display
        from vitclinic.training.distributed import joined_world, pick_device

        console = _console(verbose, quiet or as_json)
        try:
            with Display(console) as display, joined_world(pick_device(device)):
                examination = Examination(
                    data,
                    probes=_probe_entries(probes, settings or []),
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
                    watcher=display,
                )
                for target in targets:
                    exams.append(examination.of(target))
        except VitclinicError:
            if exams:  # one target's mistake does not hide the others' results
                _show(exams, console, as_json)
            raise
        _show(exams, console, as_json)
    if any(measurement.status == "failed" for exam in exams for measurement in exam.values()):
        raise typer.Exit(PROBE_FAILED)


def _show(exams: list[Exam], console: Console, as_json: bool) -> None:
    from vitclinic.clinic.display import plain, show_exams

    if as_json and not _follows():
        typer.echo(json.dumps([plain(exam) for exam in exams], indent=2, allow_nan=False))
    show_exams(exams, console)


@contextmanager
def _resumable(kept: str = "what has been measured is stored") -> Iterator[None]:
    """Ctrl-C ends a command without a traceback, and the same command goes on."""
    try:
        yield
    except KeyboardInterrupt:
        typer.secho(f"interrupted; {kept}, and the same command goes on", fg="yellow", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _probe_entries(names: str | None, settings: list[str]) -> list[dict[str, dict[str, Any]]]:
    """`a,b` and `b.option=value` as {name: options}; options of a probe that is not named are a mistake."""
    from vitclinic.probes import usual_probes
    from vitclinic.training.overrides import parse_yaml

    chosen = usual_probes() if names is None else [name.strip() for name in names.split(",") if name.strip()]
    options: dict[str, dict[str, Any]] = {name: {} for name in chosen}
    for setting in settings:
        path, equals, value = setting.partition("=")
        probe, dot, option = path.partition(".")
        if not (equals and dot and option):
            raise RecipeError(f"--set takes PROBE.OPTION=VALUE (got '{setting}').")
        if probe not in options:
            raise RecipeError(f"--set {setting}: '{probe}' is not among the probes ({', '.join(options)}).")
        options[probe][option] = parse_yaml(value, f"--set {setting}")
    return [{name: options[name]} for name in chosen]


@app.command()
def prescribe(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="The plain recipe, as `train` takes it."),
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="D", help="Data to try on; as data=D.")] = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Such as 30m or 2h.")] = "1h",
    treatments: Annotated[
        str | None, typer.Option(metavar="A,B", help="Which to try; all that apply unless given.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Other seeds for the trials.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where it goes; prescriptions/NAME.")] = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Try treatments on your own data, in short paired trials, and see whether one really helps.

    \b
    vitclinic prescribe --data photos/ --budget 1h
    vitclinic prescribe --data photos/ --budget 30m --treatments conv_stem,sam
    vitclinic prescribe my.yaml optimizer.lr=3e-4 --budget 4h

    Selects on val by successive halving; the winner and the plain recipe then meet on fresh seeds, on test, at the same
    training time. Ends in a recipe file, or says that nothing helped. Interrupted, the same command goes on:
    docs/prescribe.md.
    """
    with _resumable("every trial that has ended is stored"):
        from vitclinic.prescribing import prescribe as try_treatments
        from vitclinic.prescribing.display import Display, show_prescription
        from vitclinic.training.overrides import parse_yaml

        console = _console(verbose, quiet)
        recipe, changes = _recipe_and_changes(words or [])
        if data is None and recipe is None and not any(word.startswith("data") for word in changes):
            raise RecipeError("Say which data to try on: --data D, or a recipe that names it.")
        with Display(console) as display:
            found = try_treatments(
                recipe,
                *changes,
                data=data,
                budget=budget,
                treatments=None if treatments is None else parse_yaml(f"[{treatments}]", "--treatments"),
                seed=seed,
                out=out,
                watcher=display,
            )
        show_prescription(found, console)


class ScaleChoice(StrEnum):
    """At which scale a study is conducted."""

    cpu = "cpu"
    paper = "paper"


@app.command()
def study(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME|FILE [KEY=VALUE]...", help="A claim or a study file, then changes to all recipes."
        ),
    ],
    data: Annotated[str | None, typer.Option(metavar="D", help="Your copy of its data, or others; as data=D.")] = None,
    scale: Annotated[ScaleChoice, typer.Option(help="cpu, or the paper's own setting.")] = ScaleChoice.cpu,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build every network, count runs and FLOPs; no training.")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many; the study says unless given.")
    ] = None,
    processes: Annotated[int, typer.Option(metavar="N", min=1, help="Runs at a time; they divide the cores.")] = 1,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="A Ray cluster; auto: the one at hand.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the runs and the result go.")] = Path("studies"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Re-test a claim of the papers, or your own: train every arm with every seed, measure, and judge.

    \b
    vitclinic study C6 --data cifar10/                  a claim of the catalogue, at CPU scale
    vitclinic study C6 --data cifar10/ --processes 2    two runs at a time
    vitclinic study C6 --scale paper --dry-run          what the paper's own setting would cost
    vitclinic study C6 --scale paper --data imagenet/ --ray auto
    vitclinic study my-study.yaml epochs=5              your own, changed

    Claims: `vitclinic list studies`. A run is trained once, whatever study asks for it; interrupted, the same command
    goes on. How a study is written and judged: docs/study.md.
    """
    with _resumable("every run is saved"):
        from vitclinic.studies.conduct import study as conduct
        from vitclinic.studies.display import show_plan, show_result
        from vitclinic.studies.estimating import plan_study
        from vitclinic.studies.progress import Display

        console = _console(verbose, quiet or as_json)
        name, changes = _recipe_and_changes(words)
        if name is None:
            raise RecipeError("Say which study: a claim of `vitclinic list studies`, or a file.")
        if dry_run:
            plan = plan_study(name, *changes, data=data, scale=scale.value, seeds=seeds)
            if as_json:
                typer.echo(json.dumps(plan.plain(), indent=2))
            show_plan(plan, console)
            return
        with Display(console) as display:
            found = conduct(
                name,
                *changes,
                data=data,
                scale=scale.value,
                seeds=seeds,
                processes=processes,
                ray=ray,
                out=out,
                watcher=display,
            )
        if as_json:
            typer.echo(json.dumps(found.plain(), indent=2, allow_nan=False))
        show_result(found, console)
    if found.failures:
        raise typer.Exit(RUNS_FAILED)


class Form(StrEnum):
    """How images are written."""

    parquet = "parquet"
    png = "png"


@app.command()
def corrupt(
    data: Annotated[str, typer.Argument(metavar="DATA", help="As `vitclinic list datasets` says.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the copies go, one folder each.")],
    corruption: Annotated[str, typer.Option(metavar="A,B", help="Names, 15 (the benchmark's) or all 19.")] = "all",
    severity: Annotated[str, typer.Option(metavar="1,2", help="1 to 5, or all.")] = "all",
    form: Annotated[Form, typer.Option("--format", help="parquet, or a folder of PNG files.")] = Form.parquet,
    split: Annotated[str, typer.Option(help="train, val, test or all.")] = "test",
    limit: Annotated[int | None, typer.Option(help="At most so many images of a split, stratified.")] = None,
    size: Annotated[int | None, typer.Option(help="Pixels a side; the data's own unless given.")] = None,
    seed: Annotated[int, typer.Option(help="Of whatever is random in corrupting.")] = 0,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Write corrupted copies of a data set, as CIFAR-10-C and ImageNet-C are of theirs: noise, blur, weather, JPEG, ...

    \b
    vitclinic corrupt photos/ --out photos-c                         all 19 corruptions at 5 severities
    vitclinic corrupt cifar10/ --out c --corruption fog --severity 3  one of them
    vitclinic examine runs/a --data photos-c/fog-3                   measure on one

    The same command goes on where it was interrupted. What the corruptions are: docs/corrupt.md.
    """
    with _resumable("what has been written is kept"):
        from vitclinic.clinic.display import Display
        from vitclinic.data.corruptions.copying import corrupt_data

        console = _console(verbose, quiet)
        with Display(console) as display:
            folders = corrupt_data(
                data,
                out,
                corruptions=corruption,
                severities=severity,
                form=form.value,
                split=split,
                limit=limit,
                size=size,
                seed=seed,
                progress=display.on_reading,
            )
        console.print(f"{len(folders)} corrupted cop{'y' if len(folders) == 1 else 'ies'} in {out}", markup=False)


@app.command("list")
def list_(
    what: Annotated[Listed, typer.Argument(help="recipes, models, treatments, datasets, probes or studies")],
    pattern: Annotated[str | None, typer.Argument(help="Only names like this, as in 'vit*'.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List what there is, by full name."""
    from fnmatch import fnmatch

    from vitclinic.listing import LISTINGS, shown

    rows = LISTINGS[what.value]()
    if pattern:
        rows = [row for row in rows if fnmatch(row["name"], pattern)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2, default=str))
    elif not sys.stdout.isatty():
        for row in rows:
            typer.echo("\t".join(shown(value) for value in row.values()))
    else:
        _print_table([{name: shown(value) for name, value in row.items()} for row in rows])


def _print_table(rows: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for number, name in enumerate(rows[0] if rows else ["name"]):
        table.add_column(name, no_wrap=number == 0)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


def _recipe_and_changes(words: list[str]) -> tuple[str | None, list[str]]:
    """The one word without `=` is the recipe."""
    recipes = [word for word in words if "=" not in word]
    if len(recipes) > 1:
        raise RecipeError(f"One recipe at a time: got {' and '.join(repr(word) for word in recipes)}.")
    return (recipes[0] if recipes else None), [word for word in words if "=" in word]


def _free_path(path: Path) -> Path:
    candidates = [path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 1000))]
    return next(candidate for candidate in candidates if not candidate.exists())


def _console(verbose: bool, quiet: bool) -> Console:
    """Where to print; under torchrun only the first process speaks."""
    from rich.console import Console
    from rich.logging import RichHandler

    level = logging.ERROR if quiet or _follows() else logging.INFO if verbose else logging.WARNING
    handler = RichHandler(console=Console(stderr=True), show_path=False, show_time=False)
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
    return Console(quiet=quiet or _follows())


def _follows() -> bool:
    """Whether another process of torchrun's is the first."""
    return os.environ.get("RANK", "0") != "0"


def _finish(run: Run, console: Console) -> None:
    from vitclinic.training.display import show_result

    show_result(run, console)
    status = run.status
    if status["status"] == "diverged":
        raise typer.Exit(DIVERGED)
    if status["status"] == "interrupted":
        raise typer.Exit(128 + int(status["signal"]))


def main() -> None:
    """The `vitclinic` command: an expected error is one sentence on stderr and an exit code."""
    try:
        app()
    except VitclinicError as error:
        if not _follows():
            typer.secho(f"error: {error}", fg=None if os.environ.get("NO_COLOR") else "red", err=True)
        sys.exit(error.exit_code)


def click_app() -> Any:
    """The command as click sees it, for the test that freezes its surface."""
    return typer.main.get_command(app)
