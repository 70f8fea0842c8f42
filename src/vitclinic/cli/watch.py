"""`vitclinic watch`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from vitclinic._core.errors import RunError
from vitclinic._core.io import find_path
from vitclinic.cli.common import Quiet, Verbose, app, console_for, named_path


@app.command()
def watch(
    folder: Annotated[
        Path, typer.Argument(parser=named_path, metavar="FOLDER", help="A run, or a folder with runs, at any depth.")
    ],
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the page; default: 6160, or the next free one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all runs once as JSON, and serve no page.")] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Show runs in a page while they train: curves, samples, time left, a table.

    \b
    vitclinic watch runs/                   then open the address that it prints
    vitclinic watch runs/ --json            the table of all runs, for programs
    vitclinic train data=photos/ --watch    the page for as long as it trains

    The page is served to this machine alone (127.0.0.1), writes nothing, and
    loads nothing from elsewhere. Ctrl-C ends it. More: docs/watch.md.
    """
    if (found := find_path(str(folder), RunError, "runs")) is None or not found.is_dir():
        raise RunError(f"'{folder}' is not a folder: write the one that your runs are in.")
    from vitclinic.experiments.watch.reading import WatchedFolder
    from vitclinic.experiments.watch.server import serve

    console = console_for(verbose, quiet)
    if as_json:
        typer.echo(json.dumps(WatchedFolder(found).table(patience=math.inf), indent=2))
        return
    serve(found, port, lambda address: console.print(f"watch: {address} (Ctrl-C ends it)", highlight=False))
