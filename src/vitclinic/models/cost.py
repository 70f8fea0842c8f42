"""What a pass of a network costs: floating-point operations, and the memory of its tensors and of an optimizer."""

from __future__ import annotations

import math
import tracemalloc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from vitclinic.anatomy import double_differentiable


def peak_bytes(
    call: Callable[[], Any],
    device: torch.device,
    *,
    given: Iterable[Tensor] = (),
    arrays: bool = False,
    at_end: bool = False,
) -> int:
    """Return the peak memory of the tensors created during `call`, in bytes.

    The CPU has no such counter, so the storages of all tensors returned by operators are tracked until they are freed.
    That is exact and repeatable, and does not include the scratch space inside kernels.

    Args:
        call: What is measured.
        device: Where it computes.
        given: Tensors that do not count, though operators may return them: a fake network's weights.
        arrays: Count numpy's arrays, too, and whatever else Python allocates.
        at_end: Return what `call` leaves behind instead of the peak.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    with _traced_arrays() if arrays else nullcontext():
        live = _LiveStorages(given, arrays)
        with live:
            call()
        live.note_arrays()
    return live.now if at_end else live.peak


@contextmanager
def _traced_arrays() -> Iterator[None]:
    """Let `tracemalloc` follow Python's allocations, which are also numpy's."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        yield
    finally:
        if not was_tracing:
            tracemalloc.stop()


class _LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Total size of the storages of live tensors and, if `arrays`, of what Python has allocated."""

    def __init__(self, given: Iterable[Tensor] = (), arrays: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.arrays = arrays
        self._before = tracemalloc.get_traced_memory()[0] if arrays else 0
        self._known: set[int] = set()
        self._given = {_address(tensor) for tensor in given}

    def note_arrays(self) -> None:
        """Count the peak of Python's memory since the last operator."""
        if self.arrays:
            peak = tracemalloc.get_traced_memory()[1] - self._before
            self.peak = max(self.peak, self.now + max(0, peak))
            tracemalloc.reset_peak()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.note_arrays()
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
        self.note_arrays()
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def count_flops(forward: Callable[[], Any], network: nn.Module) -> int:
    """Return the floating-point operations of a forward pass of a network, by torch's `FlopCounterMode`.

    It counts matrix products and convolutions, also those of quantized layers, two for each multiply-add. Fused
    attention, which hides them, is switched off.

    Example:
        >>> layer = nn.Linear(3, 5)
        >>> count_flops(lambda: layer(torch.zeros(2, 3)), layer)
        60
    """
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(_quantized_operators(), _count_quantized))
    with torch.no_grad(), _unfuse_attention(), _without_gradients(network), counter:
        forward()
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
    flops: int = 2 * math.prod(out_shape) * int(weight[0].numel())
    return flops


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


def make_fake(module: nn.Module, mode: FakeTensorMode) -> None:
    """Replace all weights and buffers of a module by fake ones of the same shapes."""
    with _overwritten_parameters():
        module._apply(mode.from_tensor)  # type: ignore[no-untyped-call]


@contextmanager
def _overwritten_parameters() -> Iterator[None]:
    """Let a conversion put new parameters into modules: fake numbers cannot go into the real ones."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def count_state(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state after a step, from a step on parameters with one element each.

    The optimizer has these parameters from then on.
    """
    counts: dict[Tensor, int] = {}

    def shrink(parameter: nn.Parameter) -> nn.Parameter:
        small = nn.Parameter(torch.zeros([1] * parameter.ndim, dtype=parameter.dtype))
        small.grad = torch.ones_like(small)
        counts[small] = parameter.numel()
        return small

    for group in optimizer.param_groups:
        group["params"] = [shrink(parameter) for parameter in group["params"]]
    optimizer.step()
    return sum(
        value.element_size() * (counts[parameter] if value.shape == parameter.shape else value.numel())
        for parameter, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, Tensor)
    )
