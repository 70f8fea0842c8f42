"""Write the tables of recipe keys (docs/train.md) and of the papers' recipes (docs/recipes.md), so that none drifts.

python docs/make_keys.py            rewrite the tables
python docs/make_keys.py --check    fail if one is not current (a test does this)
"""

from __future__ import annotations

import sys
import types
import typing
from pathlib import Path

from pydantic.fields import FieldInfo

from vitclinic._core.config import Config, section
from vitclinic.cli.list import TWO_CORES, describe_recipes
from vitclinic.tasks import Task
from vitclinic.training import Recipe, build_recipe
from vitclinic.treatments import Treatments

DOCS = Path(__file__).parent


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


def keys() -> list[str]:
    return ["| key | takes | default | |", "|---|---|---|---|", *rows(Recipe)]


def recipes() -> list[str]:
    """One row for each of the papers' recipes, from its file."""
    lines = ["| recipe | network | treatments | lr, weight decay | batch, epochs, warm-up | the paper's score |"]
    lines.append("|---|---|---|---|---|---|")
    for found in describe_recipes():
        if found["scale"] == TWO_CORES:
            continue
        recipe = build_recipe(found["name"])
        optimizer, warmup = recipe.optimizer, recipe.schedule.warmup
        length = f"{recipe.steps:,} steps" if recipe.epochs is None else f"{recipe.epochs:g}"
        treatments = ", ".join(f"[{t.name}](treatments/{t.name}.md)" for t in recipe.treatments)
        rho = next((f", rho {t.rho:g}" for t in recipe.treatments if t.name == "sam"), "")
        cells = [
            f"`{found['name']}` [{found['scale'].removeprefix('paper: ')}]",
            f"`{recipe.model.name}`",
            f"{treatments}{rho}",
            f"{optimizer.name} {optimizer.lr:g}, {optimizer.weight_decay:g}",
            f"{recipe.batch_size:,}, {length}, {warmup if isinstance(warmup, str) else f'{warmup} epochs'}",
            found["expect"].removesuffix("; not run by us"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


TABLES = {("train.md", "keys"): keys, ("recipes.md", "recipes"): recipes}


def page(file: str, table: str) -> str:
    begin, end = f"<!-- {table}: made by docs/make_keys.py -->", f"<!-- end of {table} -->"
    text = (DOCS / file).read_text(encoding="utf-8")
    lines = "\n".join(TABLES[file, table]())
    return f"{text.split(begin)[0]}{begin}\n{lines}\n{end}{text.split(end)[1]}"


if __name__ == "__main__":
    for file, table in TABLES:
        if "--check" not in sys.argv:
            (DOCS / file).write_text(page(file, table), encoding="utf-8")
        elif page(file, table) != (DOCS / file).read_text(encoding="utf-8"):
            sys.exit(f"docs/{file} is not current: run docs/make_keys.py")
