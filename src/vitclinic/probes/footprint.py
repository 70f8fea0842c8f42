"""Peak memory of a network's passes, traced without computing.

Torch's fake tensors have shapes and no numbers: tracing takes no memory, and as long for a batch as for an image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from vitclinic.anatomy import double_differentiable
from vitclinic.models.cost import peak_bytes
from vitclinic.probes.guards import preserve_attributes, preserve_state

if TYPE_CHECKING:
    from vitclinic.probes.subject import Subject

_CPU = torch.device("cpu")
_FEW, _SOME = 2, 4
"""Images of the two calls of what cannot be traced."""


class Footprint:
    """The memory of passes of a network, in bytes beside its weights; each kind of pass is traced once for a size.

    Example:
        >>> from vitclinic.data import load_batches
        >>> from vitclinic.probes.subject import Subject
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> subject = Subject(network, load_batches([(torch.rand(20, 1, 8, 8), torch.arange(20) % 10)]))
        >>> Footprint(subject).forward(5)  # images and logits
        1480
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._trace = cache(self._trace_uncached)

    @property
    def weights(self) -> int:
        """Bytes of the parameters."""
        return sum(parameter.nbytes for parameter in self.subject.network.parameters())

    @property
    def vector(self) -> int:
        """Bytes of a vector with a number for each weight, in float32 at least."""
        floating = [p for p in self.subject.network.parameters() if p.is_floating_point()]
        return sum(p.numel() * max(4, p.dtype.itemsize) for p in floating)

    @property
    def state(self) -> int:
        """Bytes of parameters and buffers, of which `preserve_state` keeps a copy."""
        return self.weights + sum(buffer.nbytes for buffer in self.subject.network.buffers())

    @property
    def image(self) -> int:
        """Bytes of an image."""
        return self.subject.example.nbytes

    def forward(self, images: int) -> int:
        """Return the peak of a forward pass without gradients, the images included."""
        return self._trace("forward", images)

    def image_gradient(self, images: int) -> int:
        """Return the peak of a forward and backward pass whose gradient is that of the images."""
        return self._trace("image_gradient", images)

    def product(self, images: int) -> int:
        """Return the peak of a Hessian-vector product: a gradient with its graph, differentiated once more."""
        return self._trace("product", images)

    def graph(self, images: int) -> int:
        """Return what the graph of a gradient holds, as long as it is kept."""
        return self._trace("graph", images)

    def extrapolate(self, call: Callable[[Tensor], object], images: Tensor) -> float:
        """Return the peak of a call on images, from calls on few of them: for what cannot be traced."""
        if len(images) <= _SOME:
            return peak_bytes(lambda: call(images), images.device)
        few, some = (peak_bytes(lambda: call(images[:count]), images.device) for count in (_FEW, _SOME))  # noqa: B023
        return few + (some - few) * (len(images) - _FEW) / (_SOME - _FEW)

    def _trace_uncached(self, kind: str, images: int) -> int:
        subject = self.subject
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        tensors = [*subject.network.parameters(), *subject.network.buffers()]
        given = [mode.from_tensor(tensor) for tensor in tensors]
        shape, dtype = (images, *subject.example.shape[1:]), subject.dtype
        kept: list[object] = []

        def call() -> None:
            with mode, torch.set_grad_enabled(kind != "forward"):
                x = torch.zeros(shape, dtype=dtype, device=subject.device)
                kept.append(_PASSES[kind](subject, x))

        with preserve_state(subject.network, subject.seed), preserve_attributes(subject.network):
            counted = peak_bytes(call, _CPU, given=given, at_end=kind == "graph")
        kept.clear()
        return counted


def _run_forward(subject: Subject, images: Tensor) -> None:
    subject.logits(images)


def _run_image_gradient(subject: Subject, images: Tensor) -> None:
    loss = subject.logits(images.requires_grad_()).sum()
    torch.autograd.grad(loss, [images])


def _make_graph(subject: Subject, images: Tensor) -> tuple[Tensor, ...]:
    weights = [p for p in subject.network.parameters() if p.is_floating_point()]
    for weight in weights:
        weight.requires_grad_()
    with double_differentiable():
        labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        loss = F.cross_entropy(subject.logits(images), labels, reduction="sum")
        return torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)


def _run_product(subject: Subject, images: Tensor) -> None:
    weights = [p for p in subject.network.parameters() if p.is_floating_point()]
    gradient = _make_graph(subject, images)
    parts = [part for part in gradient if part is not None and part.requires_grad]
    along = [torch.zeros_like(part) for part in parts]
    torch.autograd.grad(parts, weights, along, retain_graph=True, allow_unused=True)


_PASSES: Mapping[str, Callable[[Subject, Tensor], object]] = {
    "forward": _run_forward,
    "image_gradient": _run_image_gradient,
    "product": _run_product,
    "graph": _make_graph,
}
