"""The catalogue: the studies that come with the package, on data sets of the papers that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from vitclinic._core.errors import DataError, RecipeError, did_you_mean
from vitclinic._core.io import find_path, parse_yaml, read_our_yaml, read_text
from vitclinic.data import DataConfig, ImageSpec
from vitclinic.data.factory import open_source, survey
from vitclinic.data.named import find_missing_data
from vitclinic.data.source import training_count
from vitclinic.experiments.study.schema import Study, parse_study
from vitclinic.training import Recipe
from vitclinic.training.overrides import overlay


def require_data(claim: str, recipes: Iterable[Recipe]) -> None:
    """Raise a DataError if a recipe names a published set without saying where the copy is."""
    for recipe in recipes:
        named = find_missing_data(recipe.data.source)
        if named is not None:
            raise DataError(
                f"{claim} is studied on {named.title}, which does not come with vitclinic: give your copy of it, or"
                " other images, as `data` (a folder of class folders, parquet, or torchvision:NAME@FOLDER)."
            )


def data_facts(config: DataConfig) -> tuple[int, ImageSpec]:
    """Return how many training images a source has before `limit`, and their kind, without decoding all of them."""
    named = find_missing_data(config.source)
    source = open_source(config) if named is None else named.as_source()
    found = survey(source, lambda what, done, total: None)
    training = source.splits.get("train")
    images = 0 if training is None else training_count(len(training.labels), source.splits, config.held_out)
    return images, ImageSpec(len(source.classes), found.channels, found.size)


@cache
def shipped_studies() -> dict[str, str]:
    """Return the texts of the studies that come with the package, by claim, in the order of the papers."""
    folder = resources.files("vitclinic.experiments.study") / "claims"
    files = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
    names = {file.name.removesuffix(".yaml"): file for file in files}
    order = sorted(names, key=lambda name: ("PCWHG".find(name[0]), int(re.sub(r"\D", "", name) or 0), name))
    return {name: names[name].read_text(encoding="utf-8") for name in order}


@cache
def our_results() -> dict[str, dict[str, Any]]:
    """Return the results of our own runs: {claim: {verdict, seeds, date}}; docs/make_tally.py writes the file."""
    text = (resources.files("vitclinic.experiments.study") / "seen.json").read_text(encoding="utf-8")
    seen: dict[str, dict[str, Any]] = json.loads(text)
    return seen


def open_study(name: str | Path) -> Study:
    """Return a study of the catalogue, or one from a file.

    Args:
        name: A claim of the catalogue (`vitclinic list studies`), or a YAML file.

    Raises:
        RecipeError: There is no such study, or something in it is wrong.

    Example:
        >>> open_study("C6").title
        'SAM lowers the missing rate between training points'
    """
    return parse_study(read_study(name), str(name))


def read_study(name: str | Path) -> Any:
    """Return a study as plain data, as it is written, with its bases filled in; neither checked nor built.

    Raises:
        RecipeError: Where there is none of that name.
    """
    shipped = shipped_studies()
    if str(name) in shipped:
        return _fill_in_bases(read_our_yaml(shipped[str(name)]))
    text = None
    if (path := find_path(str(name), RecipeError, "a study")) is not None and not path.is_dir():
        text = read_text(path, RecipeError)
    if text is not None:
        return _fill_in_bases(parse_yaml(text, f"'{name}'"))
    raise RecipeError(
        f"There is no study '{name}' in the catalogue, and no such file.{did_you_mean(str(name), shipped)}"
        " `vitclinic list studies` lists them."
    )


def _fill_in_bases(plain: Any) -> Any:
    """Replace `like: NAME` in the bases of a study by the base of that name."""
    if not isinstance(plain, dict):
        return plain
    scale = plain.get("paper_scale")
    if isinstance(scale, dict) and "base" in scale:
        plain = {**plain, "paper_scale": {**scale, "base": _fill_in_base(scale["base"])}}
    return {**plain, "base": _fill_in_base(plain["base"])} if "base" in plain else plain


def _fill_in_base(base: Any) -> Any:
    if not isinstance(base, dict) or "like" not in base:
        return base
    known = _bases()
    name = str(base["like"])
    if name not in known:
        raise RecipeError(
            f"There is no base '{name}' for studies.{did_you_mean(name, known)} There are {', '.join(known)}."
        )
    return overlay(known[name], {key: value for key, value in base.items() if key != "like"})


@cache
def _bases() -> dict[str, Any]:
    """Return the recipes that studies are built on, by name."""
    folder = resources.files("vitclinic.experiments.study") / "claims" / "bases"
    names = {file.name.removesuffix(".yaml"): file for file in folder.iterdir()}
    return {name: read_our_yaml(file.read_text(encoding="utf-8")) for name, file in names.items()}
