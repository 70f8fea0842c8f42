"""The loss as a function of the weights: its value and gradient at the present ones, and the modes to take them in."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitclinic._core.distributed import ALONE, Distributed
from vitclinic._core.errors import ModelError
from vitclinic._core.precision import upcast
from vitclinic.anatomy import double_differentiable
from vitclinic.data import Batch
from vitclinic.probes.curvature.cut_graph import find_cut_weights, refuse_cut_weights
from vitclinic.probes.curvature.pixels import sum_pixel_losses
from vitclinic.probes.output import read_output
from vitclinic.probes.probe import DoesNotApply

Mode = Literal["eval", "train"]
LossName = Literal["softmax", "sigmoid"]
"""The loss whose curvature is measured; chen2022 plots softmax for all networks, and trains ViTs with sigmoid."""


class LossSurface:
    """Loss L as a function of some parameters of a network, while the others stay fixed.

    `mode` is BatchNorm's: "train" normalises each batch by its own statistics, and leaves the running ones alone;
    dropout and stochastic depth are off in both. Use it inside `gradient_mode()`, or `evaluation_mode()` if loss
    values are enough.
    """

    def __init__(
        self,
        network: nn.Module,
        batches: Iterable[Batch],
        *,
        parameters: Mapping[str, nn.Parameter] | None = None,
        decay: float = 0.0,
        decayed: Sequence[nn.Parameter] | None = None,
        mode: Mode = "eval",
        loss: LossName = "softmax",
        distributed: Distributed = ALONE,
    ) -> None:
        self.network = network
        self.loss_name = loss
        self.distributed = distributed
        self.batches = list(batches)
        everything = {name: p for name, p in network.named_parameters() if p.is_floating_point()}
        self.parameters = dict(everything if parameters is None else parameters)
        self.decay = decay
        chosen = {id(p) for p in (everything.values() if decayed is None else decayed)}
        self.decayed = [id(p) in chosen for p in self.parameters.values()]
        self.mode = mode
        self.images = sum(distributed.gather(lambda: sum(len(batch) for batch in self.batches)))

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.parameters.values())

    @property
    def size(self) -> int:
        """Number of weights, n."""
        return sum(p.numel() for p in self.weights)

    @property
    def vector_dtype(self) -> torch.dtype:
        """Dtype of vectors [n] that must stay orthogonal: float32 at least."""
        return reduce(torch.promote_types, {p.dtype for p in self.weights}, torch.float32)

    def coarseness(self, tolerance: float) -> str | None:
        """Return the reason why a half-precision network cannot reach the tolerance; None for other networks."""
        halves = sorted({str(p.dtype).removeprefix("torch.") for p in self.weights if p.dtype.itemsize < 4})
        if not halves:
            return None
        return (
            f"the network computes in {' and '.join(halves)}, whose rounding errors are larger than the tolerance of"
            f" {tolerance:g}: measure it in float32"
        )

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Set `mode` for forward passes without gradients, and undo it afterwards."""
        modes = [(module, module.training) for module in self.network.modules()]
        try:
            self.network.eval()
            for module in self.network.modules():
                if self.mode == "train" and isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.train()
            with _freeze_running_statistics(self.network), torch.no_grad():
                yield
        finally:
            for module, training in modes:
                module.training = training

    @contextmanager
    def gradient_mode(self) -> Iterator[None]:
        """Set `mode`, gradients for the chosen weights, and twice differentiable attention; undo it afterwards."""
        flags = [(p, p.requires_grad) for p in self.network.parameters()]
        chosen = {id(p) for p in self.weights}
        try:
            for p, _ in flags:
                p.requires_grad_(p.is_floating_point() and id(p) in chosen)
            with self.evaluation_mode(), double_differentiable(), torch.enable_grad():
                yield
        except RuntimeError as error:
            if operator := re.search(r"derivative for '?(?:aten::)?(\w+?)_backward'? is not implemented", str(error)):
                raise DoesNotApply(
                    f"torch has no second derivative of {operator[1]}, which the network uses, and so no curvature."
                ) from error
            raise
        finally:
            for p, flag in flags:
                p.requires_grad_(flag)

    def total_loss(self, batch: Batch) -> Tensor:
        """Return the sum of the losses of a batch's images, without weight decay.

        The loss is the cross-entropy of softmax, or with `sigmoid` the sum of every class's binary cross-entropy. That
        of an image with a mask is the mean over its known pixels, as in training.
        """
        if batch.annotations is not None and batch.annotations.masks is not None:
            return sum_pixel_losses(self.network, batch)
        logits = upcast(read_output(self.network(batch.images)))
        if self.loss_name == "sigmoid":
            targets = F.one_hot(batch.targets, logits.shape[1]) if batch.targets.ndim == 1 else batch.targets
            return F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="sum")
        return F.cross_entropy(logits, batch.targets, reduction="sum")

    @torch.no_grad()
    def value(self) -> float:
        """Return L at the present weights, summed in float64."""
        return float(self.distributed.sum(self._own_loss)) / self.images + self.regulariser()

    def _own_loss(self) -> Tensor:
        """Return the sum over this process's images, in float64."""
        zero = torch.zeros((), dtype=torch.float64, device=self.weights[0].device)
        return sum((self.total_loss(batch).double() for batch in self.batches), zero)

    @torch.no_grad()
    def regulariser(self) -> float:
        if not self.decay:
            return 0.0
        squares = (float(p.double().square().sum()) for p, on in zip(self.weights, self.decayed, strict=True) if on)
        return self.decay / 2 * sum(squares)

    def gradient(self) -> Tensor:
        """Return the gradient of L, [n]."""
        total = self.distributed.sum(self._own_gradient).div_(self.images)
        return total + self.decay * self.decay_mask() * self.flat([p.detach() for p in self.weights])

    def _own_gradient(self) -> Tensor:
        """Return the gradient of the total loss over this process's images, [n]."""
        total = torch.zeros(self.size, dtype=self.weights[0].dtype, device=self.weights[0].device)
        for batch in self.batches:
            total += self.flat(torch.autograd.grad(self.total_loss(batch), self.weights, allow_unused=True))
        return total

    def decay_mask(self) -> Tensor:
        """Return 1 for weights with weight decay and 0 for the others, [n]."""
        return self.flat([torch.full_like(p, float(on)) for p, on in zip(self.weights, self.decayed, strict=True)])

    def flat(self, parts: Sequence[Tensor | None]) -> Tensor:
        """Concatenate one tensor per parameter to a vector [n]; None counts as zeros."""
        pairs = zip(parts, self.weights, strict=True)
        return torch.cat([(torch.zeros_like(p) if part is None else part).reshape(-1) for part, p in pairs])

    def split(self, vector: Tensor) -> list[Tensor]:
        """Split a vector [n] into views, one per parameter."""
        pieces = torch.split(vector, [p.numel() for p in self.weights])
        return [piece.view_as(p) for piece, p in zip(pieces, self.weights, strict=True)]

    def check(self) -> float:
        """Return the loss at the present weights.

        Raises:
            ModelError: If it is not finite or not reproducible, or the processes hold different weights.
            DoesNotApply: In `gradient_mode()`, if weights that it depends on have no gradient.
        """
        loss = self._check_value()
        if torch.is_grad_enabled():
            found = self.distributed.gather(self._find_cut_weights)
            refuse_cut_weights(next((names for names in found if names), []))
        return loss

    def _find_cut_weights(self) -> list[str]:
        """Return the names of weights without a gradient on which the loss of an image depends."""
        first = next(iter(self.batches), None)
        return [] if first is None else find_cut_weights(lambda: self.total_loss(first), self.parameters)

    @torch.no_grad()
    def _check_value(self) -> float:
        if len(set(self.distributed.gather(self._checksum))) > 1:
            raise ModelError("the processes have different weights. Load the same network in all of them.")
        first, second = self.value(), self.value()
        if not first < float("inf"):
            raise ModelError(f"the loss is {first}, so there is no curvature to measure.")
        if first != second:
            raise ModelError(
                f"the loss is {first:.9g} and then {second:.9g} for the same weights and images. Remove the layer that"
                " is random in eval mode: it makes every number meaningless."
            )
        return first

    def _checksum(self) -> int:
        """Return a checksum of the weights, if there are several processes to compare."""
        found = 0
        if self.distributed.size > 1:
            for p in self.weights:
                found = zlib.crc32(p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
        return found


@contextmanager
def _freeze_running_statistics(network: nn.Module) -> Iterator[None]:
    """Keep BatchNorm in training mode from updating its running statistics."""
    norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    kept = [(norm, norm.track_running_stats) for norm in norms]
    try:
        for norm in norms:
            norm.track_running_stats = False
        yield
    finally:
        for norm, tracks in kept:
            norm.track_running_stats = tracks
