"""One process or many: what torchrun started, and the few collective operations that training needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitclinic.errors import RecipeError


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
