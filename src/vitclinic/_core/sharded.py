"""Tensors that are divided among processes (torch's `DTensor`): a process's own part, and numbers of the whole.

Their class is known by what it can do and not imported, since a process that has none need not wait for it. Functions
of several tensors must be called by all processes, with the same tensors in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm


def is_sharded(tensor: Tensor) -> bool:
    """Return True if each process has a part of the tensor."""
    return hasattr(tensor, "full_tensor")


def own_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, in the same memory; a tensor that is not divided as it is."""
    if not is_sharded(tensor):
        return tensor
    part: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


def own_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this process's parts of tensors."""
    return [own_part(tensor) for tensor in tensors]


def gather_whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor in every process; one that is not divided as it is."""
    if not is_sharded(tensor):
        return tensor
    whole: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return whole


def divide_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor, which every process has, divided as another one is; no process asks another."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    everywhere = DTensor.from_local(whole.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return join_parts(everywhere.redistribute(placements=placements).to_local().clone(), like)


def join_parts(part: Tensor, like: Tensor) -> Tensor:
    """Return the tensor that is divided as another one is, and of which this is the process's own part."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    layout: Any = like
    return DTensor.from_local(
        part, layout.device_mesh, layout.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def total_norm(tensors: Sequence[Tensor]) -> float:
    """Return the l2 norm of all entries of all tensors."""
    if not any(is_sharded(tensor) for tensor in tensors):
        return float(get_total_norm(tensors))
    own = float(get_total_norm(own_parts(tensors)))
    return math.sqrt(_sum_over_parts(own * own, tensors))


def inner_product(first: Sequence[Tensor], second: Sequence[Tensor], length: float = 1.0) -> float:
    """Return the sum over all entries of the products of the tensors' entries, those of `first` divided by `length`."""
    pairs = zip(own_parts(first), own_parts(second), strict=True)
    own = sum(float((x / length * y).sum()) for x, y in pairs)
    return _sum_over_parts(own, first) if any(is_sharded(tensor) for tensor in first) else own


def _sum_over_parts(own: float, tensors: Sequence[Tensor]) -> float:
    """Return the sum of all processes' numbers, the same in each of them."""
    layout: Any = next(tensor for tensor in tensors if is_sharded(tensor))
    box = torch.tensor(own, dtype=torch.float64, device=layout.device)
    dist.all_reduce(box, group=layout.device_mesh.get_group())
    return float(box)
