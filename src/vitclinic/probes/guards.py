"""Guards around a measurement: the network's state is restored, memory that runs out halves the batch, work is kept.

What a slow probe has done so far lies on disk, so that an exam that was killed resumes where it stopped.
"""

from __future__ import annotations

import copy
import io
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitclinic._core.distributed import ALONE, Distributed
from vitclinic._core.errors import ModelError, RunError, first_line
from vitclinic._core.io import DAMAGED_ARRAYS, write_bytes, write_errors
from vitclinic._core.memory import is_out_of_memory, release_memory
from vitclinic.data.randomness import torch_seed

if TYPE_CHECKING:
    from vitclinic.probes.subject import Subject

_TABLES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Dictionaries in which a module keeps its parts and hooks."""


@contextmanager
def preserve_state(network: nn.Module, seed: int = 0) -> Iterator[None]:
    """Put the network into eval mode with seeded random numbers, and restore its state afterwards, also on errors.

    The state is: its modules, their dtypes and devices, training flags and hooks, `requires_grad` flags, gradients, the
    values of all parameters and buffers, and the random states of torch, numpy and Python. An autocast around the call
    does not apply inside: the network computes in its own precision, which its digest covers.

    Args:
        network: The network.
        seed: Seed of the random numbers inside.

    Example:
        >>> network = nn.Linear(2, 2)
        >>> with preserve_state(network):
        ...     _ = network.double().weight.data.fill_(0)
        >>> network.weight.dtype, bool(network.weight.any()), network.training
        (torch.float32, True, True)
    """
    with ExitStack() as undo:
        undo.enter_context(_own_randomness(seed))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                undo.enter_context(torch.autocast(device, enabled=False))
        _note_tables(network, undo)
        _note_state(network, undo)
        for module in network.modules():
            undo.callback(setattr, module, "training", module.training)
        network.eval()
        yield


@contextmanager
def preserve_attributes(network: nn.Module) -> Iterator[None]:
    """Restore what modules keep in plain attributes, such as a cache of positions or a counter, also on errors.

    Example:
        >>> network = nn.Linear(2, 2)
        >>> network.seen = []
        >>> with preserve_attributes(network):
        ...     network.seen.append(1)
        ...     network.last = 1
        >>> network.seen, hasattr(network, "last")
        ([], False)
    """
    own = nn.Module().__dict__.keys()  # parts and hooks, which `preserve_state` restores
    tables = [module.__dict__ for module in network.modules()]
    kept = [dict(table) for table in tables]
    filled = [
        (value, copy.copy(value))
        for table in kept
        for name, value in table.items()
        if name not in own and isinstance(value, list | dict | set)
    ]
    try:
        yield
    finally:
        for table, before in zip(tables, kept, strict=True):
            table.clear()
            table.update(before)
        for value, content in filled:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)


@contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    word = torch_seed("probe", seed)
    with torch.random.fork_rng():
        random.seed(word)
        np.random.seed(word % 2**32)
        torch.manual_seed(word)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _note_tables(network: nn.Module, undo: ExitStack) -> None:
    """Remember parts and hooks: those added are removed again, and those removed or replaced come back."""

    def restore(table: dict[Any, Any], before: dict[Any, Any]) -> None:
        table.clear()
        table.update(before)

    for module in network.modules():
        for name in _TABLES:
            table = getattr(module, name)
            undo.callback(restore, table, dict(table))


def _note_state(network: nn.Module, undo: ExitStack) -> None:
    def restore(tensor: Tensor, values: Tensor) -> None:
        same_kind = (tensor.dtype, tensor.device, tensor.shape) == (values.dtype, values.device, values.shape)
        if not same_kind:
            tensor.data = values  # the network was converted or moved
        elif not torch.equal(tensor.data, values):  # to autograd, even writing the same values is a change
            tensor.data.copy_(values)

    def want_gradient(parameter: Tensor, before: bool) -> None:
        if parameter.requires_grad != before:  # weights made in inference mode refuse any setting, even the same
            parameter.requires_grad_(before)

    for parameter in network.parameters():
        # Set aside, not copied: gradients that a probe accumulates go into a tensor of their own.
        undo.callback(setattr, parameter, "grad", parameter.grad)
        undo.callback(want_gradient, parameter, parameter.requires_grad)
        parameter.grad = None
    # Noted last, so restored first: a gradient must have the dtype of its parameter.
    for tensor in (*network.parameters(), *network.buffers()):
        undo.callback(restore, tensor, tensor.detach().clone())


log = logging.getLogger(__name__)

T = TypeVar("T")


def halving(subject: Subject, what: str, attempt: Callable[[], T]) -> T:
    """Call `attempt`, and start over with half the `subject.batch_size` whenever memory runs out."""
    while True:
        try:
            return attempt()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if subject.batch_size == 1:
                raise ModelError(f"out of memory even with one image at a time ({first_line(error)}).") from error
            tried, subject.batch_size = subject.batch_size, subject.batch_size // 2
        # Outside of the handler, since the error holds on to the tensors of the failed attempt.
        release_memory()
        log.warning("%s: out of memory with a batch of %d images; retrying with %d.", what, tried, subject.batch_size)


SAVED_EVERY = 1.0
"""Seconds of work that a killed exam may lose at most."""

_IDENTITY = "identity"


class Partial:
    """Arrays in a file that is replaced atomically.

    The code that stores the finished measurement removes the file. Of several processes, the leading one writes, and
    reads for all of them.

    Args:
        path: The file; None keeps nothing.
        identity: Text that identifies the work beyond the path; a file with another identity is ignored.
        distributed: Processes that measure together.
    """

    def __init__(self, path: Path | None, identity: str = "", distributed: Distributed = ALONE) -> None:
        self.path = path
        self.identity = identity
        self.distributed = distributed
        self._written = time.monotonic()

    def read(self) -> dict[str, NDArray[Any]] | None:
        """Return the arrays of an earlier attempt; None if there are none, or the file is damaged."""
        return self.distributed.leader_only(self._read)

    def _read(self) -> dict[str, NDArray[Any]] | None:
        if self.path is None or not self.path.is_file():
            return None
        try:
            with np.load(self.path, allow_pickle=False) as stored:
                arrays = dict(stored)
        except DAMAGED_ARRAYS as error:
            log.warning("Cannot read '%s', starting over: %s", self.path, error)
            return None
        return arrays if str(arrays.pop(_IDENTITY, "")) == self.identity else None

    def write(self, arrays: Mapping[str, NDArray[Any]], every: float = 0.0) -> None:
        """Write the arrays, unless the last write was less than `every` seconds ago.

        If writing fails, log a warning and go on: the measurement itself must not be lost.
        """
        if self.path is None or not self.distributed.is_leader or time.monotonic() - self._written < every:
            return
        buffer = io.BytesIO()
        named: dict[str, Any] = {_IDENTITY: np.array(self.identity), **arrays}
        np.savez(buffer, **named)
        try:
            with write_errors(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self.path, buffer.getvalue())
        except RunError as error:
            log.warning("%s The measurement continues, but cannot be resumed if it is interrupted.", error)
            self.path = None
        self._written = time.monotonic()
