"""States of a network: the output of each unit after its residual addition, on its grid."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from vitclinic.anatomy import Anatomy, Site, Unit
from vitclinic.probes.probe import DoesNotApply


class State(NamedTuple):
    """State after a unit, read at `site`."""

    anatomy: Anatomy
    unit: Unit

    @property
    def site(self) -> Site:
        return self.unit.output

    def maps(self, activation: Tensor) -> Tensor:
        """Return the activation read at `site` as feature maps [B, C, H, W], without prefix tokens."""
        return self.anatomy.grid(self.site, activation)

    def tokens(self, activation: Tensor) -> Tensor:
        """Return the activation as tokens [B, H * W, C], row by row."""
        return self.maps(activation).flatten(2).transpose(1, 2)


def spatial_states(anatomy: Anatomy) -> tuple[State, ...]:
    """Return the states on a grid, in the order of the forward pass; logits or a lone class token are not on a grid."""
    states = tuple(State(anatomy, unit) for unit in anatomy.units if unit.output.layout.spatial)
    if not states:
        raise DoesNotApply(f"no unit of this {anatomy.family} has feature maps as its output.")
    return states
