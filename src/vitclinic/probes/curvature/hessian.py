"""Products of the Hessian of a loss with vectors.

H v is the derivative of (gradient . v). If memory allows, the graph of each batch's gradient is kept and differentiated
again for every product, which is fastest; otherwise it is rebuilt for each product, so that memory is bounded by the
graph of one batch.

Vectors are multiplied one at a time. Several at once (`is_grads_batched`) pay off only if overhead dominates, and need
as many times the memory. On one CPU thread, products with 4 and 8 vectors at once are 1.6 and 1.9 times as fast per
vector for a ViT of 23,000 parameters and 8 images (some 40 ms a product), 1.06 and 1.05 times for 119,000 parameters
and 4 images, but 0.82 and 0.78 times for 683,000 parameters and 16 images (medians of interleaved runs on a busy
machine).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitclinic.data import Batch
from vitclinic.probes.curvature.loss_surface import LossSurface
from vitclinic.probes.subject import Subject

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class _Gradient:
    """Gradient of the total loss of a batch, with its graph, for the parameters that the loss depends on."""

    parts: list[Tensor]
    which: list[int]


class Hessian:
    """Hessian of a loss surface at the present weights, as a linear operator.

    Args:
        surface: The loss surface.
        memory: Maximum bytes of kept graphs; by default half of the free memory, divided among the processes that
            measure together. 0 keeps none.
    """

    def __init__(self, surface: LossSurface, memory: int | None = None) -> None:
        self.surface = surface
        if memory is None:
            memory = free_memory(surface.weights[0].device) // 2 // surface.distributed.size
        self.memory = memory
        self.products = 0
        self.graph_bytes = 0
        self._kept: list[_Gradient | None] = []

    @property
    def keeps(self) -> bool:
        """True if the graphs of all batches are kept."""
        return bool(self._kept) and all(kept is not None for kept in self._kept)

    def product(self, vector: Tensor) -> Tensor:
        """Return H v, [n], in the dtype of v; intermediate results have that of the weights."""
        return self._product(vector, range(len(self.surface.weights)))

    def block(self, names: Sequence[str]) -> tuple[Callable[[Tensor], Tensor], int]:
        """Return a function that multiplies with the diagonal block of the parameters `names`, and the block's size.

        It uses the same graphs, and differentiates only from and to these parameters.
        """
        at = {name: index for index, name in enumerate(self.surface.parameters)}
        chosen = [at[name] for name in names]
        size = sum(self.surface.weights[index].numel() for index in chosen)
        return lambda vector: self._product(vector, chosen), size

    def _product(self, vector: Tensor, chosen: Sequence[int]) -> Tensor:
        surface = self.surface
        self.products += 1
        total = surface.distributed.sum(lambda: self._own_product(vector, chosen)).div_(surface.images)
        weights = [surface.weights[at] for at in chosen]
        for at, target, along in zip(chosen, _pieces(total, weights), _pieces(vector, weights), strict=True):
            if surface.decay and surface.decayed[at]:
                target.add_(along, alpha=surface.decay)
        return total

    def _own_product(self, vector: Tensor, chosen: Sequence[int]) -> Tensor:
        """Return the product for the total loss over this process's images, without weight decay."""
        weights = [self.surface.weights[at] for at in chosen]
        pieces = zip(_pieces(vector, weights), weights, strict=True)
        along = dict(zip(chosen, (piece.to(weight.dtype) for piece, weight in pieces), strict=True))
        total = torch.zeros_like(vector)
        into = _pieces(total, weights)
        for index, batch in enumerate(self.surface.batches):
            gradient, kept = self._gradient(index, batch)
            pairs = [(part, along[at]) for part, at in zip(gradient.parts, gradient.which, strict=True) if at in along]
            if not pairs:
                continue
            parts, directions = zip(*pairs, strict=True)
            found = torch.autograd.grad(parts, weights, directions, retain_graph=kept, allow_unused=True)
            for target, part in zip(into, found, strict=True):
                if part is not None:
                    target += part
        return total

    def release(self) -> None:
        """Free the kept graphs."""
        self._kept = []
        self.graph_bytes = 0

    def _gradient(self, index: int, batch: Batch) -> tuple[_Gradient, bool]:
        if index < len(self._kept):
            kept = self._kept[index]
            return (self._differentiate(batch), False) if kept is None else (kept, True)
        room = self.memory - self.graph_bytes
        if room <= 0:
            self._kept.append(None)
            return self._differentiate(batch), False
        size = _SavedBytes()
        with torch.autograd.graph.saved_tensors_hooks(size.note, lambda tensor: tensor):
            made = self._differentiate(batch)
        if size.total <= room:
            self.graph_bytes += size.total
            self._kept.append(made)
            return made, True
        self._kept.append(None)
        return made, False

    def _differentiate(self, batch: Batch) -> _Gradient:
        surface = self.surface
        grads: Sequence[Tensor | None] = torch.autograd.grad(
            surface.total_loss(batch), surface.weights, create_graph=True, allow_unused=True
        )
        which = [at for at, part in enumerate(grads) if part is not None and part.requires_grad]
        return _Gradient([grads[at] for at in which], which)  # type: ignore[misc]


def held_by_products(subject: Subject, images: int, batch: int, vectors: int) -> float:
    """Return the bytes held at the peak of products with the Hessian of a loss of so many images.

    Args:
        subject: The network.
        images: Images of the loss.
        batch: Images of each batch, whose graphs are kept as memory allows.
        vectors: Vectors that are held, such as a basis; the product comes on top.
    """
    footprint, batch = subject.footprint, min(batch, images)
    kept = (-(-images // batch) - 1) * footprint.graph(batch)
    room = free_memory(subject.device) // 2 // subject.distributed.size
    return min(kept, room) + footprint.product(batch) + vectors * footprint.vector


def _pieces(vector: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into views, one per weight tensor."""
    pieces = torch.split(vector, [weight.numel() for weight in weights])
    return [piece.view_as(weight) for piece, weight in zip(pieces, weights, strict=True)]


class _SavedBytes:
    """Total size of the storages saved by a graph, each counted once."""

    def __init__(self) -> None:
        self.total = 0
        self._seen: set[int] = set()

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.total += storage.nbytes()
        return tensor.detach()  # the tensor itself would be a reference cycle; autograd adds its history again


def free_memory(device: torch.device) -> int:
    """Return the free memory of a device in bytes; if unknown, half of the machine's memory, or 2 GB."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = _available(_MEMINFO)
    if available is not None:
        return available
    if not hasattr(os, "sysconf"):  # Windows
        return 2 * 2**30
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _available(path: Path) -> int | None:
    """Return Linux's estimate, which includes page cache that can be reclaimed; None on other systems."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024
