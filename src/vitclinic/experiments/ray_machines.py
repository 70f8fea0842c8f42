"""The machines of a Ray cluster while runs are trained on it: which are gone, and what that means for the runs.

Ray starts the tasks of a lost machine again elsewhere by itself. Without its head, or without the part of it on this
machine (the raylet), it starts nothing any more, and after a minute ends this process without a word.
"""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

from vitclinic._core.errors import RunError

log = logging.getLogger(__name__)

_GONE_AFTER = 15.0
"""Seconds without an answer after which the head is gone; a head that is started anew may be back before."""
_LOOK_EVERY = 2.0

_GOES_ON = "each run is kept up to its last checkpoint, and the same command goes on once there is a cluster"

OWN_RAY_GONE = f"The Ray of this machine is gone (its raylet was lost): {_GOES_ON}."


class Machines:
    """The machines as they are known so far.

    Args:
        ray: The module, which has joined the cluster.
        needed: What a task needs, as `ray.remote` takes it.
    """

    def __init__(self, ray: Any, needed: dict[str, int]) -> None:
        self.ray, self.needed = ray, needed
        context = ray.get_runtime_context()
        self.head, self.own = context.gcs_address, context.get_node_id()
        self.answered = self.looked = time.monotonic()
        self.alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        self.told_of_none = False

    def look(self) -> None:
        """Tell of machines that are gone since the last look.

        Raises:
            RunError: The head is gone, or the raylet of this machine.
        """
        now = time.monotonic()
        if now - self.looked < _LOOK_EVERY:
            return
        self.looked = now
        if not does_answer(self.head):
            if now - self.answered > _GONE_AFTER:
                raise RunError(f"The head of the Ray cluster ({self.head}) is gone: {_GOES_ON}.")
            return
        self.answered = now
        self._compare([node for node in self.ray.nodes() if node["Alive"]])

    def _compare(self, nodes: list[dict[str, Any]]) -> None:
        now = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
        gone, self.alive = [place for name, place in self.alive.items() if name not in now], now
        if self.own not in now:
            raise RunError(OWN_RAY_GONE)
        for place in gone:
            log.warning(
                "A machine of the Ray cluster is gone (%s): its runs go on elsewhere, from their last checkpoints.",
                place,
            )
        wanted = {"CPU": self.needed["num_cpus"], "GPU": self.needed["num_gpus"]}
        fits = any(all(node["Resources"].get(kind, 0) >= least for kind, least in wanted.items()) for node in nodes)
        if not fits and not self.told_of_none:
            log.warning(
                "No machine is left that a run fits on; waiting for one (Ctrl-C ends, and the same command goes on)."
            )
        self.told_of_none = not fits


def does_answer(address: str) -> bool:
    """Return True if somebody listens at the address of a head."""
    place = parse_address(address)
    try:
        if place is not None:
            socket.create_connection(place, timeout=2).close()
    except OSError:
        return False
    return True


def parse_address(address: str) -> tuple[str, int] | None:
    """Return host and port of a cluster's address; None for a word, such as `auto`.

    Raises:
        ValueError: The port is no number of a port.

    Example:
        >>> parse_address("10.0.0.7:6379"), parse_address("[::1]:6379"), parse_address("ray://head:10001")
        (('10.0.0.7', 6379), ('::1', 6379), ('head', 10001))
    """
    host, colon, port = address.rpartition("/")[2].rpartition(":")
    if not colon:
        return None
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"'{port}' is not a port; write HOST:PORT, such as 10.0.0.7:6379 or [::1]:6379")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"write an IPv6 address in brackets: [{host}]:{port}")
    return host, int(port)
