"""A family registered by hand beside what a recorded pass shows: kinds, order, prefix tokens, maps and removals.

Units are matched by what their branches add, since names, modules and sites may differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from vitclinic._core.errors import NoAttentionMapError
from vitclinic.anatomy.attention import record_attention
from vitclinic.anatomy.forward import eval_mode
from vitclinic.anatomy.maps import AttentionMap
from vitclinic.anatomy.sites import taps
from vitclinic.anatomy.units import Unit
from vitclinic.anatomy.wrappers import call_with_images

_NEAR = 1e-3
"""Differences below this share of the largest value are rounding."""

Pair = tuple[Unit, Unit]


@torch.no_grad()
def find_disagreement(given: Sequence[Unit], observed: Sequence[Unit], network: nn.Module, image: Tensor) -> str | None:
    """Return where the units of a family contradict those that were observed, in words; None if nowhere.

    Args:
        given: The family's units.
        observed: The observed ones.
        network: The module to call.
        image: One image.
    """
    with eval_mode(network):
        pairs = _match(given, observed, network, image)
        checks = (_of_order, _of_kinds, _of_prefixes)
        told = next((found for check in checks if (found := check(pairs))), None)
        return (
            told
            or _of_missing(pairs, observed)
            or _of_maps(pairs, network, image)
            or _of_removals(pairs, network, image)
        )


def _match(given: Sequence[Unit], observed: Sequence[Unit], network: nn.Module, image: Tensor) -> list[Pair]:
    """Return the family's units with the observed ones that add the same, in the family's order."""
    sites = {unit: unit.branch for unit in (*given, *observed) if unit.branch is not None}
    with taps(sites) as seen:
        call_with_images(network, image)
        added = {unit: _sorted(seen[unit]) for unit in sites}
    left, pairs = [unit for unit in observed if unit in added], []
    for unit in given:
        same = (other for other in left if unit in added and _is_near(added[unit], added[other]))
        if (other := next(same, None)) is not None:
            left.remove(other)
            pairs.append((unit, other))
    return pairs


def _of_missing(pairs: Sequence[Pair], observed: Sequence[Unit]) -> str | None:
    known = {other for _, other in pairs}
    left_out = [unit for unit in observed if unit.residual is not None and unit not in known]
    return f"it leaves out {left_out[0].name}" if pairs and left_out else None


def _of_order(pairs: Sequence[Pair]) -> str | None:
    for (unit, first), (other, second) in pairwise(pairs):
        if first.depth > second.depth:
            return f"{unit.name} comes before {other.name} in it, and runs after"
    return None


def _of_kinds(pairs: Sequence[Pair]) -> str | None:
    for unit, other in pairs:
        if unit.kind != other.kind:
            return f"{unit.name} is of kind {unit.kind} in it, and works as {other.kind}"
    return None


def _of_prefixes(pairs: Sequence[Pair]) -> str | None:
    for unit, other in pairs:
        counts = [one.output.layout.prefix for one in (unit, other)]
        if unit.output.layout.spatial and other.output.layout.spatial and counts[0] != counts[1]:
            return f"it gives {unit.name} {counts[0]} tokens before its patches, and there are {counts[1]}"
    return None


def _of_maps(pairs: Sequence[Pair], network: nn.Module, image: Tensor) -> str | None:
    mapped = [pair for pair in pairs if all(unit.attention is not None for unit in pair)]
    given, seen = (_read_maps([pair[side] for pair in mapped], network, image) for side in (0, 1))
    for unit, other in mapped:
        if unit in given and other in seen and not _is_near(given[unit], seen[other]):
            return f"the attention that it gives {unit.name} is another's"
    return None


def _read_maps(units: Sequence[Unit], network: nn.Module, image: Tensor) -> dict[Unit, Tensor]:
    """Return the maps of units, as sorted numbers; none if one of them has no map."""
    maps: dict[Unit, Tensor] = {}

    def keep(seen: AttentionMap) -> None:
        maps[seen.unit] = _sorted(seen.weights)

    with suppress(NoAttentionMapError), record_attention(units, keep):
        call_with_images(network, image)
    return maps


def _of_removals(pairs: Sequence[Pair], network: nn.Module, image: Tensor) -> str | None:
    for unit, other in pairs:
        if unit.removal is not None and other.removal is not None:
            alone = list(_outputs_without((unit, other), network, image))
            if not _is_near(*alone):
                return f"the removal that it gives {unit.name} removes something else"
    return None


def _outputs_without(units: Sequence[Unit], network: nn.Module, image: Tensor) -> Iterator[Tensor]:
    for unit in units:
        assert unit.removal is not None
        with unit.removal.apply():
            returned = call_with_images(network, image)
        leaves = tree_leaves(vars(returned) if is_dataclass(returned) else returned)
        yield torch.cat([leaf.flatten().float() for leaf in leaves if isinstance(leaf, Tensor)])


def _sorted(values: Tensor) -> Tensor:
    """Return numbers in an order that does not depend on how the axes lie."""
    return values.detach().flatten().float().sort().values


def _is_near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= _NEAR * other.abs().max().clamp_min(1e-12))
