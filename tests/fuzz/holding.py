"""Run a command in this process, and judge whether it kept its promises."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

LONGEST = 20
"""Seconds that a command may take."""
MOST_MEMORY = 6 * 2**30
CODES = {0, 2, 3, 4, 5, 6, 7, 8, 9}
"""Exit codes that a user can cause; 70 is a bug."""


class TooLong(BaseException):
    """Raised in a command that does not end."""


@dataclass
class Ended:
    """How a command ended."""

    words: Sequence[str]
    code: object
    out: str
    err: str
    seconds: float
    faults: list[str] = field(default_factory=list)
    """Promises that it broke."""
    damage: str = ""
    """What had been damaged, and how."""


def run_command(words: Sequence[str], scratch: Path) -> Ended:
    """Run `vitclinic WORDS` in this process, with its temporary files in `scratch`."""
    from vitclinic import cli

    out, err = io.StringIO(), io.StringIO()
    code: object = None
    faults: list[str] = []

    def describe_bug(error: Exception) -> str:
        faults.append("".join(traceback.format_exception(error)))
        return "a bug"

    before = sys.argv, tempfile.tempdir, cli._describe_bug
    sys.argv, tempfile.tempdir, cli._describe_bug = ["vitclinic", *words], str(scratch), describe_bug
    started = time.monotonic()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _no_input(), _alarm(LONGEST), _memory():
            cli.main()
    except SystemExit as ended:
        code = ended.code
    except TooLong:
        faults.append("hang")
    except BaseException as error:  # noqa: BLE001 (whatever comes through is a broken promise)
        faults.append(f"traceback: {type(error).__name__}: {error}")
    finally:
        sys.argv, tempfile.tempdir, cli._describe_bug = before
        gc.unfreeze()
    ended = Ended(
        words, 0 if code is None else code, out.getvalue(), err.getvalue(), time.monotonic() - started, faults
    )
    _judge(ended)
    return ended


def _judge(ended: Ended) -> None:
    if ended.faults:
        return
    if ended.seconds > LONGEST:
        ended.faults.append(f"hang: {ended.seconds:.0f} s")
    if "Traceback (most recent call last)" in ended.out + ended.err:
        ended.faults.append("traceback printed")
    if ended.code not in CODES:
        ended.faults.append(f"exit code {ended.code}")
    if ended.code in (2, 3, 4) and not ended.err.strip():
        ended.faults.append("no sentence")
    if ended.code in (2, 3, 4) and ended.err.count("error: ") + ended.err.count("Error ─") > 1:
        ended.faults.append("more than one sentence")


@contextlib.contextmanager
def _alarm(seconds: int) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _memory() -> Iterator[None]:
    """Bound what a command may take in addition, so that one that takes all is an error here, not of the machine."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def _no_input() -> Iterator[None]:
    before, sys.stdin = sys.stdin, io.StringIO("")
    try:
        yield
    finally:
        sys.stdin = before


def photograph(folder: Path) -> dict[str, str]:
    """Return a digest of every regular file below a folder, links not followed."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place) / name
            if path.is_file() and not path.is_symlink():
                found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def find_losses(before: dict[str, str], after: dict[str, str], may_change: Callable[[str], bool]) -> list[str]:
    """Return a fault for each file that was there, is gone or has another content, and may not."""
    lost = [name for name, digest in before.items() if after.get(name) != digest and not may_change(name)]
    return [f"loss: {', '.join(lost[:5])}"] if lost else []
