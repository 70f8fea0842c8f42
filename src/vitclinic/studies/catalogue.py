"""The catalogue: one YAML file for each claim of the papers, in `claims/`.

What several studies train alike is a part of a recipe in `claims/bases/`; `like: NAME` in a study's `base` (or that of
its `paper_scale`) lays the rest over it.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from vitclinic.errors import RecipeError, did_you_mean
from vitclinic.studies.study import Study, parse_study
from vitclinic.training.overrides import laid_over, parse_yaml


@cache
def shipped_studies() -> dict[str, str]:
    """The texts of the studies that come with the package, by claim, in the order of the papers' claims."""
    folder = resources.files("vitclinic") / "studies" / "claims"
    files = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
    names = {file.name.removesuffix(".yaml"): file for file in files}
    order = sorted(names, key=lambda name: ("PCWHG".find(name[0]), int(name[1:]) if name[1:].isdigit() else 0, name))
    return {name: names[name].read_text(encoding="utf-8") for name in order}


@cache
def seen_results() -> dict[str, dict[str, Any]]:
    """What our own runs say of claims: {claim: {verdict, seeds, date}}; docs/make_tally.py writes the file."""
    text = (resources.files("vitclinic") / "studies" / "seen.json").read_text(encoding="utf-8")
    seen: dict[str, dict[str, Any]] = json.loads(text)
    return seen


def open_study(name: str | Path) -> Study:
    """A study of the catalogue by its claim, or from a file.

    Example:
        >>> open_study("C6").title
        'SAM lowers the missing rate between training points'
    """
    shipped = shipped_studies()
    path = Path(name).expanduser()
    text = shipped.get(str(name)) or (path.read_text(encoding="utf-8") if path.is_file() else None)
    if text is not None:
        return parse_study(_on_bases(parse_yaml(text, f"'{name}'")), str(name))
    raise RecipeError(
        f"There is no study '{name}', in the catalogue or as a file.{did_you_mean(str(name), shipped)}"
        " `vitclinic list studies` lists them."
    )


def _on_bases(plain: Any) -> Any:
    """The study with what its bases are like written out."""
    if not isinstance(plain, dict):
        return plain
    scale = plain.get("paper_scale")
    if isinstance(scale, dict) and "base" in scale:
        plain = {**plain, "paper_scale": {**scale, "base": _on_base(scale["base"])}}
    return {**plain, "base": _on_base(plain["base"])} if "base" in plain else plain


def _on_base(base: Any) -> Any:
    if not isinstance(base, dict) or "like" not in base:
        return base
    folder = resources.files("vitclinic") / "studies" / "claims" / "bases"
    known = {file.name.removesuffix(".yaml"): file for file in folder.iterdir()}
    name = str(base["like"])
    if name not in known:
        raise RecipeError(
            f"There is no base '{name}' for a study.{did_you_mean(name, known)} Known: {', '.join(known)}."
        )
    below = parse_yaml(known[name].read_text(encoding="utf-8"), f"the base '{name}'")
    return laid_over(below, {key: value for key, value in base.items() if key != "like"})
