"""Attention restricted to a k x k neighbourhood: the convolutional MSA of [park2022]."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field
from timm.layers import PatchDropout
from torch import nn

from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import AttentionSpec
from vitclinic.data import ImageSpec
from vitclinic.treatments.attention_edit import AttentionOptions, edit_attention
from vitclinic.treatments.neighbourhood import Neighbourhood, SeenNeighbourhood, neighbourhood_of
from vitclinic.treatments.parts import Attention, examine, find_attentions, missing
from vitclinic.treatments.treatment import Treatment, register


def _check_kernel(kernel: Any) -> Any:
    """Check the kernel before pydantic does, which would print one error per type of the union."""
    if kernel != "global" and not (type(kernel) is int and kernel >= 1 and kernel % 2 == 1):
        raise ValueError("must be an odd number or 'global'")
    return kernel


@register
class LocalAttention(Treatment):
    """Local attention: token i sees token j only if rows and columns are at most (kernel - 1) / 2 apart [park2022].

    Attributes:
        kernel: Side of the neighbourhood, an odd number; `global` leaves attention as it is.
    """

    name: ClassVar[str] = "local_attention"
    paper: ClassVar[str] = "park2022 Sec. 2, Fig. 7"
    changes: ClassVar[str] = "attention sees a k x k neighbourhood instead of all tokens"
    costs: ClassVar[str] = "no parameters; about as much time as global attention on small grids, less on large ones"
    part: ClassVar[str] = "attention by one softmax over tokens on a grid"

    kernel: Annotated[int | Literal["global"], BeforeValidator(_check_kernel)] = Field(
        3, description="side of the neighbourhood, odd; `global` (the paper's 8 x 8 on a grid of 8 x 8): everything"
    )

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        if any(isinstance(module, PatchDropout) for module in network.modules()):
            raise TreatmentError(
                "local_attention needs the whole grid: leave patch_dropout out, and build the network with"
                " patch_drop_rate=0."
            )
        anatomy = examine(self, network, spec)
        attentions = find_attentions(self, anatomy, spec, mixed=True)
        specs = {found.module: _spec_of(found) for found in attentions}
        grids = {found.module: _why_not_local(found, specs[found.module]) for found in attentions}
        if all(grids.values()):
            raise missing(self, network, next(why for why in grids.values() if why is not None))
        if self.kernel == "global":
            return network
        shared: dict[Any, Neighbourhood | SeenNeighbourhood] = {}
        for found in attentions:
            if grids[found.module] is not None:
                continue
            tokens = specs[found.module]
            attention = edit_attention(found.module, found.heads, tokens)
            alone = tokens.windows is not None or tokens.seen is not None  # windows are those of one block
            place = found.module if alone else tokens.keys
            if place not in shared:
                shared[place] = neighbourhood_of(anatomy, tokens, self.kernel)
            attention.neighbourhood = shared[place]
        return network


def _spec_of(found: Attention) -> AttentionSpec:
    """Return where the keys of an attention lie, also if it has no map any more (no_softmax)."""
    tokens = found.unit.attention
    if tokens is None:
        tokens = cast(AttentionOptions, found.module).map_spec
        assert tokens is not None  # it had a map when it was edited
        if tokens.seen is None:  # a family's layout belongs to one anatomy
            tokens = replace(tokens, keys=found.unit.input.layout)
    return tokens


def _why_not_local(found: Attention, tokens: AttentionSpec) -> str | None:
    """Return why an attention has no neighbours, and stays as it is if others have; None if it has."""
    if tokens.seen is None:
        return None
    if not tokens.seen.queries.shape[1]:
        return "only its class token attends to the grid"
    if tokens.seen.grids[0] != tokens.seen.grids[1]:
        queries, keys = ("{} x {}".format(*grid) for grid in tokens.seen.grids)
        return f"in {found.unit.name} the queries lie on {queries}, the keys on {keys}"
    return None
