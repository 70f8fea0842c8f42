"""Attention restricted to a k x k neighbourhood: the convolutional MSA of [park2022]."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from timm.layers import PatchDropout
from torch import nn

from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy, Layout
from vitclinic.data import ImageSpec
from vitclinic.treatments.treatment import Treatment, register
from vitclinic.treatments.variant_attention import Neighbourhood, attention_units, variant_of


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
    families: ClassVar[tuple[str, ...] | None] = ("timm ViT", "timm PiT")

    kernel: Annotated[int | Literal["global"], BeforeValidator(_check_kernel)] = Field(
        3, description="side of the neighbourhood, odd; `global` (the paper's 8 x 8 on a grid of 8 x 8): everything"
    )

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        if any(isinstance(module, PatchDropout) for module in network.modules()):
            raise TreatmentError("local_attention needs the whole grid; build the network with patch_drop_rate=0.")
        anatomy = Anatomy.of(network)
        units = attention_units(anatomy, self.name)
        if self.kernel == "global":
            return network
        near: dict[Layout, Neighbourhood] = {}
        for unit in units:
            layout = unit.input.layout
            assert layout.grid_at is not None  # tokens of a flattened grid
            if layout not in near:
                near[layout] = Neighbourhood(self.kernel, layout.prefix, anatomy.size(layout), layout.grid_at)
            variant_of(anatomy, unit).neighbourhood = near[layout]
        return network
