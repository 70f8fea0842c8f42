"""The data sets that the papers used and that do not come with vitclinic: a study names them, its user has them.

`data: {source: cifar10}` in a study means the set itself, wherever the user's copy lies (`--data`). Without one, a dry
run still knows how many images there are, and of what kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vitclinic.data import DataConfig
from vitclinic.data.dataset import open_source
from vitclinic.data.splits import training_count
from vitclinic.data.survey import survey
from vitclinic.errors import DataError
from vitclinic.training import Recipe
from vitclinic.treatments import Case


@dataclass(frozen=True)
class NamedData:
    """A published data set of colour images."""

    title: str
    images: int
    """For training."""
    classes: int
    size: int
    """Pixels a side, as it is trained on."""
    held_out: tuple[str, ...]
    """The splits that it has beside."""


NAMED_DATA = {
    "cifar10": NamedData("CIFAR-10", 50_000, 10, 32, ("test",)),
    "cifar100": NamedData("CIFAR-100", 50_000, 100, 32, ("test",)),
    "imagenet": NamedData("ImageNet", 1_281_167, 1000, 224, ("val",)),
    "imagenet21k": NamedData("ImageNet-21k", 14_197_122, 21_843, 224, ()),
}


def missing_data(source: str) -> NamedData | None:
    """The set that a source names, where nothing lies at a path of that name."""
    return None if Path(source).exists() else NAMED_DATA.get(source)


def require_data(claim: str, recipes: Iterable[Recipe]) -> None:
    """One sentence for data that only its user has."""
    for recipe in recipes:
        named = missing_data(recipe.data.source)
        if named is not None:
            raise DataError(
                f"{claim} is studied on {named.title}, which does not come with vitclinic: say where your copy is, or"
                " which other images to use, with --data (a folder of class folders, parquet, or"
                " torchvision:NAME@FOLDER)."
            )


def data_facts(config: DataConfig) -> tuple[int, Case]:
    """How many training images a source has before `limit`, and their kind; no image of it is decoded."""
    named = missing_data(config.source)
    if named is not None:
        return training_count(named.images, named.held_out), Case(named.classes, 3, (named.size, named.size))
    source = open_source(config)
    found = survey(source, lambda what, done, total: None)
    training = source.splits.get("train")
    images = 0 if training is None else training_count(len(training.labels), source.splits)
    return images, Case(len(source.classes), found.channels, found.size)
