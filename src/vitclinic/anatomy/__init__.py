"""Anatomy: a network as a list of units, with sites to read each, ways to remove it, and its attention maps.

Example:
    >>> import timm, torch
    >>> from vitclinic.anatomy import Anatomy, taps
    >>> network = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32)
    >>> anatomy = Anatomy.of(network)
    >>> with taps({unit.name: unit.output for unit in anatomy.units}) as seen:
    ...     logits = network(torch.rand(1, 3, 32, 32))
    >>> seen["blocks.0.mlp"].shape
    torch.Size([1, 5, 192])
"""

from typing import TYPE_CHECKING

from vitclinic._core import make_lazy

if TYPE_CHECKING:
    from vitclinic.anatomy.anatomy import Anatomy
    from vitclinic.anatomy.attention import record_attention
    from vitclinic.anatomy.families import Family, list_families, register_family
    from vitclinic.anatomy.forward import double_differentiable, eval_mode
    from vitclinic.anatomy.maps import AttentionMap, Windows
    from vitclinic.anatomy.removal import Bypass, Erase, Silence
    from vitclinic.anatomy.sites import NCHW, NHWC, OFF_GRID, Activations, Layout, Site, into, out_of, stream, taps
    from vitclinic.anatomy.units import AttentionSpec, Block, Kind, Residual, Unit

__all__ = [
    "NCHW",
    "NHWC",
    "OFF_GRID",
    "Activations",
    "Anatomy",
    "AttentionMap",
    "AttentionSpec",
    "Block",
    "Bypass",
    "Erase",
    "Family",
    "Kind",
    "Layout",
    "Residual",
    "Silence",
    "Site",
    "Unit",
    "Windows",
    "double_differentiable",
    "eval_mode",
    "into",
    "list_families",
    "out_of",
    "record_attention",
    "register_family",
    "stream",
    "taps",
]

make_lazy(__name__)
