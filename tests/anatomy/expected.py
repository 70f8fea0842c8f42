"""What the networks of the tests must consist of, from the numbers they were built with and not from their modules."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from timm.models import model_entrypoint
from torch import nn

from tests.anatomy.networks import CUTS

Row = tuple[str, int]
"""Kind and stage of a unit."""

TRANSFORMER = ("msa", "mlp")
MIXER = ("token_mlp", "mlp")


def staged(
    depths: Iterable[int], block: tuple[str, ...], *, pools: bool, first: Iterable[str] = ("stem",)
) -> list[Row]:
    """`first`, then so many blocks a stage, each later stage behind a pool if there are `pools`, then the head."""
    rows = [(kind, 0) for kind in first]
    depths = list(depths)
    for stage, depth in enumerate(depths):
        rows += [("pool", stage)] * (pools and stage > 0)
        rows += [(kind, stage) for kind in block * depth]
    return [*rows, ("head", len(depths) - 1)]


def vit(depth: int, position: bool = True) -> list[Row]:
    return staged([depth], TRANSFORMER, pools=False, first=("stem", "position") if position else ("stem",))


def volo(layers: tuple[int, ...], class_blocks: int = 2) -> list[Row]:
    """The pool behind the outlookers, then the position embedding; class blocks are a stage of their own."""
    blocks = [[(kind, stage) for kind in TRANSFORMER * depth] for stage, depth in enumerate(layers)]
    last = len(layers)
    rows = [("stem", 0), *blocks[0], ("pool", 1), ("position", 1), *chain(*blocks[1:])]
    return [*rows, *((kind, last) for kind in TRANSFORMER * class_blocks), ("head", last)]


def of_timm(name: str, network: Any) -> list[Row]:
    module = model_entrypoint(name).__module__.rpartition(".")[2]
    size = CUTS[module]
    match module:
        case "vision_transformer" | "deit":
            return vit(size["depth"], position=network.pos_embed is not None)
        case "pit":
            return staged(size["depth"], TRANSFORMER, pools=True, first=("stem", "position"))
        case "swin_transformer" | "swin_transformer_v2":
            return staged(size["depths"], TRANSFORMER, pools=True)
        case "mlp_mixer":
            return staged([size["num_blocks"]], MIXER[:1] if name.startswith("gmlp") else MIXER, pools=False)
        case "resnet":
            return staged(size["layers"], ("conv",), pools=False)
        case "convnext":
            return staged(size["depths"], ("conv",), pools=True)
        case "volo":
            return volo(size["layers"])
    raise KeyError(module)


def alternet(stages: Iterable[tuple[str, ...]]) -> list[Row]:
    """The kinds of the blocks of each stage, written out."""
    rows = [(kind, stage) for stage, kinds in enumerate(stages) for kind in kinds]
    return [("stem", 0), *rows, ("head", rows[-1][1])]


_PAIR = ("conv", "msa")

OTHERS: dict[str, list[Row]] = {
    "vitclinic preact_resnet": staged([2, 1, 1, 1], ("conv",), pools=False),
    "vitclinic preact_resnet, basic, cifar": staged([2, 1, 1, 1], ("conv",), pools=False),
    "vitclinic alternet, padded": alternet([("conv",), _PAIR, _PAIR, _PAIR * 2]),
    "vitclinic alternet, cifar": alternet([("conv",), _PAIR, _PAIR, _PAIR * 2]),
    "vitclinic timm resnet with MSAs": alternet([("conv",), ("conv",), _PAIR, _PAIR]),
    "torchvision vit": vit(2),
    "torchvision swin, padded": staged([2, 2], TRANSFORMER, pools=True),
    "torchvision swin_v2": staged([2, 2], TRANSFORMER, pools=True),
    "torchvision resnet": staged([2, 1, 1, 1], ("conv",), pools=False),
    "torchvision resnext": staged([2, 1, 1, 1], ("conv",), pools=False),
    "torchvision convnext": staged([2, 1], ("conv",), pools=True),
    "huggingface vit": vit(2),
    "huggingface vit, eager attention": vit(2),
    "huggingface deit": vit(2),
    "huggingface swin": staged([2, 1], TRANSFORMER, pools=True),
    "huggingface swin_absolute": staged([2, 1], TRANSFORMER, pools=True, first=("stem", "position")),
    "vit, no position": vit(2, position=False),
    "swin, not square, padded": staged([2, 2], TRANSFORMER, pools=True),
}


def expected_units(name: str, network: nn.Module) -> list[Row]:
    """Kinds and stages, in order, of the network `name` of `NETWORKS`; its other ViTs have two blocks."""
    if name.startswith("timm "):
        return of_timm(name.removeprefix("timm "), network)
    return OTHERS.get(name) or vit(2)
