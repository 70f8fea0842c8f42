"""`vitclinic prescribe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitclinic._core.errors import RecipeError
from vitclinic.cli.common import Quiet, Verbose, app, console_for, recipe_and_changes, resumable


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
    examined: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="An examined run: what its findings suggest comes first."),
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
    vitclinic prescribe --data photos/ --from runs/a        what its findings suggest comes first

    Selects on val by successive halving; the winner and the plain recipe then meet on fresh seeds, on test, at the same
    training time. Ends in a recipe file, or says that nothing helped. Interrupted, the same command goes on:
    docs/prescribe.md.
    """
    recipe, changes = recipe_and_changes(words or [])
    if data is None and recipe is None and not any(word.startswith("data") for word in changes):
        raise RecipeError("Say which data to try on: --data D, or a recipe that names it.")
    with resumable("every trial that has ended is stored"):
        from vitclinic.experiments.prescribe import prescribe as try_treatments
        from vitclinic.experiments.prescribe.display import Display, show_prescription
        from vitclinic.training.overrides import parse_yaml

        console = console_for(verbose, quiet)
        first: list[str] = []
        if examined is not None:
            from vitclinic.experiments.prescribe.arms import suggested_treatments

            first = suggested_treatments(examined)
        with Display(console) as display:
            found = try_treatments(
                recipe,
                *changes,
                data=data,
                budget=budget,
                treatments=None if treatments is None else parse_yaml(f"[{treatments}]", "--treatments"),
                first=first,
                seed=seed,
                out=out,
                watcher=display,
            )
        show_prescription(found, console)
