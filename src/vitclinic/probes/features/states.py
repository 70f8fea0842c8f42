"""The states of a network: what each unit hands on, after its residual addition, on its grid."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from vitclinic.anatomy import Anatomy, Site, Unit
from vitclinic.probes.probe import DoesNotApply


class State(NamedTuple):
    """What `unit` hands on, read at `site`."""

    anatomy: Anatomy
    unit: Unit

    @property
    def site(self) -> Site:
        return self.unit.output

    def maps(self, activation: Tensor) -> Tensor:
        """What was read at `site` as feature maps [B, C, H, W]: prefix tokens are off the grid and left out."""
        return self.anatomy.grid(self.site, activation)

    def tokens(self, activation: Tensor) -> Tensor:
        """The same as tokens [B, H * W, C], the positions of a feature map row by row."""
        return self.maps(activation).flatten(2).transpose(1, 2)


def spatial_states(anatomy: Anatomy) -> tuple[State, ...]:
    """The states that lie on a grid, in the order of the forward pass: not logits, not a class token alone."""
    states = tuple(State(anatomy, unit) for unit in anatomy.units if unit.output.layout.spatial)
    if not states:
        raise DoesNotApply(f"no unit of this {anatomy.family} has its output on a grid.")
    return states
