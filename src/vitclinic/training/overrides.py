"""From a recipe file and `key=value` words to a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from vitclinic.config import Config, section, validate
from vitclinic.errors import RecipeError, did_you_mean
from vitclinic.once import read_yaml
from vitclinic.training.recipe import LENGTHS, Recipe


def shipped_recipes() -> dict[str, str]:
    """The recipes that come with the package: name -> text."""
    folder = resources.files("vitclinic") / "recipes"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    return {file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8") for file in files}


def build_recipe(base: str | Path | Mapping[str, Any] | None = None, words: Sequence[str] = ()) -> Recipe:
    """A recipe from a shipped recipe's name, a YAML file or plain data, changed by `key=value` words.

    Example:
        >>> build_recipe({"data": "digits"}, ["data.limit=100", "optimizer.lr=3e-4"]).optimizer.lr
        0.0003
    """
    lower = merge(Recipe, {}, dict(base) if isinstance(base, Mapping) else _read(base))
    upper: dict[str, Any] = {}
    for word in words:
        upper = merge(Recipe, upper, parse_word(word))
    return validate(Recipe, laid_over(lower, upper))


def laid_over(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a recipe changed by another, which has its own way to say how long to train, and on what network."""
    kept = merge(Recipe, {}, lower)
    changes = merge(Recipe, {}, upper)
    if any(changes.get(length) is not None for length in LENGTHS):
        kept = {key: value for key, value in kept.items() if key not in LENGTHS}
    if _name(changes) not in (None, _name(kept)):  # the keywords were written for another network
        kept.pop("model", None)
    return merge(Recipe, kept, changes)


def _name(recipe: Mapping[str, Any]) -> Any:
    """The network that a part of a recipe names, if it does."""
    model = recipe.get("model")
    return model.get("name") if isinstance(model, Mapping) else None


def parse_word(word: str) -> dict[str, Any]:
    """`a.b=1` as `{"a": {"b": 1}}`; the value is YAML."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise RecipeError(f"'{word}' is not of the form key=value.")
    tree: Any = parse_yaml(text, f"the value of '{key}'")
    for part in reversed(key.strip().split(".")):
        tree = {part: tree}
    return dict(tree)


def parse_yaml(text: str, what: str) -> Any:
    try:
        value = read_yaml(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{what} is not YAML: {reason}") from error
    return _numbers(value)


def _numbers(value: Any) -> Any:
    """YAML 1.1 takes `1e-3` for a string; everybody means the number."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, str) and "e" in value.lower():
        try:
            return float(value)
        except ValueError:
            return value
    return value


def merge(config: type[Config], lower: dict[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """`lower` with `upper` laid over it, section by section; a bare value for a section sets its main key."""
    merged = dict(lower)
    for key, value in upper.items():
        inner = section(config, key)
        if inner is not None and value is not None:
            expanded = inner.expand(value)
            merged[key] = merge(inner, merged.get(key, {}), expanded) if isinstance(expanded, Mapping) else value
        else:
            merged[key] = value
    return merged


def _read(base: str | Path | None) -> dict[str, Any]:
    if base is None:
        return {}
    shipped = shipped_recipes()
    if str(base) in shipped:
        text = shipped[str(base)]
    elif Path(base).is_file():
        text = Path(base).read_text(encoding="utf-8")
    elif Path(base).is_dir():
        raise RecipeError(f"'{base}' is a folder, not a recipe; to train on it write data={base}.")
    else:
        raise RecipeError(
            f"There is no recipe '{base}', shipped or as a file.{did_you_mean(str(base), shipped)}"
            f" Shipped: {', '.join(shipped)}."
        )
    plain = parse_yaml(text, f"'{base}'") or {}
    if not isinstance(plain, dict):
        raise RecipeError(f"'{base}' holds {type(plain).__name__}, expected keys and values.")
    return plain
