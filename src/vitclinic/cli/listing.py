"""`vitclinic list`."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated

import typer

from vitclinic.cli.common import app


class Listed(StrEnum):
    """What `list` knows."""

    recipes = "recipes"
    models = "models"
    treatments = "treatments"
    datasets = "datasets"
    probes = "probes"
    studies = "studies"


@app.command("list")
def list_(
    what: Annotated[Listed, typer.Argument(help="recipes, models, treatments, datasets, probes or studies")],
    pattern: Annotated[str | None, typer.Argument(help="Only names like this, as in 'vit*'.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List what there is, by full name."""
    from fnmatch import fnmatch

    from vitclinic.listing import LISTINGS, shown

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
