"""Rules by which the places of a tensor's numbers follow from those of the operation's arguments.

Operations that move numbers (view, permute, roll, cat, ...) move the cells in the same way; operations on each number
keep them; reductions keep a cell that all joined numbers share, or join groups of cells to a coarser grid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from vitclinic.anatomy.observation.places import (
    FIXED_MIXERS,
    MIXED,
    OFF_GRID,
    PADDING,
    Mixing,
    Outcome,
    Places,
    Step,
    convolve,
    full,
    is_constant,
    lose,
    merge,
    multiply,
    multiply_linear,
    off_grid_tokens,
    pool,
    resize,
    sample,
)


def follow(step: Step) -> Outcome:
    """Return the places of an operation's results, and how it mixes cells."""
    if not step.tracked:
        return [], None
    rule = _RULES.get(step.name)
    if rule is None:
        rule = _copy if step.name == "copy_" else _keep if _is_elementwise(step) else lose
    try:
        return rule(step)
    except (RuntimeError, IndexError, TypeError, ValueError):  # an overload that the rule does not know
        return lose(step)


def _is_elementwise(step: Step) -> bool:
    tensors = [value.shape for value in pytree.tree_leaves((step.args, step.kwargs)) if isinstance(value, Tensor)]
    try:
        return len(step.outputs) == 1 and bool(torch.broadcast_shapes(*tensors) == step.outputs[0].shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False


def _keep(step: Step) -> Outcome:
    """Rule of an operation on each number, with broadcasting: cells stay where operands agree or only one has any."""
    shape = step.outputs[0].shape
    found = step.tracked
    best = max(found, key=lambda places: (places.keys is not None, bool((places.cells >= 0).any())))
    cells = best.cells.expand(shape)
    mixing: Mixing | None = None
    for other in found:
        if other is not best and other.keys is None and best.keys is None:
            combined = _combine(cells, other.cells.expand(shape))
            if other.grid == best.grid and bool(((combined == MIXED) & (cells >= 0)).any()):
                mixing = "join"
            if step.name.removesuffix("_") in ("add", "sub", "lerp", "addcmul") and bool(
                ((combined == MIXED) & (cells >= 0)).any()
            ):
                # A sum with features of a coarser grid, or of other windows: the finer state goes on.
                finer = max((best, other), key=lambda places: len(torch.unique(places.cells)))
                best, combined = finer, finer.cells.expand(shape)
            cells = combined
    keys = None if best.keys is None else best.keys.expand(shape)
    return [Places(cells, best.grid, keys, best.key_grid)], mixing


def _copy(step: Step) -> Outcome:
    """Rule of writing a tensor into another."""
    places = step.of(step.args[1])
    if places is None:
        return [], None
    return [places.map(lambda cells: cells.expand(step.outputs[0].shape))], None


def _combine(a: Tensor, b: Tensor) -> Tensor:
    if a is b or (a.shape == b.shape and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()):
        return a
    both = (a >= 0) & (b >= 0)
    agreed = torch.where(a == b, a, MIXED)
    return torch.where(both, agreed, torch.where((a >= 0) | (b >= 0), torch.maximum(a, b), torch.minimum(a, b)))


def _keep_first(step: Step) -> Outcome:
    """Rule of normalization and of softmax: cells of the first argument stay."""
    places = step.of(step.args[0])
    if places is None:
        return lose(step)
    first = places.map(lambda cells: cells.expand(step.outputs[0].shape))
    rest = [Places(full(output.shape, MIXED), places.grid) for output in step.outputs[1:]]
    return [first, *rest], None


def _soften(step: Step) -> Outcome:
    """Rule of softmax: along cells, it weighs them, for one result or for as many as there are queries."""
    outcome, _ = _keep_first(step)
    places, axis = step.of(step.args[0]), step.args[1]
    alone = places is not None and places.keys is None and not is_constant(places.cells, axis)
    return outcome, "context" if alone else None


def _move(step: Step) -> Outcome:
    """Rule of an operation that moves numbers: the cells are moved by the operation itself."""
    if step.name == "cat" and (alike := _join_alike(step)) is not None:
        return [alike], None
    best = max(step.tracked, key=lambda places: bool((places.cells >= 0).any()))
    if len({places.grid for places in step.tracked if bool((places.cells >= 0).any())}) > 1:
        return lose(step)  # cells of two grids side by side
    keyed = any(places.keys is not None for places in step.tracked)
    added = _added_tokens(step) if step.name == "cat" else {}

    def moved(keys: bool) -> list[Tensor]:
        def stand_in(value: Any) -> Any:
            if not isinstance(value, Tensor) or _is_index(value):
                return value  # an index, even one that depends on the image, is used as it is
            places = step.of(value)
            if places is not None:
                return places.keys if keys and places.keys is not None else places.cells
            return added[id(value)] if id(value) in added else full(value.shape, OFF_GRID)

        args = pytree.tree_map(stand_in, list(step.args))
        kwargs = {key: stand_in(value) for key, value in step.kwargs.items()}
        result = _MOVES[step.name](step, args, kwargs)
        return [result] if isinstance(result, Tensor) else list(result)

    cells, keys = moved(False), moved(True) if keyed else None
    indices = [value for value in pytree.tree_leaves(step.args) if isinstance(value, Tensor) and _is_index(value)]
    mixing: Mixing | None = "choice" if any(step.of(index) for index in indices) else None
    if keys is None:
        return [Places(part, best.grid) for part in cells], mixing
    return [Places(part, best.grid, key, best.key_grid) for part, key in zip(cells, keys, strict=True)], mixing


def _is_index(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _added_tokens(step: Step) -> dict[int, Tensor]:
    """Return the places of what a concatenation adds to features of the image, such as class tokens."""
    axis = step.args[1] if len(step.args) > 1 else 0
    fixed = [value for value in step.args[0] if step.of(value) is None]
    return {id(value): off_grid_tokens(value.shape, axis, step.tokens) for value in fixed}


def _join_alike(step: Step) -> Places | None:
    """Return the places of tensors that are joined along an axis on which all have the same cells, as channels have."""
    axis = step.args[1] if len(step.args) > 1 else 0
    parts = [step.of(value) for value in step.args[0] if value.shape[axis]]  # some code cuts off no token at all
    first = parts[0]
    if first is None or first.keys is not None:
        return None
    cells = first.cells.narrow(axis, 0, 1)
    for part in parts:
        if part is None or part.keys is not None or part.cells.stride(axis) != 0:
            return None
        if not torch.equal(part.cells.narrow(axis, 0, 1), cells):
            return None
    return Places(cells.expand(step.outputs[0].shape), first.grid)


def _as_is(step: Step, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return step.func(*args, **kwargs)


def _reshape(step: Step, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    result: Tensor = args[0].reshape(step.outputs[0].shape)
    return result


def _unchanged(step: Step, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    result: Tensor = args[0]
    return result


def _pad(step: Step, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return F.pad(args[0], args[1], value=PADDING)


def _im2col(step: Step, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    # Zeros are padding, so cells are shifted away from zero and back; float32 is exact far beyond any grid's size.
    unfolded: Tensor = step.func((args[0] - MIXED + 1).float(), *args[1:], **kwargs).long() + MIXED - 1
    return torch.where(unfolded < MIXED, PADDING, unfolded)


def _unshuffle_pixels(step: Step, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    result: Tensor = step.func(args[0].double(), *args[1:])  # not made for integers; a double holds any cell
    return result.long()


def _pair(step: Step, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    result: Tensor = args[0].select(-1, 0)  # real and imaginary part, which are of one cell
    return result


def _part(step: Step, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    result: Tensor = args[0].unsqueeze(-1).expand(step.outputs[0].shape)
    return result


_MOVES: dict[str, Callable[[Step, list[Any], dict[str, Any]], Any]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze", "unsqueeze"), _reshape),
    **dict.fromkeys(("clone", "contiguous", "alias", "detach", "_to_copy", "lift_fresh", "lift"), _unchanged),
    **dict.fromkeys(
        (
            *("permute", "transpose", "t", "expand", "slice", "select", "index", "cat", "stack", "split", "repeat"),
            *("split_with_sizes", "unbind", "roll", "narrow", "flip", "index_select", "gather", "unfold", "chunk"),
            *("diagonal", "movedim", "tile", "repeat_interleave", "rot90", "masked_select"),
        ),
        _as_is,
    ),
    "constant_pad_nd": _pad,
    "reflection_pad2d": _as_is,
    "replication_pad2d": _as_is,
    "im2col": _im2col,
    "view_as_complex": _pair,
    "view_as_real": _part,
    "pixel_unshuffle": _unshuffle_pixels,
}


def _reduce(step: Step) -> Outcome:
    """Rule of a sum, mean or maximum along axes: a cell stays if all entries that are joined share it."""
    places = step.of(step.args[0])
    if places is None:
        return lose(step)
    shape, output = places.cells.shape, step.outputs[0].shape
    axes = step.args[1] if len(step.args) > 1 and step.args[1] is not None else list(range(len(shape)))
    axes = [axes] if isinstance(axes, int) else list(axes)
    axes = [axis % len(shape) for axis in axes] or list(range(len(shape)))
    rest = [Places(full(part.shape, MIXED), places.grid) for part in step.outputs[1:]]
    pooled = _pool_cells(places, axes)
    if pooled is not None:
        return [Places(pooled.cells.reshape(output), pooled.grid), *rest], "pool"
    low, high = places.cells.amin(axes, keepdim=True), places.cells.amax(axes, keepdim=True)
    cells = torch.where(low == high, low, MIXED).reshape(output)
    several = len(torch.unique(torch.stack((low, high))[:, (low != high) & (high >= 0)], dim=1).mT) > step.images
    return [Places(cells, places.grid), *rest], _joining(step, places, axes, several)


def _joining(step: Step, places: Places, axes: list[int], several: bool) -> Mixing | None:
    """Return how a reduction mixes cells: weighted values that are summed over their keys are attention, of no map."""
    if places.keys is None:
        return "join" if several else None
    over_keys = bool((places.keys.amin(axes) != places.keys.amax(axes)).any())
    return "context" if over_keys and step.name in ("sum", "mean") else None


def _pool_cells(places: Places, axes: list[int]) -> Places | None:
    """Return the new grid if a reduction joins groups of cells, several of them in each image."""
    low, high = places.cells.amin(axes), places.cells.amax(axes)
    if bool((low == high).all()) or bool((low < 0).any()):
        return None
    rows = places.cells.movedim(axes, list(range(-len(axes), 0))).flatten(-len(axes))
    first, back = torch.unique(low, return_inverse=True)
    kept = torch.zeros(len(first), rows.shape[-1], dtype=rows.dtype)
    kept[back.flatten()] = rows.reshape(-1, rows.shape[-1])
    height, width = places.grid
    if len(first) <= len(torch.unique(first // (height * width))) or not bool((kept[back] == rows).all()):
        return None
    merged = merge(Places(kept, places.grid), -1)
    return None if merged is None else Places(merged.cells[back], merged.grid)


_RULES: dict[str, Callable[[Step], Outcome]] = {
    **dict.fromkeys(FIXED_MIXERS, lose),
    **dict.fromkeys(_MOVES, _move),
    **dict.fromkeys(
        ("mean", "sum", "amax", "amin", "var", "std", "linalg_vector_norm", "logsumexp", "max", "min"), _reduce
    ),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "matmul"), multiply),
    "linear": multiply_linear,
    "convolution": convolve,
    "grid_sampler_2d": sample,
    **dict.fromkeys(("avg_pool2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d", "adaptive_max_pool2d"), pool),
    **dict.fromkeys(
        ("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "pixel_shuffle"),
        resize,
    ),
    **dict.fromkeys(
        (
            *("native_layer_norm", "native_batch_norm", "native_group_norm", "_native_batch_norm_legit_no_training"),
            *("_log_softmax", "native_dropout", "_fused_rms_norm"),
        ),
        _keep_first,
    ),
    **dict.fromkeys(("_softmax", "_safe_softmax"), _soften),
}
