"""The application, and what its verbs share: how they print, check and end."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer

from vitclinic._core.config import validate
from vitclinic._core.errors import RecipeError
from vitclinic._core.io import PAGE_ENDINGS, expand_path, find_path, refuse_to_replace, require_ending

if TYPE_CHECKING:
    from rich.console import Console

    from vitclinic.training import Run

DIVERGED = 5
PROBE_FAILED = 6
RUNS_FAILED = 7
IMAGES_SKIPPED = 8
GATE_FAILED = 9
BUG = 70
INTERRUPTED = 130


app = typer.Typer(
    name="vitclinic",
    help="Train vision transformers that work on the data you have, and see why.",
    epilog="Start with: vitclinic demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print more about what is being done.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


def console_for(verbose: bool, quiet: bool, stderr: bool = False) -> Console:
    """Return the console to print to; under torchrun only the first process prints.

    It is standard error for verbs whose result is on standard output.
    """
    from rich.console import Console
    from rich.logging import RichHandler

    level = logging.ERROR if quiet or follows() else logging.INFO if verbose else logging.WARNING
    handler = RichHandler(console=Console(stderr=True), show_path=False, show_time=False)
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
    stream = sys.stderr if stderr else sys.stdout
    return Console(quiet=quiet or follows(), file=cast(TextIO, _Output(stream)))


def open_closed_streams() -> None:
    """Put the null device in the place of closed standard streams (`>&-`), so that no file gets their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open until the process ends)


class _Output:
    """Standard output, which may be closed (`| head -1`) or full: what is printed is then lost, and work goes on."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write text, or drop it."""
        with self._forgiving():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what was written, or drop it."""
        with self._forgiving():
            self.stream.flush()

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            with suppress(OSError, ValueError):  # a stream that is no file has no number
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.stream.fileno())
                os.close(nowhere)


def follows() -> bool:
    """Return True if another process of torchrun's is the first."""
    several = os.environ.get("WORLD_SIZE", "1").strip() not in ("", "0", "1")
    return several and os.environ.get("RANK", "0").strip() not in ("", "0")


@contextmanager
def import_quickly() -> Iterator[None]:
    """Import without looking for garbage: torch makes a million objects, all of which stay. Saves half a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # else libraries with C++ objects report them as leaked


@contextmanager
def resumable(kept: str = "what has been measured is stored", same: bool = True) -> Iterator[None]:
    """End a command without a traceback on Ctrl-C or SIGTERM; the `same` command, or the one `kept` names, goes on.

    The exit code is that of the signal which the KeyboardInterrupt carries, or of Ctrl-C.
    """
    try:
        with _raise_at_sigterm():
            yield
    except KeyboardInterrupt as stopped:
        typer.secho(f"interrupted; {kept}{'; run the same command to resume' * same}", fg="yellow", err=True)
        numbers = [128 + reason for reason in stopped.args if isinstance(reason, int)]
        raise typer.Exit(next(iter(numbers), INTERRUPTED)) from None


_CLEARED_AFTER = 5.0
"""Seconds in which half-written files are cleared away."""


@contextmanager
def _raise_at_sigterm() -> Iterator[None]:
    """Raise a KeyboardInterrupt at SIGTERM, so that files which are half written are cleared away as at Ctrl-C.

    Processes that are forked inside, such as workers, still die of it. While files are cleared away the signal does
    nothing more; later it counts again, since Python loses an exception that is raised in a hook of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process, raised = os.getpid(), float("-inf")

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if os.getpid() != process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif time.monotonic() - raised > _CLEARED_AFTER:
            raised = time.monotonic()
            raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def complete_words(incomplete: str) -> list[str]:
    """Return the recipes and keys that begin so, for the shell to complete."""
    from vitclinic.training import Recipe
    from vitclinic.training.overrides import read_shipped_recipes

    known = [*read_shipped_recipes(), *(f"{key}=" for key in Recipe.model_fields)]
    return [word for word in known if word.startswith(incomplete)]


def recipe_and_changes(words: list[str]) -> tuple[str | None, list[str]]:
    """Split the words of a command into the recipe, the one without `=`, and the changes to it."""
    recipes = [word for word in words if "=" not in word]
    if len(recipes) > 1:
        raise RecipeError(f"One recipe at a time: got {' and '.join(repr(word) for word in recipes)}.")
    return (recipes[0] if recipes else None), [word for word in words if "=" in word]


def check_recipe(recipe: str | None, changes: list[str], data: str | None = None, planned: bool = False) -> None:
    """Raise for a recipe that is wrong, and for data or a network that is not there, before torch is loaded.

    For what is only `planned`, data sets of the papers need not be there.
    """
    from vitclinic._core.sources import check_model_name
    from vitclinic.data.named import find_missing_data
    from vitclinic.training import build_recipe

    built = build_recipe(recipe, changes)
    if not planned or find_missing_data(built.data.source) is None:
        check_data(built.data.source if data is None else data)
    check_model_name(built.model.name)


def check_data(source: str | None) -> None:
    """Raise a DataError for data that is not there, before torch is loaded."""
    from vitclinic.data.config import DataConfig
    from vitclinic.data.factory import check_source

    if source is not None:
        check_source(validate(DataConfig, {"source": source}, where="data"))


def named_path(text: str | Path) -> Path:
    """Return the path that an option names, or its default; an empty one would be the current folder.

    Raises:
        RecipeError: No path can be called so: too long a name, a zero byte, no such user.
    """
    if not str(text).strip():
        raise typer.BadParameter("it is empty; write a path.")
    find_path(str(text), RecipeError, "a place to write to")
    return expand_path(str(text), RecipeError)


def named_file(text: str | Path) -> Path:
    """Return the path of a file to write, before hours of work; a folder or a device is refused.

    Raises:
        RecipeError: No path can be called so.
        RunError: There is something that must not be replaced.
    """
    path = named_path(text)
    refuse_to_replace(path)
    return path


def named_page(text: str | Path) -> Path:
    """Return the path of a page to write, as `named_file` does; one that is not called .html is refused, too."""
    path = named_file(text)
    require_ending(path, "A report is a page", *PAGE_ENDINGS)
    return path


def named_xml(text: str | Path) -> Path:
    """Return the path of an XML file to write, as `named_file` does; one that is not called .xml is refused, too."""
    path = named_file(text)
    require_ending(path, "JUnit's results are XML", ".xml")
    return path


def free_path(path: Path) -> Path:
    """Return the path, with a number behind it if it is taken."""
    candidates = [path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 1000))]
    return next(candidate for candidate in candidates if not candidate.exists())


def finish(run: Run, console: Console, as_json: bool = False) -> None:
    """Print the results of a run, and exit with a code of its own unless it is finished."""
    from vitclinic.training.display import show_result

    show_result(run, console)
    status = run.status
    if as_json and not follows():
        typer.echo(json.dumps({"run": str(run.path), **status}, indent=2))
    if status["status"] == "diverged":
        raise typer.Exit(DIVERGED)
    if status["status"] == "interrupted":
        raise typer.Exit(128 + int(status.get("signal", INTERRUPTED - 128)))
