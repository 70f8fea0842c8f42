"""Ctrl-C and SIGTERM: finish the step, save, and stop; a second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Which signal asked this process to stop, if any."""

    signal: signal.Signals | None = None


@contextmanager
def listening() -> Iterator[Interrupt]:
    """Note SIGINT and SIGTERM instead of dying of them. Outside the main thread, signals are left alone."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        interrupt.signal = signal.Signals(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
