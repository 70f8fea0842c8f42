"""Recording of attention maps, of any library's attention, one layer at a time and without storing them.

The mechanism is a torch function mode that is active only while the attention module of a requested unit runs. A unit
that was observed says which of the module's attentions is meant; otherwise there must be only one. There are three
cases:

1. `scaled_dot_product_attention` does not return its map: it is recomputed from the same arguments,
   softmax(q k^T scale + mask), while the network continues with the fused result;
2. `multi_head_attention_forward` (torchvision's ViT) hides the first case: it is called a second time, with
   `need_weights=True`;
3. any other attention ends in a softmax over its last axis, whose result is the map.

A unit that was observed may also say that a matrix product applies the map, changed since its softmax (gated, or cut
to the largest weights), or that several softmaxes compute its groups of heads, which are shown as one map.

Heads of uniform attention, which need no softmax, come last in a map: an attention module with such heads gives their
number in its attribute `uniform_heads`.

Maps exclude dropout in the first two cases and precede it in the third. An attention that computes its map in pieces
has an attribute `in_pieces`; it is set to False during recording, so that the attention makes a single call.

To differentiate with respect to maps (`grad=True`), the network continues with map x V instead of a fused result.
Shapes: B batch (times windows), H heads, Q queries, K keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from vitclinic._core.errors import AnatomyError, NoAttentionMapError
from vitclinic.anatomy.forward import Removable, eager, is_looking, is_recomputing, look
from vitclinic.anatomy.maps import (
    ATTENTION,
    MHA_SIGNATURE,
    PRODUCTS,
    AttentionCall,
    AttentionMap,
    attention_scores,
    hidden_by,
    is_over_last_axis,
    join_heads,
    project_heads,
)
from vitclinic.anatomy.sites import Size, version_of, watch
from vitclinic.anatomy.units import AttentionSpec, Unit

Consumer = Callable[[AttentionMap], None]


@contextmanager
def record_attention(units: Iterable[Unit], consumer: Consumer, *, grad: bool = False) -> Iterator[None]:
    """Call `consumer` with the attention map of each unit at every forward pass inside the context.

    The network's outputs do not change (except that torchvision's ViT under no_grad leaves PyTorch's fast path, which
    changes the last bits).

    Args:
        units: Units with attention, such as `anatomy.of_kind("msa")`.
        consumer: Called with an `AttentionMap`. The map may be the network's own tensor: do not write to it.
        grad: Compute attention from its map, so that outputs can be differentiated with respect to `source` of a map;
            they change in the last bits.

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
    recorders = [_Recorder(unit, consumer, grad) for unit in units]
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

    def __init__(self, unit: Unit, consumer: Consumer, grad: bool) -> None:
        super().__init__()
        if unit.attention is None or (unit.attention.seen is None and unit.attention.keys.grid_at is None):
            raise NoAttentionMapError(f"attention maps do not apply to {unit.name}: it has no softmax over tokens.")
        self.unit = unit
        self.called = False
        self.seen = False
        self._spec: AttentionSpec = unit.attention
        self._seen = unit.attention.seen
        self._grid_at = unit.attention.keys.grid_at
        self._consumer = consumer
        self._grad = grad
        self._grid: Size | None = None if self._seen is None else self._seen.grids[1]
        self._calls = 0
        self._attentions = 0
        self._maps_in_call = 0
        self._groups: list[tuple[Tensor, Tensor]] = []
        """Maps of this call so far, as computed and arranged, if groups of heads have a softmax each."""
        self._on = 0

    @contextmanager
    def attach(self) -> Iterator[None]:
        """Add hooks that read the grid of each forward pass and switch the mode on and off around the module."""
        module: Any = self._spec.module
        handles: list[Removable] = [
            module.register_forward_pre_hook(self._start),
            module.register_forward_hook(self._stop, always_call=True),
        ]
        if self._grid_at is not None:
            handles += watch(self._grid_at, self._note_grid)
        if self._seen is not None and self._seen.within is not None:
            handles.append(self._seen.within.register_forward_pre_hook(self._restart))
        in_pieces = getattr(module, "in_pieces", None)
        try:
            if in_pieces is not None:
                module.in_pieces = False
            yield
        finally:
            if in_pieces is not None:
                module.in_pieces = in_pieces
            while self._on:  # an interrupt, unlike an error, skips the module's last hook
                self._stop()
            for handle in handles:
                handle.remove()

    def _note_grid(self, value: Any) -> None:
        assert self._grid_at is not None
        self._grid = self._grid_at.size_of(value)

    def _restart(self, *_: Any) -> None:
        self._calls = 0

    def _start(self, *_: Any) -> None:
        if is_recomputing():
            return
        self._calls += 1
        if self._seen is not None and self._seen.within is not None and self._calls != self._seen.call + 1:
            return
        self._attentions = 0
        self._maps_in_call = 0
        self._groups = []
        self.called = True
        self._on += 1
        self.__enter__()  # type: ignore[no-untyped-call]

    def _stop(self, *_: Any) -> None:
        # The module's last hook also runs if an earlier hook failed before this mode was on.
        if self._on:
            self._on -= 1
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        by_product = self._seen is not None and self._seen.operand is not None
        if func not in (PRODUCTS if by_product else ATTENTION) or is_looking():
            return func(*args, **kwargs)
        self._attentions += 1
        if self._seen is not None and self._attentions - 1 not in self._seen.numbers:
            return func(*args, **kwargs)
        if by_product:
            self._show_operand(args, kwargs)
            return func(*args, **kwargs)
        if self._grad and func is F.scaled_dot_product_attention:
            return self._attend(AttentionCall(*args, **kwargs))
        if self._grad and func is F.multi_head_attention_forward:
            call = MHA_SIGNATURE.bind(*args, **kwargs)
            call.apply_defaults()
            return self._attend_heads(call)
        result = func(*args, **kwargs)
        with look():
            self._show(func, args, kwargs, result)
        return result

    def _attend(self, call: AttentionCall) -> Tensor:
        """Return what `scaled_dot_product_attention` returns, computed from the map that is shown."""
        with look():
            weights, hidden = _map_of_sdpa(call)
            self._emit(weights, hidden)
        return weights @ call.repeat_groups().value

    def _attend_heads(self, call: inspect.BoundArguments) -> tuple[Tensor, Tensor | None]:
        """Return what `multi_head_attention_forward` returns, computed from the map that is shown."""
        given = call.arguments
        extras = ("attn_mask", "key_padding_mask", "bias_k", "bias_v", "static_k", "static_v")
        if found := [name for name in extras if given[name] is not None] or ["add_zero_attn"] * given["add_zero_attn"]:
            raise NoAttentionMapError(
                f"the attention of {self.unit.name} has {found[0]}, through which maps have no gradients yet."
            )
        query, key, value = project_heads(given, (given["query"], given["key"], given["value"]))
        heads = AttentionCall(query, key, value)
        result = join_heads(self._attend(heads), given)
        if not given["need_weights"]:
            return result, None
        weights, _ = _map_of_sdpa(heads)
        return result, weights.mean(1) if given["average_attn_weights"] else weights

    def _show(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if func is F.scaled_dot_product_attention:
            with torch.no_grad():
                weights, hidden = _map_of_sdpa(AttentionCall(*args, **kwargs))
            self._emit(weights, hidden)
        elif func is F.multi_head_attention_forward:
            self._emit(_weights_of_mha(*args, **kwargs))
        elif self._seen is not None or is_over_last_axis(result, args, kwargs):
            self._show_own(result, _hidden(args[0]) if args else None)

    def _show_operand(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Show the map that a matrix product is about to apply."""
        assert self._seen is not None
        assert self._seen.operand is not None
        operands = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        with look():
            self._show_own(operands[self._seen.operand])

    def _show_own(self, weights: Tensor, hidden: Tensor | None = None) -> None:
        """Show a map that is the network's own tensor, to which nobody may write."""
        version = version_of(weights)
        self._emit(weights if self._grad else weights.detach(), hidden)
        if version_of(weights) != version:
            raise AnatomyError(
                f"the attention map of {self.unit.name} was modified, but the network still uses it; modify a copy "
                "instead (weights.clone())."
            )

    def _emit(self, weights: Tensor, hidden: Tensor | None = None) -> None:
        if self._grid is None:
            raise AnatomyError(f"{self.unit.name} ran before its grid was known: its family does not fit the network.")
        computed, weights = weights, weights.detach()
        source: Tensor | tuple[Tensor, ...] | None = computed if self._grad else None
        if self._seen is not None:
            weights, hidden = self._seen.arrange(weights), None
            if len(self._seen.numbers) > 1:
                # A copy: the network may write to this map before the last group is there.
                self._groups.append((computed, weights.clone()))
                if len(self._groups) < len(self._seen.numbers):
                    return
                source = None if source is None else tuple(group for group, _ in self._groups)
                weights = torch.cat([arranged for _, arranged in self._groups], dim=1)
                self._groups = []
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
        self._consumer(AttentionMap(self.unit, weights, self._spec.keys.prefix, self._grid, windows, hidden, source))


def _map_of_sdpa(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Return the map that `scaled_dot_product_attention` applies, without dropout, and what its mask hides, [Q, K]."""
    call = call.repeat_groups()
    mask = call.mask
    scores, hidden = attention_scores(call.query, call.key, call.scale, mask)
    if mask is None or hidden is None:
        return scores.softmax(-1), None
    scores = scores.masked_fill(hidden, -torch.inf)
    # A query that may see no key attends to nothing, as in PyTorch's own kernels.
    weights = scores.softmax(-1).masked_fill(scores.amax(-1, keepdim=True) == -torch.inf, 0.0)
    return weights, _hidden(mask).expand(call.query.shape[-2], call.key.shape[-2])


def _hidden(mask: Tensor) -> Tensor:
    """Return where a mask, or masked scores, hide a key from a query in the first image and head, [Q, K]."""
    return hidden_by(mask.detach()[(0,) * (mask.ndim - 2)])


@torch.no_grad()
def _weights_of_mha(*args: Any, **kwargs: Any) -> Tensor:
    """Return the maps per head of `multi_head_attention_forward`, run again without dropout, so without randomness."""
    call = MHA_SIGNATURE.bind(*args, **kwargs)
    call.arguments |= {"need_weights": True, "average_attn_weights": False, "training": False}
    _, weights = F.multi_head_attention_forward(*call.args, **call.kwargs)
    assert weights is not None  # they were asked for
    return weights
