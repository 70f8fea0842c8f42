"""Write the table of recipe keys in docs/train.md from the configs, so that it cannot drift.

python docs/make_keys.py            rewrite the table
python docs/make_keys.py --check    fail if it is not current (a test does this)
"""

from __future__ import annotations

import sys
import types
import typing
from pathlib import Path

from pydantic.fields import FieldInfo

from vitclinic._core.config import Config, section
from vitclinic.tasks import Task
from vitclinic.training import Recipe
from vitclinic.treatments import Treatments

PAGE = Path(__file__).parent / "train.md"
BEGIN, END = "<!-- keys: made by docs/make_keys.py -->", "<!-- end of keys -->"


def rows(config: type[Config], prefix: str = "") -> list[str]:
    lines = []
    for name, field in config.model_fields.items():
        inner = section(config, name)
        if inner is Task:
            lines.append(f"| `{prefix}{name}` | name | `{field.default.name}` | {field.description} |")
        elif inner is not None:
            lines += rows(inner, f"{prefix}{name}.")
        else:
            lines.append(row(prefix + name, field))
    return lines


def row(name: str, field: FieldInfo) -> str:
    default = "" if field.default is None else f"`{'[]' if field.default == () else field.default}`"
    return f"| `{name}` | {values(field.annotation)} | {default} | {field.description or ''} |"


def values(annotation: typing.Any) -> str:
    """What a key takes, in a word or two."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is typing.Annotated:
        return values(inner[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(values(part) for part in inner if part is not type(None)))
    if origin is list:
        return "list"
    return {int: "integer", float: "number", str: "text", bool: "true, false", Treatments: "list"}.get(annotation, "")


def page() -> str:
    table = "\n".join(["| key | takes | default | |", "|---|---|---|---|", *rows(Recipe)])
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(
            0 if page() == PAGE.read_text(encoding="utf-8") else "docs/train.md is not current: run docs/make_keys.py"
        )
    PAGE.write_text(page(), encoding="utf-8")
