"""Recording of attention maps, of any library's attention, one layer at a time and without storing them.

The mechanism is a torch function mode that is active only while the attention module of a requested unit runs. There
are three cases:

1. `scaled_dot_product_attention` does not return its map: it is recomputed from the same arguments,
   softmax(q k^T scale + mask), while the network continues with the fused result;
2. `multi_head_attention_forward` (torchvision's ViT) hides the first case: it is called a second time, with
   `need_weights=True`;
3. any other attention ends in a softmax over its last axis, whose result is the map.

Heads of uniform attention, which need no softmax, come last in a map: an attention module with such heads gives their
number in its attribute `uniform_heads`.

Maps exclude dropout in the first two cases and precede it in the third. An attention that computes its map in pieces
has an attribute `in_pieces`; it is set to False during recording, so that the attention makes a single call.
Shapes: B batch (times windows), H heads, Q queries, K keys.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitclinic._core.errors import AnatomyError, NoAttentionMapError
from vitclinic.anatomy.eager import eager, is_recomputing
from vitclinic.anatomy.sites import Size, watch
from vitclinic.anatomy.taps import version_of
from vitclinic.anatomy.units import AttentionSpec, Unit
from vitclinic.anatomy.windows import Windows

_MHA_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
_showing = threading.local()
"""Has `now` while a map is computed and consumed: attention calls made then are not the network's, for any recorder."""


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Attention of one unit for one batch: `weights` [B * windows, H, Q, K], each row summing to 1.

    The first `prefix` keys (and queries, unless the only query is the class token) are off the grid. `hidden` is True
    where an explicit mask of minus infinity keeps a query from a key, [Q, K]; it is the same for all images and heads
    (read from the first) and None if there is no such mask. The masks of shifted windows are not part of it.
    """

    unit: Unit
    weights: Tensor
    prefix: int
    grid: Size
    windows: Windows | None
    hidden: Tensor | None = None

    @property
    def prefix_queries(self) -> int:
        """Number of queries that are off the grid; they come first."""
        return min(self.prefix, self.weights.shape[2])

    @property
    def has_class(self) -> bool:
        """True if the first query is the class token."""
        return self.prefix > 0 and self.unit.attention is not None and self.unit.attention.keys.has_class

    def by_image(self) -> Tensor:
        """Return the weights as [B, windows, H, Q, K]."""
        return self.weights.reshape(-1, len(self.positions()), *self.weights.shape[1:])

    def visible(self) -> Tensor:
        """Return which keys each query may attend to, bool [windows, Q, K]: not across a mask, and no padding."""
        windows = self.windows or Windows(self.grid)
        regions, real = windows.regions(self.grid), windows.positions(self.grid)[..., 0] >= 0
        together = (regions[:, :, None] == regions[:, None]) & real[:, :, None] & real[:, None]
        queries = self.weights.shape[2]
        seen = F.pad(together, (self.prefix, 0, self.prefix, 0), value=True)[:, :queries].to(self.weights.device)
        return seen if self.hidden is None else seen & ~self.hidden

    def positions(self) -> Tensor:
        """Return (row, column) on the grid of each spatial key, [windows, keys - prefix, 2]; (-1, -1) is padding."""
        return (self.windows or Windows(self.grid)).positions(self.grid)


Consumer = Callable[[AttentionMap], None]


@contextmanager
def record_attention(units: Iterable[Unit], consumer: Consumer) -> Iterator[None]:
    """Call `consumer` with the attention map of each unit at every forward pass inside the context.

    The network's outputs do not change (except that torchvision's ViT under no_grad leaves PyTorch's fast path, which
    changes the last bits).

    Args:
        units: Units with attention, such as `anatomy.of_kind("msa")`.
        consumer: Called with an `AttentionMap`. The map may be the network's own tensor: do not write to it.

    Raises:
        NoAttentionMapError: A unit's attention is not one softmax over tokens.
        AnatomyError: The attention of a unit never ran, or the consumer wrote to a map.

    Example:
        >>> import timm
        >>> from vitclinic.anatomy import Anatomy
        >>> network = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32)
        >>> with record_attention(Anatomy.of(network).of_kind("msa"), lambda seen: print(seen.unit.name, seen.grid)):
        ...     _ = network(torch.rand(1, 3, 32, 32))
        blocks.0.msa (2, 2)
        blocks.1.msa (2, 2)
    """
    recorders = [_Recorder(unit, consumer) for unit in units]
    with ExitStack() as stack, eager():
        for recorder in recorders:
            stack.enter_context(recorder.attach())
        yield
    if idle := [recorder.unit.name for recorder in recorders if not recorder.called]:
        raise AnatomyError(
            f"the attention of {', '.join(idle)} never ran: call the network inside the context, and create a new "
            "anatomy if its modules were replaced."
        )
    if unseen := [recorder.unit.name for recorder in recorders if not recorder.seen]:
        raise NoAttentionMapError(
            f"no attention was seen in {', '.join(unseen)}: it uses no softmax that vitclinic recognises; leave it out."
        )


class _Recorder(TorchFunctionMode):
    """Function mode of one unit, active only while its attention module runs: other units cost nothing."""

    def __init__(self, unit: Unit, consumer: Consumer) -> None:
        super().__init__()
        if unit.attention is None or unit.attention.keys.grid_at is None:
            raise NoAttentionMapError(f"attention maps do not apply to {unit.name}: it has no softmax over tokens.")
        self.unit = unit
        self.called = False
        self.seen = False
        self._spec: AttentionSpec = unit.attention
        self._grid_at = unit.attention.keys.grid_at
        self._consumer = consumer
        self._grid: Size | None = None
        self._maps_in_call = 0
        self._on = False

    @contextmanager
    def attach(self) -> Iterator[None]:
        """Add hooks that read the grid of each forward pass and switch the mode on and off around the module."""
        module: Any = self._spec.module
        handles = [
            *watch(self._grid_at, self._note_grid),
            module.register_forward_pre_hook(self._start),
            module.register_forward_hook(self._stop, always_call=True),
        ]
        in_pieces = getattr(module, "in_pieces", None)
        try:
            if in_pieces is not None:
                module.in_pieces = False
            yield
        finally:
            if in_pieces is not None:
                module.in_pieces = in_pieces
            self._stop()  # an interrupt, unlike an error, skips the module's last hook
            for handle in handles:
                handle.remove()

    def _note_grid(self, value: Any) -> None:
        self._grid = self._grid_at.size_of(value)

    def _start(self, *_: Any) -> None:
        if is_recomputing():
            return
        self._maps_in_call = 0
        self.called = True
        self._on = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def _stop(self, *_: Any) -> None:
        # The module's last hook also runs if an earlier hook failed before this mode was on.
        if self._on:
            self._on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(_showing, "now", False):
            return result
        _showing.now = True
        try:
            self._show(func, args, kwargs, result)
        finally:
            _showing.now = False
        return result

    def _show(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if func is F.scaled_dot_product_attention:
            self._emit(_weights_of_sdpa(*args, **kwargs), _hidden_by_sdpa(*args, **kwargs))
        elif func is F.multi_head_attention_forward:
            self._emit(_weights_of_mha(*args, **kwargs))
        elif func in _SOFTMAX and kwargs.get("dim", *args[1:2]) in (-1, result.ndim - 1):
            version = version_of(result)
            self._emit(result.detach(), _hidden(args[0]) if args else None)
            if version_of(result) != version:
                raise AnatomyError(
                    f"the attention map of {self.unit.name} was modified, but the network still uses it; modify a copy "
                    "instead (weights.clone())."
                )

    def _emit(self, weights: Tensor, hidden: Tensor | None = None) -> None:
        if self._grid is None:
            raise AnatomyError(f"{self.unit.name} ran before its grid was known: its family does not fit the network.")
        self._maps_in_call += 1
        if self._maps_in_call > 1 or weights.ndim != 4:
            raise NoAttentionMapError(
                f"the attention of {self.unit.name} is not one softmax of shape [B, heads, queries, keys], "
                "so it has no map; leave the unit out."
            )
        self.seen = True
        batch, _, queries, keys = weights.shape
        if uniform := getattr(self._spec.module, "uniform_heads", 0):
            weights = torch.cat((weights, weights.new_full((batch, uniform, queries, keys), 1 / keys)), dim=1)
        windows = None if self._spec.windows is None else self._spec.windows(self._grid)
        if windows is not None:
            hidden = None  # it would be that of the first window
        self._consumer(AttentionMap(self.unit, weights, self._spec.keys.prefix, self._grid, windows, hidden))


@torch.no_grad()
def _weights_of_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the map that `scaled_dot_product_attention` applies to `value`, without dropout."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        return scores.softmax(-1)
    allowed = attn_mask.dtype == torch.bool
    scores = scores.masked_fill(~attn_mask, -torch.inf) if allowed else scores + attn_mask
    # A query that may see no key attends to nothing, as in PyTorch's own kernels.
    return scores.softmax(-1).masked_fill(scores.amax(-1, keepdim=True) == -torch.inf, 0.0)


def _hidden_by_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Tensor | None:
    """Return where the mask of the call keeps a query from a key, [Q, K]."""
    shape = (query.shape[-2], key.shape[-2])
    if is_causal:
        return torch.ones(shape, dtype=torch.bool, device=query.device).triu(1)
    if attn_mask is None:
        return None
    if attn_mask.dtype == torch.bool:
        return ~_first(attn_mask).expand(shape)
    return _hidden(attn_mask).expand(shape)


def _hidden(scores: Tensor) -> Tensor:
    """Return where the scores are minus infinity, in the first image and head."""
    return _first(scores.detach()) == -torch.inf


def _first(x: Tensor) -> Tensor:
    """Return the first entry of all axes but the last two."""
    return x[(0,) * (x.ndim - 2)]


@torch.no_grad()
def _weights_of_mha(*args: Any, **kwargs: Any) -> Tensor:
    """Return the maps per head of `multi_head_attention_forward`, run again without dropout, so without randomness."""
    call = _MHA_SIGNATURE.bind(*args, **kwargs)
    call.arguments |= {"need_weights": True, "average_attn_weights": False, "training": False}
    _, weights = F.multi_head_attention_forward(*call.args, **call.kwargs)
    assert weights is not None  # they were asked for
    return weights
