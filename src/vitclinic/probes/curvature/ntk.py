"""Condition number of the neural tangent kernel [chen2022 App. G]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic._core.errors import ModelError
from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic._core.statistics import RunningMean
from vitclinic._core.time import Time
from vitclinic.data import Split, evaluation_batches
from vitclinic.data.randomness import generator
from vitclinic.probes.curvature.clock import Clock
from vitclinic.probes.curvature.cut_graph import find_cut_weights, refuse_cut_weights
from vitclinic.probes.curvature.tangent_kernel import (
    GIBIBYTE,
    Conditioning,
    TangentKernel,
    batch_norms,
    conditioning,
    randomize_head,
    recompute_batch_norm,
    replace_gelu,
)
from vitclinic.probes.guards import SAVED_EVERY, Partial
from vitclinic.probes.probe import Cheaper, DoesNotApply, Need, OwningProbe, Result, register
from vitclinic.probes.subject import Subject

_KEPT = ("eigenvalues", "kappa", "resolved")


@register
class NTK(OwningProbe):
    """Condition number of the neural tangent kernel, in blocks of images [chen2022 App. G].

    Theta = J J^T, with J_i the gradient of the summed logits of image i; kappa = lambda_1 / lambda_m of each block of m
    images, averaged over blocks.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> NTK(block=4)(model, loader).arrays["eigenvalues"].shape  # [blocks, m]
        (2, 4)
    """

    name = "ntk"
    group = "Curvature"
    rank = 270
    title = "Neural tangent kernel"
    question = "How well conditioned, and so how trainable, is the network?"
    paper = "Chen et al. 2022, Table 1, App. G (C3)"
    key_scalars: ClassVar[KeyScalars] = {"condition_number": "lower"}
    needs: ClassVar[frozenset[Need]] = frozenset({"logits", "gradients"})
    by_default: ClassVar[bool] = False
    cheaper: ClassVar[Cheaper] = ({"images": 96}, {"images": 240})

    split: Literal["train", "val", "test"] = Field("train", description="split of the images")
    images: Annotated[int, Field(ge=2)] = Field(
        480, description="number of images; those that do not fill a block are left out"
    )
    block: Annotated[int, Field(ge=2)] = Field(48, description="images per block, m")
    relu: bool = Field(True, description="replace GELU by ReLU while measuring, as in the paper")
    batch_norm: Literal["measured", "running"] = Field(
        "measured", description="BatchNorm statistics: measured on these images and then fixed, or running"
    )
    head: Annotated[float, Field(gt=0)] | None = Field(
        None, description="draw the classifier with this standard deviation while measuring; by default it is kept"
    )
    memory: Annotated[float, Field(gt=0)] = Field(1.0, description="maximum memory for gradients, in GiB")
    budget: Time | None = Field(None, description="time limit, as in 2m; the result is then over the blocks so far")

    def view(self, subject: Subject) -> Subject:
        return subject.on(self.split, self.images)

    def forwards(self, subject: Subject) -> float:
        m = min(self.block, len(subject))
        groups = len(self._kernel(subject).groups(m))
        # Each group takes a forward and a backward pass of all images, per image and so slower (as are convolutions and
        # the plain attention kernel then), and the products of the gradients.
        return len(subject) // m * m * (9.0 * groups + 2)

    def peak_memory(self, subject: Subject) -> float:
        m = min(self.block, len(subject))
        return max(subject.footprint.forward(m), self._kernel(subject).peak_memory(subject.footprint, m))

    def measure(self, subject: Subject) -> Result:
        clock = Clock(self.budget, distributed=subject.distributed)
        m = min(self.block, len(subject))
        count = len(subject) // m
        if m < 2:
            raise DoesNotApply("the condition number needs at least two images.")
        partial = Partial(subject.scratch.get(self.name), distributed=subject.distributed)
        found = _unpack(partial.read())
        remaining = range(len(found), count)
        try:
            with self._prepare(subject, m):
                for some in subject.distributed.rounds(len(remaining), self._own(subject, m, remaining)):
                    found += some
                    partial.write(_pack(found), every=SAVED_EVERY)
                    subject.progress(self.name, len(found) * m, count * m)
                    if clock.has_expired():
                        break
        finally:
            partial.write(_pack(found))
        return _result(found, count)

    def _own(self, subject: Subject, m: int, remaining: range) -> Iterator[Conditioning]:
        """Yield the conditioning of this process's share of the remaining blocks."""
        kernel = self._kernel(subject)
        _check(subject, next(_blocks(subject, m)))
        for images in _blocks(subject, m, remaining[subject.distributed.rank :: subject.distributed.size]):
            yield conditioning(kernel(images), kernel.rounding)

    def _kernel(self, subject: Subject) -> TangentKernel:
        return TangentKernel(
            subject.network, memory=max(1, int(self.memory * GIBIBYTE)), at_a_time=max(1, subject.batch_size)
        )

    @contextmanager
    def _prepare(self, subject: Subject, m: int) -> Iterator[None]:
        """Prepare the network: classifier, ReLU and BatchNorm as the options say."""
        with ExitStack() as undo:
            if self.head is not None:
                undo.enter_context(randomize_head(subject.network, subject.outputs, self.head, subject.seed))
            if self.relu:
                undo.enter_context(replace_gelu(subject.network))
            if self.batch_norm == "measured":
                undo.enter_context(recompute_batch_norm(subject.network, _blocks(subject, m)))
            elif any(norm.running_mean is None for norm in batch_norms(subject.network)):
                raise DoesNotApply("the network's BatchNorm has no running statistics; set batch_norm: measured.")
            yield


