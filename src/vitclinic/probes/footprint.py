"""Peak memory of a call: the allocator's own counter on CUDA, a count of live tensors elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """The most memory that tensors made during `call` took at one time, in bytes.

    On the CPU, which has no such counter, the storages of all tensors that operators return are followed until they are
    freed: exact and repeatable, without the scratch space that a kernel uses inside.
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
    """Adds up the storages of tensors while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()
        self._given: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):  # what was there before the call is not the call's own
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
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
