"""Recipes from a name, a file or plain data, with overrides applied and validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from vitclinic._core.config import Config, section, validate
from vitclinic._core.errors import RecipeError, did_you_mean
from vitclinic._core.io import find_path, parse_yaml, read_text
from vitclinic.training.recipe import LENGTHS, Recipe
from vitclinic.treatments import Treatments


def read_shipped_recipes() -> dict[str, str]:
    """Read the recipes that ship with the package: YAML texts by name."""
    folder = resources.files("vitclinic") / "recipes"
    files = {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}
    return {name: files[name].read_text(encoding="utf-8") for name in sorted(files)}


DEFAULT = "small"
"""The shipped recipe of a run that names neither a recipe nor a network."""
WHY_DEFAULT = (
    "recipe small, as neither a recipe nor a network is named: convolutions before attention learn more from few images"
    " than a plain ViT in the same time (docs/results/cure.md)"
)
TASK_RECIPES = ("segmentation", "detection")
"""Tasks with a recipe of their name, for the embedded scenes: that of a run that names neither data nor a network."""


def explain_default(name: str) -> str:
    """Return why a run that names no recipe has this one."""
    if name == DEFAULT:
        return WHY_DEFAULT
    return f"recipe {name}, as neither data nor a network is named: the embedded scenes (docs/results/scenes.md)"


Overrides = Mapping[str, Any] | Sequence[str]
"""Changes to a recipe: `{"optimizer.lr": 3e-4}`, nested plain data, or `key=value` words (`optimizer.lr=3e-4`)."""


def build_recipe(
    base: Recipe | str | Path | Mapping[str, Any] | None = None, overrides: Overrides | None = None, **keys: Any
) -> Recipe:
    """Build a validated recipe.

    Args:
        base: Name of a shipped recipe, YAML file, plain data or `Recipe`; None starts from the defaults.
        overrides: Changes to it. In `key=value` words the value is parsed as YAML, as on the command line; values of
            a mapping are used as they are.
        **keys: Top-level keys of the recipe. They win over `overrides`; None means "not given".

    Returns:
        The recipe, with every key validated.

    Raises:
        RecipeError: A key is unknown, a value is invalid, or keys contradict each other.

    Example:
        >>> build_recipe({"data": "digits"}, ["data.limit=100", "optimizer.lr=3e-4"]).optimizer.lr
        0.0003
        >>> build_recipe("digits", {"optimizer.lr": 3e-4, "data": {"limit": 100}}, epochs=2).data.limit
        100
    """
    given = {key: value for key, value in keys.items() if value is not None}
    changes = merge(Recipe, _changes(overrides), _changes(given))
    if isinstance(base, Recipe):
        if not changes:
            return base
        base = base.plain()
    lower = merge(Recipe, {}, to_plain(base) if isinstance(base, Mapping) else _read(base))
    return validate(Recipe, overlay(lower, changes))


def default_base(overrides: Overrides | None = None, **keys: Any) -> str | None:
    """Return the name of the recipe to start from if none is named: `small`, or None with a network, weights or task.

    A task that has a recipe for the embedded scenes starts from it if no data is named either.

    Example:
        >>> default_base(["data=photos/"]), default_base(["data=photos/", "model=resnet18"]), default_base(task="own")
        ('small', None, None)
        >>> default_base(task="segmentation"), default_base(task="segmentation", data="streets/")
        ('segmentation', None)
    """
    given = {**_changes(overrides), **_changes({key: value for key, value in keys.items() if value is not None})}
    task = given.get("task")
    task = task if isinstance(task, str) else _name(given, "task")
    if task in TASK_RECIPES and not given.keys() & {"model", "init", "data"}:
        return str(task)
    return None if given.keys() & {"model", "init", "task"} else DEFAULT


def _changes(overrides: Overrides | None) -> dict[str, Any]:
    """Turn overrides into one tree of plain data; later ones win."""
    if isinstance(overrides, str):
        raise RecipeError(f"Overrides must be a mapping or a list of 'key=value' words; got the string '{overrides}'.")
    if isinstance(overrides, Mapping):
        trees = [nest(key, to_plain(value)) for key, value in overrides.items()]
    else:
        trees = [parse_word(word) for word in overrides or ()]
    changes: dict[str, Any] = {}
    for tree in trees:
        changes = merge(Recipe, changes, tree)
    return changes


def nest(key: str, value: Any) -> dict[str, Any]:
    """Return `{"a": {"b": value}}` for the key `a.b`."""
    tree = value
    for part in reversed(key.strip().split(".")):
        tree = {part: tree}
    return dict(tree)


def to_plain(value: Any) -> Any:
    """Convert a Python value to what a recipe file would contain: paths as strings, tuples as lists."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, Treatments):
        return [to_plain(item) for item in value]
    return value


def overlay(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `upper` over `lower`; a length, network or task given in `upper` replaces that of `lower` entirely."""
    kept = merge(Recipe, {}, lower)
    changes = merge(Recipe, {}, upper)
    if any(changes.get(length) is not None for length in LENGTHS):
        kept = {key: value for key, value in kept.items() if key not in LENGTHS}
    for key in ("model", "task"):  # keywords belong to one network, options to one task
        if _name(changes, key) not in (None, _name(kept, key)):
            kept.pop(key, None)
    return merge(Recipe, kept, changes)


def _name(recipe: Mapping[str, Any], key: str) -> Any:
    """Return the name of the network or task in (part of) a recipe, or None."""
    part = recipe.get(key)
    return part.get("name") if isinstance(part, Mapping) else getattr(part, "name", None)


def parse_word(word: str) -> dict[str, Any]:
    """Return `{"a": {"b": 1}}` for the word `a.b=1`; the value is YAML."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise RecipeError(f"'{word}' is not of the form key=value.")
    if not text.strip():
        raise RecipeError(f"'{word}' has no value; leave it out, or write {key}=null for none.")
    return nest(key, parse_yaml(text, f"the value of '{key}'"))


def merge(config: type[Config], lower: dict[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `upper` over `lower`, section by section; a bare value for a section sets its main key."""
    merged = dict(lower)
    for key, value in upper.items():
        inner = section(config, key)
        if inner is not None and value is not None:
            expanded, before = inner.expand(value), merged.get(key) or {}
            if isinstance(expanded, Mapping) and not isinstance(before, Mapping | Config):
                raise RecipeError(f"'{key}' is both {before!r} and has keys of its own; write one of the two.")
            merged[key] = merge(inner, dict(before), expanded) if isinstance(expanded, Mapping) else value
        else:
            merged[key] = value
    return merged


def _read(base: str | Path | None) -> dict[str, Any]:
    if base is None:
        return {}
    shipped = read_shipped_recipes()
    if str(base) in shipped:
        text = shipped[str(base)]
    elif (found := find_path(str(base), RecipeError, "a recipe")) is not None and not found.is_dir():
        text = read_text(found, RecipeError)
    elif found is not None and found.is_dir():
        raise RecipeError(f"'{base}' is a folder, not a recipe; to train on it, write data={base}.")
    else:
        raise RecipeError(
            f"There is no recipe '{base}', neither shipped nor as a file.{did_you_mean(str(base), shipped)}"
            f" Shipped: {', '.join(shipped)}."
        )
    plain = parse_yaml(text, f"'{base}'") or {}
    if not isinstance(plain, dict):
        raise RecipeError(f"'{base}' holds a {type(plain).__name__}; a recipe is a mapping of keys to values.")
    return plain
