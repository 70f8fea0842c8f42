"""SIGINT and SIGTERM while a run is at work: noted, so that it can be saved before it stops."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """The signal that asked this process to stop, if any."""

    signal: signal.Signals | None = None


_listeners: list[Interrupt] = []


def is_listening() -> bool:
    """Return True while a signal would be noted, and the training at work saved and stopped."""
    return bool(_listeners)


@contextmanager
def listen_for_signals() -> Iterator[Interrupt]:
    """Record SIGINT and SIGTERM instead of dying from them. Outside the main thread, signals are left alone.

    Nested listeners all see a signal: one that arrives too late to stop the current run still stops the runs that
    would have followed.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        for listener in _listeners:
            listener.signal = signal.Signals(number)

    _listeners.append(interrupt)
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _listeners.remove(interrupt)
