"""A family that is registered by hand and describes another network than the one that runs is refused, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.treatments import handwritten
from tests.treatments.handwritten import SIZE, OwnViT
from vitclinic._core.errors import AnatomyError
from vitclinic.anatomy import Anatomy, Family, Unit, register_family
from vitclinic.anatomy.families import family as registry

Units = list[Unit]


@pytest.fixture(autouse=True)
def _forget_families() -> Iterator[None]:
    before = list(registry._families)
    yield
    registry._families[:] = before


def right(network: Any) -> Units:
    return handwritten._units(network)


def swapped_kinds(network: Any) -> Units:
    other: Any = {"msa": "mlp", "mlp": "msa"}
    return [replace(unit, kind=other.get(unit.kind, unit.kind)) for unit in right(network)]


def missing_block(network: Any) -> Units:
    return [unit for unit in right(network) if unit.block != "blocks.1"]


def other_attention(network: Any) -> Units:
    units = {unit.name: unit for unit in right(network)}
    wrong = replace(units["blocks.0.msa"], attention=units["blocks.1.msa"].attention)
    return list((units | {"blocks.0.msa": wrong}).values())


def other_removal(network: Any) -> Units:
    units = {unit.name: unit for unit in right(network)}
    wrong = replace(units["blocks.0.msa"], removal=units["blocks.1.msa"].removal)
    return list((units | {"blocks.0.msa": wrong}).values())


def other_order(network: Any) -> Units:
    units = right(network)
    return [*units[:2], *units[4:6], *units[2:4], *units[6:]]


def no_prefix(network: Any) -> Units:
    def without(site: Any) -> Any:
        return replace(site, layout=replace(site.layout, prefix=0))

    return [replace(unit, input=without(unit.input), output=without(unit.output)) for unit in right(network)]


def examine(units: Callable[[Any], Units]) -> Anatomy:
    torch.manual_seed(0)
    name = f"{OwnViT.__module__}.{OwnViT.__qualname__}"
    register_family(Family("own", (name,), units, lambda _: (3, SIZE, SIZE)))
    return Anatomy.of(OwnViT().eval())


def test_a_right_family_stays() -> None:
    assert examine(right).family == "own"


@pytest.mark.parametrize(
    ("units", "why"),
    [
        (swapped_kinds, "blocks.0.msa is of kind mlp in it, and works as msa"),
        (missing_block, "it leaves out blocks.1.msa"),
        (other_attention, "the attention that it gives blocks.0.msa is another's"),
        (other_removal, "the removal that it gives blocks.0.msa removes something else"),
        (other_order, "blocks.1.mlp comes before blocks.0.msa in it, and runs after"),
        (no_prefix, "it gives blocks.0.msa 0 tokens before its patches, and there are 1"),
    ],
)
def test_a_wrong_family_is_refused(units: Callable[[Any], Units], why: str) -> None:
    with pytest.raises(AnatomyError, match=why):
        examine(units)
