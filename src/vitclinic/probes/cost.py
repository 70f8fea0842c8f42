"""Cost of a network: parameters, FLOPs, speed and peak memory."""

from __future__ import annotations

import os
import platform
import statistics
import time
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic._core.statistics import median_interval
from vitclinic.models.cost import count_flops, peak_bytes
from vitclinic.probes.digest import find_integer_weights, find_packed_weights
from vitclinic.probes.probe import Cheaper, DoesNotApply, OwningProbe, Result, register
from vitclinic.probes.subject import Subject

_ALONE = 8
"""Time of a forward pass of a single image, in images of a batch."""


@register
class Cost(OwningProbe):
    """Parameters, FLOPs per image, images per second and peak memory of a forward pass.

    A multiplication and an addition are two FLOPs; many papers mean half of that by "FLOPs". After a warm-up, one image
    and a batch are timed in turn, and the median is reported with its interval.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> int(Cost(repeats=1, batch=2)(model, loader).scalars["parameters"].value)
        5489482
    """

    name = "cost"
    group = "Network"
    rank = 20
    title = "Cost"
    question = "How large and how fast is it?"
    paper = "Park and Kim 2022, Fig. 12 (P11)"
    key_scalars: ClassVar[KeyScalars] = {
        "parameters": "lower",
        "flops": "lower",
        "images_per_second": "higher",
        "latency_seconds": "lower",
        "peak_memory_bytes": "lower",
    }
    cheaper: ClassVar[Cheaper] = ({"repeats": 3, "batch": 4},)

    repeats: Annotated[int, Field(ge=1)] = Field(10, description="number of timings")
    batch: Annotated[int, Field(ge=1)] = Field(32, description="batch size for images/s and memory")

    def forwards(self, subject: Subject) -> float:
        batch = min(self.batch, subject.batch_size)
        return float((self.repeats + 2) * (batch + _ALONE) + 2 * _ALONE)

    def conditions(self, subject: Subject) -> dict[str, Any]:
        """Return the machine and the batch size, which the speed depends on."""
        on_cuda = subject.device.type == "cuda"
        return {
            "processor": torch.cuda.get_device_name(subject.device) if on_cuda else _processor(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "batch": min(self.batch, subject.batch_size),
        }

    @torch.no_grad()
    def measure(self, subject: Subject) -> Result:
        batch = min(self.batch, subject.batch_size)
        images = _repeat(next(subject.batches()).images, batch)
        seconds = self._times(subject, images)
        rates = batch / seconds[:, 1]
        parameters = [*subject.network.parameters(), *find_packed_weights(subject.network)]
        held = sum(tensor.nbytes for tensor in (*parameters, *subject.network.buffers(), images))
        parameters += _integer_buffers(subject)
        scalars = {
            "parameters": Scalar(value=float(sum(p.numel() for p in parameters))),
            "flops": Scalar(value=float(flops(subject, images[:1]))),
            "images_per_second": _median(rates.tolist()),
            "latency_seconds": _median(seconds[:, 0].tolist()),
            "peak_memory_bytes": Scalar(value=float(held + peak_bytes(lambda: subject.logits(images), subject.device))),
            "batch": Scalar(value=float(batch)),
        }
        return Result(scalars, arrays={"seconds": seconds})

    def _times(self, subject: Subject, images: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the seconds of one image and of a batch, [repeats, 2], in turn, so that a slow spell hits both."""
        sizes = [images[:1], images]
        for some in sizes:
            _time(subject, some)
        return np.array([[_time(subject, some) for some in sizes] for _ in range(self.repeats)])


def _integer_buffers(subject: Subject) -> list[Tensor]:
    """Return the weights that are kept as int8 in buffers.

    Raises:
        DoesNotApply: Integers of another kind hold several weights each, nobody knows how many.
    """
    own = {id(parameter) for parameter in subject.network.parameters()}
    found = find_integer_weights(subject.network)
    if packed := [name for name, tensor in found.items() if tensor.dtype != torch.int8]:
        raise DoesNotApply(f"the weights in {packed[0]} are packed into integers, so that they cannot be counted.")
    return [tensor for tensor in found.values() if id(tensor) not in own]


def flops(subject: Subject, images: Tensor) -> int:
    """Return the floating-point operations of a forward pass; see `count_flops`."""
    return count_flops(lambda: subject.logits(images), subject.network)


def _time(subject: Subject, images: Tensor) -> float:
    start = time.perf_counter()
    subject.logits(images)
    if subject.device.type == "cuda":
        torch.cuda.synchronize(subject.device)
    return time.perf_counter() - start


def _median(values: list[float]) -> Scalar:
    low, high = median_interval(values) or (None, None)
    return Scalar(value=statistics.median(values), low=low, high=high, n=len(values))


def _repeat(images: Tensor, count: int) -> Tensor:
    """Return `count` images, repeating the given ones if there are fewer."""
    return images.repeat(-(-count // len(images)), 1, 1, 1)[:count]


def _processor() -> str:
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
