"""`vitclinic prescribe`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitclinic._core.errors import RecipeError
from vitclinic.cli.common import (
    Quiet,
    Verbose,
    app,
    check_recipe,
    complete_words,
    console_for,
    named_path,
    recipe_and_changes,
    resumable,
)

if TYPE_CHECKING:
    from rich.console import Console


@app.command()
def prescribe(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]",
            help="The recipe to improve, as for `train`.",
            autocompletion=complete_words,
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="D", help="Your data.")] = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Time for everything, such as 30m or 2h.")] = "1h",
    tried: Annotated[
        list[str] | None,
        typer.Option("--try", metavar="NAME", help="A remedy to try, or KEY=VALUE; can be repeated."),
    ] = None,
    treatments: Annotated[str | None, typer.Option(metavar="A,B", help="Treatments to try.")] = None,
    examined: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Try first what the findings of this examined run suggest."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Repeat with other seeds.")] = 0,
    out: Annotated[
        Path | None, typer.Option(parser=named_path, metavar="DIR", help="Folder; default: prescriptions/NAME.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Try remedies on your own data in short trials, and find out what really helps.

    \b
    vitclinic prescribe --data photos/ --budget 1h
    vitclinic prescribe my.yaml optimizer.lr=3e-4 --budget 4h
    vitclinic prescribe --data photos/ --from runs/a   what it suggests first
    vitclinic prescribe --data photos/ --try 'lr x 3' --try model.depth=4
    vitclinic prescribe --data photos/ --treatments conv_stem,sam

    A remedy changes the recipe: the network, its stem, the learning rate, the
    augmentation, a treatment ... `vitclinic list remedies` has them in the order
    in which they are tried; the first twelve that apply are, unless you name
    some.

    Short trials select on the validation images, and combine what helps. The
    winner is then compared with the plain recipe on the test images, with new
    seeds and the same training time. You get a recipe file, or the answer that
    nothing helped. After an interruption, run the same command to continue.
    More: docs/prescribe.md.
    """
    recipe, changes = recipe_and_changes(words or [])
    if data is None and recipe is None and not any(word.startswith("data") for word in changes):
        raise RecipeError("Which data? Give --data D, or a recipe that names it.")
    check_recipe(recipe, changes, data)
    named = _refuse_typos(budget, treatments, examined)
    _refuse_unknown(tried, recipe, changes)
    asked = {"data": data, "budget": budget, "treatments": named, "remedies": tried or None, "examined": examined}
    with resumable("every trial that has ended is stored"):
        _try_remedies(
            recipe, changes, {**asked, "seed": seed, "out": out}, console_for(verbose, quiet or as_json), as_json
        )


def _try_remedies(
    recipe: str | None, changes: list[str], asked: dict[str, Any], console: Console, as_json: bool
) -> None:
    """Prescribe, and print what was found."""
    from vitclinic.experiments.display import PrescriptionDisplay, show_prescription
    from vitclinic.experiments.prescribe.conduct import prescribe as try_remedies

    with PrescriptionDisplay(console) as display:
        found = try_remedies(recipe, changes, **asked, callbacks=[display])
    if as_json:
        facts = {"folder": str(found.folder), "file": None if found.file is None else str(found.file)}
        typer.echo(json.dumps({**facts, **found.record()}, indent=2))
    show_prescription(found, console)


def _refuse_typos(budget: str, treatments: str | None, examined: Path | None) -> list[Any] | None:
    """Return the treatments that are named; raise for a mistake that shows before torch is loaded."""
    from vitclinic._core.io import parse_yaml
    from vitclinic._core.time import parse_budget
    from vitclinic.training import Run
    from vitclinic.treatments.treatment import TREATMENTS

    parse_budget(budget)
    if examined is not None:
        Run.open(examined)
    if treatments is None:
        return None
    named: list[Any] = parse_yaml(f"[{treatments}]", "--treatments")
    for entry in named:
        for name, options in entry.items() if isinstance(entry, dict) else [(entry, None)]:
            TREATMENTS.check(name, options)
    return named


def _refuse_unknown(remedies: list[str] | None, recipe: str | None, changes: list[str]) -> None:
    """Raise for a remedy that there is not, before torch is loaded."""
    from vitclinic.experiments.prescribe.remedies import find_remedy
    from vitclinic.training import build_recipe

    for name in remedies or ():
        find_remedy(name, build_recipe(recipe, changes))
