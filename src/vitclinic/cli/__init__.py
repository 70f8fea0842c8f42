"""The command line: thin verbs over the Python interface.

Exit codes: 0 done; 1 a bug in vitclinic; 2 a mistake in the command, recipe or model; 3 the data; 4 the run
directory; 5 the training diverged; 6 a probe failed; 7 some runs of a study failed; 130 and 143 interrupted by Ctrl-C
and SIGTERM, saved.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from vitclinic._core.errors import VitclinicError
from vitclinic.cli import (  # noqa: F401  (they register their verbs)
    anatomy,
    corrupt,
    demo,
    examine,
    list,
    prescribe,
    report,
    study,
    train,
)
from vitclinic.cli.common import app, follows

VERBS = ("demo", "train", "anatomy", "examine", "prescribe", "study", "report", "corrupt", "list")
"""In the order of the help."""

app.registered_commands.sort(key=lambda command: VERBS.index(command.name or command.callback.__name__))  # type: ignore[union-attr]


def _version(asked: bool) -> None:
    if asked:
        from vitclinic import __version__

        typer.echo(f"vitclinic {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


SPIN_COUNT = "5000"
"""How long threads of OpenMP spin at a barrier before they sleep. The default, 300,000 turns, is many times slower
beside other busy processes, and no faster alone (docs/results/training-speed.md)."""


def main() -> None:
    """Run the `vitclinic` command; an expected error is one sentence on stderr and an exit code."""
    if "OMP_WAIT_POLICY" not in os.environ:  # what the user has set stands; read once, when torch is loaded
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    try:
        app()
    except VitclinicError as error:
        if not follows():
            typer.secho(f"error: {error}", fg=None if os.environ.get("NO_COLOR") else "red", err=True)
        sys.exit(error.exit_code)


def click_app() -> Any:
    """Return the command as click sees it, for the test that freezes its surface."""
    return typer.main.get_command(app)
