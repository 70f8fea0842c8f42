"""`vitclinic list`: what there is, with facts about each."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from vitclinic.cli.common import app

Rows = list[dict[str, Any]]
"""Values are text, lists of it, or options as {name: {default, description}}: `format_value` writes them in a line."""


def describe_recipes() -> Rows:
    """Return the shipped recipes with what their headers say, first those for two cores, then the papers' own."""
    from vitclinic.training.overrides import read_shipped_recipes

    rows = [{"name": name, **recipe_header(text)} for name, text in read_shipped_recipes().items()]
    return sorted(rows, key=lambda row: row["scale"] != TWO_CORES)


TWO_CORES = "two cores"


def recipe_header(text: str) -> dict[str, str]:
    """Return the comment at the top of a recipe: a description, then `key: value` lines.

    A recipe with a line `paper` is one at the scale of that paper.
    """
    lines = re.match(r"(?:#.*\n)*", text)
    comment = [line.lstrip("# ").rstrip() for line in lines[0].splitlines()] if lines else []
    facts = dict(re.findall(r"^(command|paper|time|expect): (.+)$", "\n".join(comment), re.MULTILINE))
    about = " ".join(line for line in comment if line.partition(":")[0] not in facts)
    scale = f"paper: {facts['paper']}" if "paper" in facts else TWO_CORES
    return {
        "scale": scale,
        "about": about,
        "command": facts["command"],
        "time": facts["time"],
        "expect": facts["expect"],
    }


def describe_models() -> Rows:
    """Return every name that `model=` takes."""
    from vitclinic import list_models

    return [{"name": name} for name in list_models()]


def describe_datasets() -> Rows:
    """Return what `data=` takes."""
    from vitclinic.data.config import DATASETS

    return [{"name": name, "about": about} for name, about in DATASETS.items()]


def describe_probes() -> Rows:
    """Return every probe, with what it needs and its options."""
    from vitclinic.probes.probe import PROBES

    return [
        {
            "name": facts.name,
            "about": facts.about,
            "needs": sorted(facts.attributes["needs"]),
            "options": facts.options,
        }
        for facts in PROBES.facts("needs")
    ]


def describe_treatments() -> Rows:
    """Return every treatment: what it changes, what it costs, which networks it fits, its paper and its options."""
    from vitclinic.treatments.treatment import TREATMENTS

    rows = []
    for facts in TREATMENTS.facts("changes", "costs", "part", "paper"):
        stated = facts.attributes
        rows.append(
            {
                "name": facts.name,
                "changes": stated["changes"],
                "costs": stated["costs"],
                "fits": f"networks with {stated['part']}" if stated["part"] else "any network",
                "paper": stated["paper"],
                "options": facts.options,
            }
        )
    return rows


def describe_remedies() -> Rows:
    """Return every remedy of `prescribe` with what it changes, in the order in which they are tried."""
    from vitclinic.experiments.prescribe.remedies import describe_remedies

    return [dict(row) for row in describe_remedies()]


def describe_tasks() -> Rows:
    """Return every task, with its metrics and its options."""
    from vitclinic.tasks.task import TASKS

    return [
        {
            "name": facts.name,
            "about": facts.about,
            "metrics": [metric.name for metric in facts.attributes["metrics"]],
            "options": facts.options,
        }
        for facts in TASKS.facts("metrics")
    ]


def describe_studies() -> Rows:
    """Return the catalogue: each claim with its place in the papers, the command, its time, and what our runs say."""
    from vitclinic.experiments.study.catalogue import our_results, read_study, shipped_studies

    rows = []
    for name in shipped_studies():
        study, seen = read_study(name), our_results().get(name)
        data = study["base"]["data"]
        minutes = study.get("minutes")
        rows.append(
            {
                "name": name,
                "title": study["title"],
                "paper": study["paper"],
                "source": study["source"],
                "command": f"vitclinic study {name} --data {data['source'] if isinstance(data, dict) else data}/",
                "minutes on two cores": "not estimated" if minutes is None else f"about {minutes:g}",
                "seen here": "not run yet" if seen is None else f"{seen['verdict']}, {seen['seeds']} seeds",
            }
        )
    return rows


def format_value(value: Any) -> str:
    """Write a value of a row as one line of text.

    Example:
        >>> format_value({"rho": {"default": 0.1, "description": "ascent"}}), format_value(["vit", "swin"])
        ('rho=0.1', 'vit, swin')
    """
    if isinstance(value, dict):
        return ", ".join(f"{name}={_format_default(option['default'])}" for name, option in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value)


def _format_default(value: Any) -> str:
    """Write a default; of a section with one obvious key, the value of that key."""
    main = getattr(type(value), "main_key", None)
    return str(getattr(value, main)) if main else str(value)


LISTINGS: dict[str, Callable[[], Rows]] = {
    "recipes": describe_recipes,
    "models": describe_models,
    "treatments": describe_treatments,
    "remedies": describe_remedies,
    "tasks": describe_tasks,
    "datasets": describe_datasets,
    "probes": describe_probes,
    "studies": describe_studies,
}


class Listed(StrEnum):
    """Kind of thing that `list` knows."""

    recipes = "recipes"
    models = "models"
    treatments = "treatments"
    remedies = "remedies"
    tasks = "tasks"
    datasets = "datasets"
    probes = "probes"
    studies = "studies"


@app.command("list")
def list_(
    what: Annotated[Listed, typer.Argument(metavar="WHAT", help=", ".join(Listed))],
    pattern: Annotated[str | None, typer.Argument(help="Only names that match, such as 'vit*'.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List what you can name: recipes, models, treatments, remedies, tasks, datasets, probes or studies.

    \b
    vitclinic list models 'vit_tiny*'     names for model=, timm's and ours
    vitclinic list treatments             what each changes and costs
    vitclinic list remedies               what prescribe tries, in its order
    vitclinic list probes --json          for programs
    """
    from fnmatch import fnmatch

    rows = LISTINGS[what.value]()
    if pattern:
        rows = [row for row in rows if fnmatch(row["name"], pattern)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2, default=str))
    elif not sys.stdout.isatty():
        for row in rows:
            typer.echo("\t".join(format_value(value) for value in row.values()))
    else:
        _print_table([{name: format_value(value) for name, value in row.items()} for row in rows])


def _print_table(rows: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for number, name in enumerate(rows[0] if rows else ["name"]):
        table.add_column(name, no_wrap=number == 0)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
