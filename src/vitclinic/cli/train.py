"""`vitclinic train`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitclinic._core.errors import RecipeError
from vitclinic._core.threads import choose_threads, count_cores, measure_load
from vitclinic.cli.common import (
    Quiet,
    Verbose,
    app,
    check_recipe,
    complete_words,
    console_for,
    finish,
    follows,
    import_quickly,
    recipe_and_changes,
    resumable,
)

if TYPE_CHECKING:
    from rich.console import Console


SAMPLES = 8
"""Training images that the live page shows."""
UNTRAINED = "a run that had begun goes on from its last checkpoint with: vitclinic train --resume RUN"
"""Told where Ctrl-C came before the first step, or twice; otherwise the run itself says how it was saved."""


@app.command()
def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]",
            help="A recipe's name or file, then changes to it.",
            autocompletion=complete_words,
        ),
    ] = None,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="RUN", help="Continue an interrupted run.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show network, settings, steps, FLOPs and memory, without training.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show the run in a local page while it trains.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the run, or the dry run, as JSON.")] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Train a network on your images, or on a set that comes with vitclinic.

    \b
    vitclinic train data=photos/                one sub-folder per class
    vitclinic train data=photos/ 'treatments=\\[sam]'  with a treatment
    vitclinic train shapes epochs=5             a shipped recipe, with a change
    vitclinic train my.yaml optimizer.lr=3e-4   your own recipe file
    vitclinic train data=photos/ max_time=30m   as many steps as fit
    vitclinic train data=photos/ init=runs/...  from the weights of a run
    vitclinic train chen2022-vit-b16-sam --dry-run   what it would take
    vitclinic train data=photos/ --watch        curves in a local page
    vitclinic train --resume runs/photos-...    after Ctrl-C or a crash
    torchrun --nproc-per-node 4 -m vitclinic train data=photos/

    Keys: model, init, data, treatments, task, loss, optimizer, layer_decay,
    head_lr, freeze, schedule, epochs or steps or max_time, batch_size,
    accumulate, clip, ema, progressive_resizing, late_drop_path, precision,
    compile, checkpoint, validation, test, seed, out, workers, device, parallel,
    logging.

    Values are YAML. Some keys have keys of their own, such as data.limit=500;
    docs/train.md describes them all. `vitclinic list` shows the recipes, models,
    treatments and datasets that you can name.
    """
    from vitclinic.training import Run
    from vitclinic.training import resume as resume_run
    from vitclinic.training import train as train_run
    from vitclinic.training.overrides import default_base, explain_default

    recipe, changes = recipe_and_changes(words or [])
    _refuse_contradictions(words, recipe, resume, dry_run)
    console = console_for(verbose, quiet or as_json)
    if resume is None and recipe is None and (recipe := default_base(changes)) is not None:
        console.print(explain_default(recipe), soft_wrap=True)
    if dry_run:
        _plan(recipe, changes, console, as_json)
        return
    if resume is not None:  # mistakes are told before torch is loaded
        Run.open(resume)
    else:
        check_recipe(recipe, changes)
    with resumable(UNTRAINED, same=False):  # the imports, too, and a second Ctrl-C that does not wait for the step
        with import_quickly():
            from vitclinic.training.display import Display
        _set_threads(None if resume is None else Run.open(resume).threads, console)
        with _watched(watch, recipe, changes, resume, as_json) as changes, Display(console) as display:
            if resume is not None:
                run = resume_run(resume, changes, callbacks=[display])
            else:
                run = train_run(recipe, changes, callbacks=[display])
    finish(run, console, as_json)


def _set_threads(before: int | None, console: Console) -> None:
    """Compute with as many threads as there are idle cores, or as the run had before, unless the user says how many."""
    import torch

    if "OMP_NUM_THREADS" in os.environ:  # also set by torchrun
        return
    cores = count_cores()
    if before is not None:  # with others, sums of floats would have other last bits
        torch.set_num_threads(min(before, cores))
        return
    busy = measure_load()
    threads = cores if busy is None else choose_threads(cores, busy)
    if busy is not None and threads < min(cores, torch.get_num_threads()):
        torch.set_num_threads(threads)
        console.print(
            f"{busy:.1f} of {cores} cores are busy: training with {threads} thread{'s' * (threads != 1)}"
            " (OMP_NUM_THREADS sets another number)",
            soft_wrap=True,
            highlight=False,
        )


def _refuse_contradictions(words: list[str] | None, recipe: str | None, resume: Path | None, dry_run: bool) -> None:
    """Raise for words and options that do not go together."""
    from vitclinic.training.train import NOTHING_TO_TRAIN

    if resume is not None and recipe is not None:
        raise RecipeError(f"--resume takes the run's own recipe; remove '{recipe}'.")
    if resume is None and not words:
        raise RecipeError(NOTHING_TO_TRAIN)
    if dry_run and resume is not None:
        raise RecipeError("--dry-run is for a run that has not started; remove --resume.")


@contextmanager
def _watched(
    wanted: bool, recipe: str | None, changes: list[str], resume: Path | None, as_json: bool
) -> Iterator[list[str]]:
    """Serve the live page of the folder that the run will be in, if that is wanted, and give the changes for it."""
    if not wanted or follows():
        yield changes
        return
    from vitclinic.experiments.watch.server import watch_beside
    from vitclinic.training import build_recipe

    out = resume or build_recipe(recipe, changes).out
    with watch_beside(Path(out).expanduser().absolute().parent if out else Path("runs")) as address:
        typer.echo(f"watch: {address} (while it trains)", err=as_json)
        is_said = any(re.match(r"logging\.samples=|logging=.*\bsamples\b", change, re.DOTALL) for change in changes)
        yield changes if is_said else [*changes, f"logging.samples={SAMPLES}"]


def _plan(recipe: str | None, changes: list[str], console: Console, as_json: bool) -> None:
    """Print what a run would do and take."""
    check_recipe(recipe, changes, planned=True)
    with import_quickly():
        from vitclinic.training.display import show_plan
        from vitclinic.training.plan import plan_run
    plan = plan_run(recipe, changes)
    if as_json:
        typer.echo(json.dumps(plan.plain(), indent=2))
    show_plan(plan, console)
