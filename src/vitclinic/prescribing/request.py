"""What was asked for: the plain recipe, its data, the budget and where the prescription goes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitclinic.data import Dataset
from vitclinic.data.source import fingerprint
from vitclinic.durations import seconds
from vitclinic.errors import DataError, RecipeError
from vitclinic.files import write_errors
from vitclinic.prescribing.ledger import FILE
from vitclinic.training import Recipe, Run, build_recipe

LEAST_IMAGES = 50
"""Of val and of test: fewer cannot tell arms apart."""


def plain_recipe(
    recipe: Recipe | str | Path | Mapping[str, Any] | None, words: Sequence[str], data: str | None
) -> Recipe:
    """The recipe to compare with. Its seed is the prescription's to choose."""
    if isinstance(recipe, Recipe):
        recipe = recipe.plain()
    resolved = build_recipe(recipe, words)
    if data is not None:
        resolved = resolved.model_copy(update={"data": resolved.data.model_copy(update={"source": data})})
    if resolved.out is not None:
        raise RecipeError("out= is for one run; say where a prescription goes with --out (Python: out=).")
    if not resolved.test:
        raise RecipeError("test=false leaves the final comparison without its measure; remove it.")
    return resolved.model_copy(update={"seed": 0})


def budget_seconds(budget: str | float) -> float:
    """`--budget` in seconds."""
    try:
        time = seconds(budget)
    except ValueError as error:
        raise RecipeError(f"--budget: {error} (got '{budget}').") from None
    if time <= 0:
        raise RecipeError("--budget: the time must be longer than nothing.")
    return time


def check_data(dataset: Dataset) -> None:
    """A sentence for a set that has too few images to select or to compare on."""
    dataset.check_trainable()
    for split, use in (("val", "selects"), ("test", "compares in the end")):
        count = len(dataset.splits[split])
        if count < LEAST_IMAGES:
            raise DataError(
                f"'{dataset.name}' has {count} {split} images, and prescribe {use} on them: {LEAST_IMAGES} are needed"
                f" at least ({10 * LEAST_IMAGES} images in all, where a tenth of them is held out)."
            )


def folder_of(out: str | Path | None, recipe: Recipe, dataset: Dataset, identity: Mapping[str, Any]) -> Path:
    """Where it goes: the same place for the same question, so that the same command goes on."""
    if out is None:
        name = "-".join([Path(dataset.name).name, recipe.model.name, fingerprint(identity)[:8]])
        folder = Path("prescriptions") / re.sub(r"[^\w.,=-]+", "-", name)
    else:
        folder = Path(out).expanduser()
    if not (folder / FILE).is_file():
        Run(folder).refuse_foreign_files()
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder
