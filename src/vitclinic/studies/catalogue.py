"""The catalogue: one YAML file for each claim of the papers, in `claims/`."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

from vitclinic.errors import RecipeError, did_you_mean
from vitclinic.studies.study import Study, parse_study
from vitclinic.training.overrides import parse_yaml


@cache
def shipped_studies() -> dict[str, str]:
    """The texts of the studies that come with the package, by claim, in the order of the papers' claims."""
    folder = resources.files("vitclinic") / "studies" / "claims"
    files = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
    names = {file.name.removesuffix(".yaml"): file for file in files}
    order = sorted(names, key=lambda name: ("PCWHG".find(name[0]), int(name[1:]) if name[1:].isdigit() else 0, name))
    return {name: names[name].read_text(encoding="utf-8") for name in order}


def open_study(name: str | Path) -> Study:
    """A study of the catalogue by its claim, or from a file.

    Example:
        >>> open_study("C6").title
        'SAM lowers the missing rate between training points'
    """
    shipped = shipped_studies()
    if str(name) in shipped:
        return parse_study(parse_yaml(shipped[str(name)], f"'{name}'"), str(name))
    path = Path(name).expanduser()
    if path.is_file():
        return parse_study(parse_yaml(path.read_text(encoding="utf-8"), f"'{name}'"), str(name))
    raise RecipeError(
        f"There is no study '{name}', in the catalogue or as a file.{did_you_mean(str(name), shipped)}"
        " `vitclinic list studies` lists them."
    )
