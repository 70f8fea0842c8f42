"""Cost of a network: parameters, FLOPs, speed and peak memory."""

from __future__ import annotations

import os
import platform
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic._core.statistics import median_interval
from vitclinic.anatomy import double_differentiable
from vitclinic.probes.digest import packed_weights
from vitclinic.probes.probe import Cheaper, OwningProbe, Result, register
from vitclinic.probes.subject import Subject


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """Return the peak memory of the tensors created during `call`, in bytes.

    The CPU has no such counter, so the storages of all tensors returned by operators are tracked until they are freed.
    That is exact and repeatable, and does not include the scratch space inside kernels.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    live = _LiveStorages()
    with live:
        call()
    return live.peak


class _LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Total size of the storages of live tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()
        self._given: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):  # tensors that existed before the call do not count
            if isinstance(tensor, Tensor) and _address(tensor) not in self._known:
                self._given.add(_address(tensor))
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._given:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


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
        parameters = [*subject.network.parameters(), *packed_weights(subject.network)]
        held = sum(tensor.nbytes for tensor in (*parameters, *subject.network.buffers(), images))
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


def flops(subject: Subject, images: Tensor) -> int:
    """Return the floating-point operations of a forward pass, by torch's `FlopCounterMode`.

    It counts matrix products and convolutions, also those of quantized layers. Fused attention, which hides them, is
    switched off.
    """
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(_quantized_operators(), _count_quantized))
    with torch.no_grad(), _unfuse_attention(), _without_gradients(subject.network), counter:
        subject.logits(images)
    return int(counter.get_total_flops())


def _quantized_operators() -> list[Any]:
    """Return torch's quantized linear layers and convolutions, of which `FlopCounterMode` knows nothing."""
    names = [
        f"{layer}{suffix}" for layer in ("linear", "conv1d", "conv2d", "conv3d") for suffix in ("", "_relu", "_dynamic")
    ]
    found = (getattr(torch.ops.quantized, name, None) for name in (*names, "linear_relu_dynamic"))
    return [operator for operator in found if operator is not None]


def _count_quantized(shape: Any, packed: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    """Return the FLOPs of a quantized layer: a product and a sum for each output and each weight of its channel."""
    weight, _bias = packed.unpack()
    return 2 * int(np.prod(out_shape)) * int(weight[0].numel())


@contextmanager
def _without_gradients(network: nn.Module) -> Iterator[None]:
    """Switch `requires_grad` off: an expanded class token that requires a gradient breaks `FlopCounterMode`."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


@contextmanager
def _unfuse_attention() -> Iterator[None]:
    """Compute attention as plain matrix products, and switch off the fast path of nn.MultiheadAttention."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with double_differentiable():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


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
