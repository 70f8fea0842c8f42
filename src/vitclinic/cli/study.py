"""`vitclinic study`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vitclinic._core.errors import RecipeError
from vitclinic.cli.common import RUNS_FAILED, Quiet, Verbose, app, console_for, recipe_and_changes, resumable


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
    with resumable("every run is saved"):
        from vitclinic.experiments.study.conduct import study as conduct
        from vitclinic.experiments.study.costs import plan_study
        from vitclinic.experiments.study.display import Display, show_plan, show_result

        console = console_for(verbose, quiet or as_json)
        name, changes = recipe_and_changes(words)
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
