"""The server of the live page: on this machine alone, reading alone.

It listens at 127.0.0.1, answers GET and HEAD, and refuses names of other hosts, by which a web page elsewhere could
make a browser ask for us (DNS rebinding). Addresses hold ids of runs and no paths: there is no way out of the folder.

Beside a training it runs in a process of its own, which ends with the training.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vitclinic._core.errors import RunError, VitclinicError
from vitclinic.experiments.watch.reading import WatchedFolder
from vitclinic.reports.frame import WATCH_POLICY, read_script, render_watch_page

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
PORT = 6160
_OTHER_PORTS = 20
"""Ports behind the usual one that are tried if it is taken."""
_OURS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_RUN = re.compile(r"/runs/([0-9a-f]{16})/(curves|samples\.png)")
_SCRIPTS = ("/plotly.js", "/watch.js")
_JSON, _TEXT = "application/json", "text/plain; charset=utf-8"
Answer = tuple[HTTPStatus, str, bytes]


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    server: WatchServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "vitclinic", ""
    timeout = 30

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def __getattr__(self, name: str) -> Callable[[], None]:
        """Return what answers any other method."""
        if not name.startswith("do_"):
            raise AttributeError(name)
        return self._refuse_method

    def _refuse_method(self) -> None:
        self.close_connection = True  # a body may follow, which nobody reads
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, b"This page is for reading.\n")

    def _answer(self) -> None:
        try:
            answer = self._refuse() or self.server.answer(self.path.partition("?")[0])
        except Exception as error:  # noqa: BLE001 (whatever a damaged file causes, the page and other runs go on)
            log.warning("The live page cannot show '%s': %s: %s", self.path, type(error).__name__, error)
            answer = HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, b"This cannot be shown; the terminal says why.\n"
        self._send(*answer)

    def _refuse(self) -> Answer | None:
        """Return the answer to a request that did not come from the page itself or from its user."""
        hosts, origin = self.headers.get_all("Host") or [], self.headers.get("Origin")
        if len(hosts) != 1 or not _OURS.fullmatch(hosts[0]):
            return HTTPStatus.MISDIRECTED_REQUEST, _TEXT, b"Open this page as http://127.0.0.1.\n"
        if origin is not None and origin.lower() != f"http://{hosts[0].lower()}":
            return HTTPStatus.FORBIDDEN, _TEXT, b"Other pages may not read this one.\n"
        return None

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "private, max-age=3600" if self.path in _SCRIPTS else "no-store",
            "Content-Security-Policy": WATCH_POLICY,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            **({"Allow": "GET, HEAD"} if status is HTTPStatus.METHOD_NOT_ALLOWED else {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


class WatchServer(ThreadingHTTPServer):
    """A server of the live page of one folder; `serve_forever` serves, `shutdown` from another thread ends it.

    Args:
        folder: The folder with the runs; it need not be there yet.
        port: The port; by default 6160, or one behind it that is free. 0 takes any.

    Raises:
        RunError: The port is taken, or may not be used.
    """

    daemon_threads = True
    allow_reuse_address = sys.platform != "win32"  # where it would share the port with another program

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.folder = WatchedFolder(folder)
        ports = [port] if port is not None else [*range(PORT, PORT + _OTHER_PORTS), 0]
        for number in ports:
            try:
                super().__init__((HOST, number), _Handler)
                return
            except OSError as error:
                if number == ports[-1]:
                    why = (error.strerror or str(error)).lower()
                    raise RunError(f"Port {number} cannot be used: {why}; choose another port.") from error

    def server_bind(self) -> None:
        """Bind without asking for the machine's name, which may wait for a network."""
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = HOST, self.socket.getsockname()[1]
        self.server_address = self.socket.getsockname()

    @property
    def address(self) -> str:
        """The address to open in a browser."""
        return f"http://{HOST}:{self.server_port}/"

    def answer(self, path: str) -> Answer:
        """Return status, kind and content for a path of an address."""
        if path == "/":
            return HTTPStatus.OK, "text/html; charset=utf-8", render_watch_page(str(self.folder.root)).encode()
        if path in _SCRIPTS:
            return HTTPStatus.OK, "text/javascript; charset=utf-8", read_script(path[1:]).encode()
        if path == "/runs":
            return HTTPStatus.OK, _JSON, _pack(self.folder.table())
        if found := _RUN.fullmatch(path):
            run, what = found.groups()
            if what == "curves" and (curves := self.folder.curves(run)) is not None:
                return HTTPStatus.OK, _JSON, _pack(curves)
            if what == "samples.png" and (picture := self.folder.samples(run)) is not None:
                return HTTPStatus.OK, "image/png", picture
        return HTTPStatus.NOT_FOUND, _TEXT, b"There is no such page.\n"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave a browser that went away in the middle of an answer alone."""
        log.debug("a connection ended", exc_info=True)


def _pack(value: dict[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def serve(folder: Path, port: int | None, started: Callable[[str], None]) -> None:
    """Serve the live page until Ctrl-C.

    Args:
        folder: The folder with the runs.
        port: The port, as for `WatchServer`.
        started: Called with the address.
    """
    with WatchServer(folder, port) as server, suppress(KeyboardInterrupt):
        started(server.address)
        server.serve_forever(poll_interval=0.5)


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