def _blocks(subject: Subject, m: int, which: Sequence[int] | None = None) -> Iterator[Tensor]:
    """Yield blocks of m images in a seeded random order, since data is often sorted by class and blocks should not be.

    `which` are the numbers of the blocks; None yields all.
    """
    split = subject.images
    blocks = generator("ntk", subject.seed).permutation(len(split))[: len(split) // m * m].reshape(-1, m)
    order = (blocks if which is None else blocks[list(which)]).ravel()
    shuffled = Split(split.images, split.rows[order], split.labels[order])
    dataset = replace(subject.dataset, splits={**subject.dataset.splits, subject.split: shuffled})
    for batch in evaluation_batches(dataset, subject.split, m):
        yield batch.to(subject.device, subject.dtype).images


def _pack(found: list[Conditioning]) -> dict[str, NDArray[Any]]:
    """Return eigenvalues and condition numbers as arrays with one row per block."""
    return {name: np.array([getattr(block, name) for block in found]) for name in _KEPT}


def _unpack(arrays: Mapping[str, NDArray[Any]] | None) -> list[Conditioning]:
    if arrays is None:
        return []
    rows = zip(*(arrays[name] for name in _KEPT), strict=True)
    return [Conditioning(eigenvalues, float(kappa), bool(resolved)) for eigenvalues, kappa, resolved in rows]


def _check(subject: Subject, images: Tensor) -> None:
    """Raise an error unless the outputs are finite and reproducible, with gradients for all weights."""
    with torch.no_grad():
        first, second = subject.logits(images), subject.logits(images)
    if not bool(first.isfinite().all()):
        raise ModelError("the network's outputs are not finite (NaN or infinity), so there is no kernel to measure.")
    if not torch.equal(first, second):
        raise ModelError(
            "the network's outputs differ between two passes of the same images. Remove the layer that is random in"
            " eval mode: it makes every number meaningless."
        )
    weights = {name: p for name, p in subject.network.named_parameters() if p.is_floating_point()}
    flags = [p.requires_grad for p in weights.values()]
    try:
        for p in weights.values():
            p.requires_grad_()
        refuse_cut_weights(find_cut_weights(lambda: subject.logits(images[:1]), weights))
    finally:
        for p, flag in zip(weights.values(), flags, strict=True):
            p.requires_grad_(flag)


def _result(found: list[Conditioning], wanted: int) -> Result:
    unresolved = sum(not block.resolved for block in found)
    reasons = []
    if len(found) < wanted:
        reasons.append(f"the budget ended after {len(found)} of {wanted} blocks.")
    if unresolved:
        reasons.append(
            f"in {unresolved} of {len(found)} blocks the smallest eigenvalue is zero to the network's precision, so"
            " the condition number is a lower bound; check for duplicate images, or measure the network in float64."
        )
    kappa = _mean([block.kappa for block in found], least=1.0)
    if unresolved:
        kappa = Scalar(value=kappa.value, low=kappa.value if kappa.low is None else kappa.low, high=np.inf, n=kappa.n)
    return Result(
        {
            "condition_number": kappa,
            "lambda_1": _mean([float(block.eigenvalues[0]) for block in found]),
            "lambda_m": _mean([float(block.eigenvalues[-1]) for block in found]),
            "block": Scalar(value=float(len(found[0].eigenvalues))),
        },
        arrays={
            "condition_number": np.array([block.kappa for block in found]),
            "eigenvalues": np.stack([block.eigenvalues for block in found]),
        },
        status="not_converged" if reasons else "ok",
        reason=" ".join(reasons) or None,
    )


def _mean(values: list[float], least: float = -np.inf) -> Scalar:
    """Return the mean over blocks, with a t interval if there are several."""
    running = RunningMean()
    running.add(values)
    mean = float(running.mean)
    if running.n < 2:
        return Scalar(value=mean, n=running.n)
    half = float(running.half_width())
    return Scalar(value=mean, low=max(least, mean - half), high=mean + half, n=running.n)
