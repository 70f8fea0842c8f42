"""Half precision is turned into single precision before sums, norms and exponentials."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """Return `x` in float32 if its numbers have fewer than 32 bits, else `x` itself: float64 stays float64.

    Example:
        >>> import torch
        >>> upcast(torch.ones(2, dtype=torch.bfloat16)).dtype, upcast(torch.ones(2, dtype=torch.float64)).dtype
        (torch.float32, torch.float64)
    """
    return x.float() if x.dtype.itemsize < 4 else x
