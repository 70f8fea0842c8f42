"""One process or many: what torchrun started, and the few collective operations that training needs."""

from __future__ import annotations

import copy
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitclinic._core.errors import ModelError, RecipeError


@dataclass(frozen=True)
class World:
    """This process among all that train together."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def largest(self, value: int) -> int:
        """The largest of all processes' values."""
        if self.size == 1:
            return value
        box = torch.tensor(value, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return int(box)

    def agree(self, value: Any) -> Any:
        """The leading process's `value`, on all of them."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def share_buffers(self, network: nn.Module) -> None:
        """Give every process the leading one's running statistics."""
        if self.size > 1:
            for buffer in network.buffers():
                dist.broadcast(buffer, src=0)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined_world(device: torch.device) -> Iterator[World]:
    """The process group that torchrun describes in the environment; a world of one without torchrun."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or dist.is_initialized():
        yield World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else World()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)  # what the collective operations on objects use
    # The others wait while the leading process decodes a set for the first time.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=4))
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def pick_device(wanted: str) -> torch.device:
    """`auto`: the GPU where there is one, else the CPU; `cuda` is this process's own GPU."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise RecipeError(f"'device': there is no device '{wanted}'; write auto, cpu, cuda or cuda:1.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RecipeError("'device': torch finds no CUDA here; write auto or cpu.")
    if wanted == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


log = logging.getLogger(__name__)

T = TypeVar("T")

_WELL, _STOP, _FAILED = range(3)
_TOLD = "told to all processes"
"""The mark of an error that came from a meeting."""


class Processes:
    """This process among `size` of torch.distributed's default group; alone unless told otherwise.

    All of them must come to every meeting, in the same order. Where a group exists and this was not told, it does not
    wait for the others: one process of a training may measure something by itself.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def joined(cls) -> Processes:
        """All processes of the group that torch.distributed has been told of; this one alone without such a group."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether any process says so; all get the same answer."""
        if self.size == 1:
            return flag
        return self._meet(_STOP if flag else _WELL) == _STOP

    def agreed(self, part: Callable[[], T]) -> T:
        """`part()`, or the error that it, or that of another process, has raised: the same in all of them."""
        if self.size == 1:
            return part()
        try:
            result = part()
        except Exception as error:  # whatever it is, the others must hear of it
            if not _known(error):
                self._meet(_FAILED, error)
            raise
        self._meet(_WELL)
        return result

    def sum(self, part: Callable[[], Tensor]) -> Tensor:
        """The sum of what `part()` is in each process."""
        total = self.agreed(part)
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def gather(self, part: Callable[[], T]) -> list[T]:
        """What `part()` is in each process, in the order of ranks; plain data."""
        mine = self.agreed(part)
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found

    def rounds(self, count: int, own: Iterator[T]) -> Iterator[list[T]]:
        """What all processes find in `count` pieces of work, up to `size` of them at a time, in order.

        Piece k is done by process k mod size, whose pieces are `own`.
        """
        for start in range(0, count, self.size):
            found: list[Any] = self.gather(partial(next, own, None))
            yield found[: count - start]

    def leading(self, part: Callable[[], T]) -> T:
        """What `part()` is in the leading process, which alone calls it; plain data."""
        return self.gather(lambda: part() if self.leads else None)[0]  # type: ignore[return-value]

    def _meet(self, word: int, error: Exception | None = None) -> int:
        """What was said by the one who is worst off; that of a failure is its error, raised in all processes."""
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


def _known(error: BaseException | None) -> bool:
    """Whether an error is one that all processes have heard of, or follows from it."""
    while error is not None:
        if _TOLD in vars(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def portable(error: Exception) -> Exception:
    """The error, if it can be sent to another process; else its text."""
    try:
        copy.copy(error)  # made anew out of its parts, as in the other process
        pickle.dumps(error)
    except Exception as obstacle:  # errors may be made of anything
        log.info("an error cannot be sent to other processes", exc_info=obstacle)
        return ModelError(f"{type(error).__name__}: {error}")
    return error


ALONE = Processes()
