"""Work in two real gloo processes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def in_two_processes(work: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """`work(rank, *arguments)` in two processes; what each returned. One that waits in vain is an error."""
    torch.multiprocessing.spawn(_worker, (work, str(folder), arguments), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def _worker(rank: int, work: Callable[..., Any], folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    meeting, patience = f"file://{folder}/meeting", timedelta(seconds=90)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=patience)
    try:
        torch.save(work(rank, *arguments), f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
