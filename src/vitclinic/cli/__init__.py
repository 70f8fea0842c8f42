"""The command line: thin verbs over the Python interface.

Exit codes, as docs/commands.md has them: 0 done; 2 a mistake in the command, recipe or model; 3 the data; 4 the run
directory; 5 the training diverged; 6 a probe failed; 7 some runs of a study failed; 8 some images could not be read;
9 a gate failed; 70 a bug in vitclinic, whose traceback is in a file; 130 and 143 interrupted by Ctrl-C and SIGTERM,
saved.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import traceback
from typing import Annotated, Any

import typer

from vitclinic._core.errors import RecipeError, RunError, VitclinicError
from vitclinic._core.io import describe_os_error
from vitclinic.cli import (  # noqa: F401  (they register their verbs)
    anatomy,
    corrupt,
    demo,
    doctor,
    examine,
    export,
    features,
    list,
    predict,
    prescribe,
    report,
    study,
    train,
    transfer,
    watch,
)
from vitclinic.cli.common import BUG, app, follows, open_closed_streams

VERBS = (
    *("demo", "train", "watch", "transfer", "predict", "export", "anatomy", "examine", "features"),
    *("prescribe", "study", "report", "corrupt", "list", "doctor"),
)
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
    """Run the `vitclinic` command; an error is one sentence on stderr and an exit code.

    Whatever a user can cause is a `VitclinicError`; the rest is a bug, and reported as one.
    """
    if "OMP_WAIT_POLICY" not in os.environ:  # what the user has set stands; read once, when torch is loaded
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    open_closed_streams()
    try:
        app()
    except VitclinicError as error:
        _tell(str(error))
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 (the last resort)
        if _is_out_of_memory(error):
            _tell(f"There is not enough memory ({_first_line(error)}): take smaller images, batches or networks.")
            sys.exit(RecipeError.exit_code)
        told = describe_os_error(error) if isinstance(error, OSError) else None
        if told is not None:  # no permission, a full disk: not ours to mend
            _tell(told)
            sys.exit(RunError.exit_code)
        _tell(_describe_bug(error))
        sys.exit(BUG)


def _tell(sentence: str) -> None:
    if not follows():
        typer.secho(f"error: {sentence}", fg=None if os.environ.get("NO_COLOR") else "red", err=True)


def _is_out_of_memory(error: Exception) -> bool:
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from vitclinic._core.memory import is_out_of_memory

    return is_out_of_memory(error)


def _first_line(error: Exception) -> str:
    line = next(iter(str(error).splitlines()), "")[:200].rstrip(".")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _describe_bug(error: Exception) -> str:
    """Return one sentence about an error that nobody foresaw; its traceback is kept in a file."""
    what = _first_line(error)
    try:
        descriptor, name = tempfile.mkstemp(prefix="vitclinic-error-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(f"{shlex.join(sys.argv)}\n\n{''.join(traceback.format_exception(error))}")
    except OSError:
        return f"this should not happen ({what}); it is a bug in vitclinic, please report it."
    return f"this should not happen ({what}); it is a bug in vitclinic, please report it with '{name}'."


def click_app() -> Any:
    """Return the command as click sees it, for the test that freezes its surface."""
    return typer.main.get_command(app)
