"""Processes that train or measure one network together: their ranks and how they communicate."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitclinic._core.environment import read_count
from vitclinic._core.errors import LostProcessError, ModelError, RecipeError, first_line

log = logging.getLogger(__name__)

T = TypeVar("T")

_WELL, _STOP, _FAILED = range(3)
_TOLD = "told to all processes"
"""Mark of an error that was received in a meeting."""


@dataclass(frozen=True)
class Distributed:
    """This process among the `size` processes of torch.distributed's default group; a single process by default.

    All processes must make the same calls in the same order. Each call begins with a meeting, in which a process whose
    part has failed reports its error: all of them then raise it, so that none is left waiting. A process group
    may exist without all members taking part: one process of a training may measure something by itself (`ALONE`).

    Example:
        >>> Distributed().gather(lambda: 3)
        [3]
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> Distributed:
        """Return this process among those of torch.distributed's group; a single process if there is no group."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def is_leader(self) -> bool:
        """True in the one process that writes files and prints."""
        return self.rank == 0

    def agree(self, part: Callable[[], T]) -> T:
        """Return `part()`, or raise in all processes the error that it raised in any of them."""
        if self.size == 1:
            return part()
        try:
            result = part()
        except Exception as error:  # any error must be reported to the others
            if not _is_known(error):
                self._meet(_FAILED, error)
            raise
        self._meet(_WELL)
        return result

    def any(self, flag: bool) -> bool:
        """Return True in all processes if `flag` is true in any of them."""
        if self.size == 1:
            return flag
        return self._meet(_STOP if flag else _WELL) == _STOP

    def sum(self, part: Callable[[], Tensor]) -> Tensor:
        """Return the sum of all processes' `part()`."""
        total = self.agree(part)
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def gather(self, part: Callable[[], T]) -> list[T]:
        """Return all processes' `part()`, which must be plain data, in the order of ranks."""
        mine = self.agree(part)
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found

    def rounds(self, count: int, own: Iterator[T]) -> Iterator[list[T]]:
        """Yield the results of `count` pieces of work in order, up to `size` of them at a time.

        Piece k is done by process k mod size, whose results are `own`.
        """
        for start in range(0, count, self.size):
            found: list[Any] = self.gather(partial(next, own, None))
            yield found[: count - start]

    def leader_only(self, part: Callable[[], T]) -> T:
        """Return the leader's `part()` in all processes, which must be plain data; the others do not call it."""
        return self.gather(lambda: part() if self.is_leader else None)[0]  # type: ignore[return-value]

    def leader_first(self, part: Callable[[], T]) -> T:
        """Return `part()`, which the leader calls first, so that the others find its results, such as a cache."""
        mine: list[T] = []
        self.leader_only(lambda: mine.append(part()))
        return self.agree(lambda: mine[0] if mine else part())

    def share_buffers(self, network: nn.Module) -> None:
        """Give all processes the leader's buffers, such as running statistics."""
        if self.size > 1:
            for buffer in network.buffers():
                dist.broadcast(buffer, src=0)

    def wait(self) -> None:
        """Wait until all processes have reached this call."""
        if self.size > 1:
            dist.barrier()

    def _meet(self, word: int, error: Exception | None = None) -> int:
        """Return the most severe status that any process reports; the error of a failure is raised in all of them."""
        box = torch.tensor(word, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        if int(box) == _FAILED:
            errors: list[Any] = [None] * self.size
            dist.all_gather_object(errors, None if error is None else portable(error))
            first = next(rank for rank, found in enumerate(errors) if found is not None)
            common: Exception = errors[first]
            vars(common)[_TOLD] = True  # a copy also where it comes from: the original may be kept, and raised again
            raise common from error
        return int(box)


ALONE = Distributed()

_LOST = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "timed out",
    "application timeout",
    "connection refused",
    "connection was closed",
)
"""What gloo says, in errors of no class of its own, once a process that it talks to is gone."""


def is_lost_process(error: BaseException | None) -> bool:
    """Return True if `error`, or what caused it, means that another process of the group is gone."""
    while error is not None:
        if isinstance(error, dist.DistError | LostProcessError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _LOST):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_known(error: BaseException | None) -> bool:
    """Return True if all processes already know of an error, or of the one that caused it."""
    while error is not None:
        if _TOLD in vars(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def portable(error: Exception) -> Exception:
    """Return the error if it can be sent to another process, else a `ModelError` with its text."""
    try:
        copy.copy(error)  # made anew out of its parts, as in the other process
        pickle.dumps(error)
    except Exception as obstacle:  # errors may be made of anything
        log.info("an error cannot be sent to other processes", exc_info=obstacle)
        return ModelError(f"{type(error).__name__}: {error}")
    return error


@contextmanager
def join_processes(device: torch.device) -> Iterator[Distributed]:
    """Join the process group that torchrun describes in the environment; without torchrun this process is alone."""
    size = read_count("WORLD_SIZE")
    if size <= 1 or dist.is_initialized():
        yield Distributed.current()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)  # what the collective operations on objects use
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    # The others wait while the leader decodes a set for the first time.
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=4))
    except (ValueError, RuntimeError) as error:  # a variable is missing; nobody answers
        reason = first_line(error)
        raise RecipeError(f"The {size} processes cannot meet: {reason}; start them with torchrun.") from error
    try:
        yield Distributed.current()
    except RuntimeError as error:
        if not is_lost_process(error):
            raise
        raise LostProcessError(
            f"One of the {size} processes is gone, and the others cannot go on without it; start them again: what is"
            " stored is kept."
        ) from error
    finally:
        dist.destroy_process_group()


_LOOK_EVERY = 1.0
_GRACE = 120.0
"""Seconds that a process without its parent has to save what it has."""


def _end_with_parent(parent: int) -> None:
    """End this process when its parent, torchrun's agent, is gone: a killed agent leaves nobody to end its processes.

    As a scheduler does, it asks first (SIGTERM, which saves a training) and does not wait forever.
    """
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY)
    log.warning("The process that started this one is gone: saving, and ending.")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os._exit(128 + signal.SIGTERM)


def pick_device(wanted: str) -> torch.device:
    """Return the device of a name; `auto` is the GPU where there is one, `cuda` is this process's own GPU."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise RecipeError(f"'device': there is no device '{wanted}'; use auto, cpu, cuda or cuda:1.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RecipeError("'device': torch finds no CUDA device; use auto or cpu.")
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # every backend has errors of its own
        raise RecipeError(f"'device': nothing can be computed on '{wanted}' here; use auto or cpu.") from error
    if wanted == "cuda":
        return torch.device("cuda", read_count("LOCAL_RANK", 0))
    return device
