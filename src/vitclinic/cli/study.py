"""`vitclinic study`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitclinic._core.errors import RecipeError
from vitclinic._core.io import sign
from vitclinic.cli.common import (
    RUNS_FAILED,
    Quiet,
    Verbose,
    app,
    check_data,
    console_for,
    named_path,
    recipe_and_changes,
    resumable,
)

if TYPE_CHECKING:
    from rich.console import Console

    from vitclinic.experiments.study.conduct import StudyResult


class ScaleChoice(StrEnum):
    """The scale at which to conduct a study."""

    cpu = "cpu"
    paper = "paper"


@app.command()
def study(
    words: Annotated[
        list[str],
        typer.Argument(metavar="NAME|FILE [KEY=VALUE]", help="A claim or a study file, then changes to every recipe."),
    ],
    data: Annotated[str | None, typer.Option(metavar="D", help="Your copy of its data, or other images.")] = None,
    scale: Annotated[ScaleChoice, typer.Option(help="cpu: scaled down; paper: as published.")] = ScaleChoice.cpu,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what it would cost, without training.")] = False,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many seeds; default: as many as the study says.")
    ] = None,
    processes: Annotated[int, typer.Option(metavar="N", min=1, help="How many runs to train at a time.")] = 1,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="A Ray cluster to train on, or auto.")] = None,
    slurm: Annotated[
        str | None,
        typer.Option(metavar="OPTIONS", help="Train in SLURM jobs: partition=gpu,time=8h,gpus=1, or auto."),
    ] = None,
    cores: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Cores of each run with --ray or --slurm; 1 unless given.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="GPUs of each run with --ray (1 if there are any) or --slurm (none)."),
    ] = None,
    out: Annotated[Path, typer.Option(parser=named_path, metavar="DIR", help="Folder for runs and results.")] = Path(
        "studies"
    ),
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="ARM=TARGET", help="Measure a network, such as timm:NAME, instead of training this arm."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Re-test a claim of the papers, or one of your own, over several seeds.

    \b
    vitclinic study C6 --data cifar10/                a claim, at CPU scale
    vitclinic study C6 --data cifar10/ --processes 2  two runs at a time
    vitclinic study C6 --scale paper --dry-run        the paper's own cost
    vitclinic study C6 --scale paper --data imagenet/ --ray auto --cores 8
    vitclinic study C6 --data cifar10/ --slurm partition=gpu,time=8h,gpus=1
    vitclinic study my-study.yaml epochs=5            your own, with a change
    vitclinic study P6 --data imagenet/ --target ResNet=timm:resnet50

    Trains every arm with every seed, measures the runs and says whether the claim
    holds, with intervals. `vitclinic list studies` shows the claims. After an
    interruption, run the same command to continue; studies share the runs that
    they have in common. How to write a study: docs/study.md.
    """
    name, changes = recipe_and_changes(words)
    if name is None:
        raise RecipeError("Which study? Name a claim of `vitclinic list studies`, or a file.")
    if ray is not None and slurm is not None:
        raise RecipeError("--ray and --slurm are two clusters; choose one.")
    if ray is None and slurm is None and (cores, gpus) != (None, None):
        raise RecipeError("--cores and --gpus are those of a run on a cluster; name one with --ray or --slurm.")
    _refuse_typos(name, data)
    with resumable("every run is saved"):
        console = console_for(verbose, quiet or as_json)
        asked = {"data": data, "scale": scale.value, "seeds": seeds}
        if dry_run:
            _plan(name, changes, asked, console, as_json)
            return
        where = {"processes": processes, "ray": ray, "slurm": slurm, "cores": cores, "gpus": gpus, "out": out}
        found = _conduct(name, changes, {**asked, **where, "targets": _parse_targets(target or [])}, console, as_json)
    if found.failures:
        raise typer.Exit(RUNS_FAILED)


def _plan(name: str, changes: list[str], asked: dict[str, Any], console: Console, as_json: bool) -> None:
    """Print what a study would train and cost."""
    from vitclinic.experiments.display import show_plan
    from vitclinic.experiments.study.costs import plan_study

    plan = plan_study(name, changes, **asked)
    if as_json:
        typer.echo(json.dumps(plan.plain(), indent=2))
    show_plan(plan, console)


def _conduct(name: str, changes: list[str], asked: dict[str, Any], console: Console, as_json: bool) -> StudyResult:
    """Conduct a study and print its result."""
    from vitclinic.experiments.display import StudyDisplay, show_result
    from vitclinic.experiments.study.conduct import study as conduct

    with StudyDisplay(console) as display:
        found = conduct(name, changes, **asked, callbacks=[display])
    if as_json:
        typer.echo(json.dumps(sign(found.plain()), indent=2, allow_nan=False))
    show_result(found, console)
    return found


def _parse_targets(words: list[str]) -> dict[str, list[str]]:
    """Return the targets of each arm, in the order given: one for each seed."""
    found: dict[str, list[str]] = {}
    for word in words:
        arm, equals, name = word.partition("=")
        if not (arm and equals and name):
            raise RecipeError(f"'{word}' names no target of an arm: write --target ARM=timm:NAME.")
        found.setdefault(arm, []).append(name)
    return found


def _refuse_typos(name: str, data: str | None) -> None:
    """Raise for a study or data that is not there, before torch is loaded."""
    from vitclinic.data.named import find_missing_data
    from vitclinic.experiments.study.catalogue import read_study

    read_study(name)
    if data is None or find_missing_data(data) is None:
        check_data(data)
