"""The live page beside a training, in a process of its own that ends with it."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from vitclinic._core.errors import RunError, VitclinicError

_PATIENCE = 60.0
"""Seconds until the page must answer."""


@contextmanager
def watch_beside(folder: Path) -> Iterator[str]:
    """Serve the live page of a folder while the context lasts, and give its address.

    The process ends with this one, however that ends: it waits for the end of a pipe that nobody writes to.

    Args:
        folder: The folder with the runs; it need not be there yet.

    Raises:
        RunError: The page cannot be served.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(folder, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        answer = ours.recv() if ours.poll(_PATIENCE) else RunError("The live page did not start.")
        if isinstance(answer, VitclinicError):
            raise answer
        yield answer
    except EOFError as error:
        raise RunError("The live page did not start; train without it.") from error
    finally:
        ours.close()
        process.join(5)
        if process.is_alive():
            process.terminate()


def _serve(folder: Path, connection: Connection) -> None:
    from vitclinic.experiments.watch.server import WatchServer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training, which saves and then ends this
    try:
        server = WatchServer(folder)
    except RunError as error:
        connection.send(error)
        return
    threading.Thread(target=server.serve_forever, daemon=True).start()
    connection.send(server.address)
    with suppress(EOFError, OSError):
        connection.recv()
    server.shutdown()
