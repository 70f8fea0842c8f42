"""What `vitclinic list` lists."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from vitclinic._core.config import Config
from vitclinic.cli.common import app

Rows = list[dict[str, Any]]
"""Values are text, lists of it, or options as {name: {default, description}}: `shown` writes them in a line."""


def list_recipes() -> Rows:
    """Shipped recipes with what their headers say: a description, then `key: value` lines."""
    from vitclinic.training.overrides import shipped_recipes

    return [{"name": name, **recipe_header(text)} for name, text in shipped_recipes().items()]


def recipe_header(text: str) -> dict[str, str]:
    """The comment at the top of a recipe as `about`, `command`, `time` and `expect`."""
    lines = re.match(r"(?:#.*\n)*", text)
    comment = [line.lstrip("# ").rstrip() for line in lines[0].splitlines()] if lines else []
    facts = dict(re.findall(r"^(command|time|expect): (.+)$", "\n".join(comment), re.MULTILINE))
    about = " ".join(line for line in comment if line.partition(":")[0] not in facts)
    return {"about": about, "command": facts["command"], "time": facts["time"], "expect": facts["expect"]}


def list_models() -> Rows:
    """Every name that `model=` takes."""
    from timm.models import list_models as timm_models

    import vitclinic.models  # noqa: F401  (registers our networks)

    return [{"name": name} for name in timm_models()]


def list_datasets() -> Rows:
    """What `data=` takes."""
    return [
        {"name": "digits", "about": "embedded: 1,797 handwritten digits, 8 x 8 grey"},
        {"name": "shapes[:N]", "about": "embedded: procedural, 10 shapes, 32 x 32 RGB, N training images"},
        {"name": "FOLDER", "about": "one sub-folder per class, or train/val/test folders of them"},
        {
            "name": "FILE.parquet",
            "about": "Hugging Face style; also a folder of train*.parquet, test*.parquet",
        },
        {"name": "torchvision:NAME@FOLDER", "about": "a torchvision set that is already on disk"},
        {"name": "hf:NAME", "about": "a set of the Hugging Face hub (pip install 'vitclinic[hf]')"},
    ]


def list_probes() -> Rows:
    """Every probe, with what it needs and its options."""
    from vitclinic.probes import known_probes

    return [
        {
            "name": name,
            "about": (probe.__doc__ or "").split("\n")[0],
            "needs": sorted(probe.needs),
            "options": _options(probe),
        }
        for name, probe in known_probes().items()
    ]


def list_treatments() -> Rows:
    """Every treatment: what it changes, what it costs, which networks it fits, its paper and its options."""
    from vitclinic.treatments import known_treatments

    return [
        {
            "name": name,
            "changes": treatment.changes,
            "costs": treatment.costs,
            "fits": ["any network"] if treatment.families is None else list(treatment.families),
            "paper": treatment.paper,
            "options": _options(treatment),
        }
        for name, treatment in known_treatments().items()
    ]


def list_tasks() -> Rows:
    """Every task, with its metrics and its options."""
    from vitclinic.tasks import known_tasks

    return [
        {
            "name": name,
            "about": (task.__doc__ or "").split("\n")[0],
            "metrics": [metric.name for metric in task.metrics],
            "options": _options(task),
        }
        for name, task in known_tasks().items()
    ]


def list_studies() -> Rows:
    """The catalogue: each claim with where it is in the papers, the command, its time, and what our own runs say."""
    from vitclinic.experiments.study.catalogue import open_study, seen_results, shipped_studies

    rows = []
    for name in shipped_studies():
        study, seen = open_study(name), seen_results().get(name)
        rows.append(
            {
                "name": name,
                "title": study.title,
                "paper": study.paper,
                "source": study.source,
                "command": f"vitclinic study {name} --data {study.base['data']['source']}/",
                "minutes on two cores": "not estimated" if study.minutes is None else f"about {study.minutes:g}",
                "seen here": "not run yet" if seen is None else f"{seen['verdict']}, {seen['seeds']} seeds",
            }
        )
    return rows


def _options(config: type[Config]) -> dict[str, dict[str, Any]]:
    return {
        name: {"default": field.get_default(call_default_factory=True), "description": field.description or ""}
        for name, field in config.model_fields.items()
    }


def shown(value: Any) -> str:
    """A value of a row as one line of text.

    Example:
        >>> shown({"rho": {"default": 0.1, "description": "length of the ascent"}}), shown(["vit", "swin"])
        ('rho=0.1', 'vit, swin')
    """
    if isinstance(value, dict):
        return ", ".join(f"{name}={option['default']}" for name, option in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value)


LISTINGS: dict[str, Callable[[], Rows]] = {
    "recipes": list_recipes,
    "models": list_models,
    "treatments": list_treatments,
    "tasks": list_tasks,
    "datasets": list_datasets,
    "probes": list_probes,
    "studies": list_studies,
}


class Listed(StrEnum):
    """What `list` knows."""

    recipes = "recipes"
    models = "models"
    treatments = "treatments"
    tasks = "tasks"
    datasets = "datasets"
    probes = "probes"
    studies = "studies"


@app.command("list")
def list_(
    what: Annotated[Listed, typer.Argument(help="recipes, models, treatments, tasks, datasets, probes or studies")],
    pattern: Annotated[str | None, typer.Argument(help="Only names like this, as in 'vit*'.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List what there is, by full name."""
    from fnmatch import fnmatch

    from vitclinic.cli.list import LISTINGS, shown

    rows = LISTINGS[what.value]()
    if pattern:
        rows = [row for row in rows if fnmatch(row["name"], pattern)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2, default=str))
    elif not sys.stdout.isatty():
        for row in rows:
            typer.echo("\t".join(shown(value) for value in row.values()))
    else:
        _print_table([{name: shown(value) for name, value in row.items()} for row in rows])


def _print_table(rows: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for number, name in enumerate(rows[0] if rows else ["name"]):
        table.add_column(name, no_wrap=number == 0)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
