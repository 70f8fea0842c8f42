"""Families of networks: their registry, the recognition of a network, and the parts that families are built from.

`Family` and `recognise` come first; the functions below create the units of blocks, stems, pools and heads that
families of several libraries need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from vitclinic._core.errors import AnatomyError, UnknownStructureError
from vitclinic._core.registry import load_entry_points
from vitclinic.anatomy.maps import Windows
from vitclinic.anatomy.removal import Erase, Silence
from vitclinic.anatomy.sites import OFF_GRID, Layout, Site, Size, into, out_of
from vitclinic.anatomy.units import AttentionSpec, Kind, Removal, Residual, Unit

ENTRY_POINTS = "vitclinic.families"
WRAPPERS = ("_orig_mod", "module", "backbone")
"""Attributes in which torch.compile, DDP and a network with its own normalization keep the wrapped network."""


@dataclass(frozen=True)
class Family:
    """A group of network classes whose units are found in the same way.

    Args:
        name: The family's name, such as `timm ViT`.
        classes: Dotted names of the classes. A network is recognised by its class or a base class, without importing
            the library it comes from.
        units: Function from a network to its units, in the order of the forward pass.
        input_size: Function from a network to the (channels, height, width) of a small input that it accepts; None to
            try the usual sizes.
        built_in: True for vitclinic's own: a network that was changed is then observed instead of refused.

    Example:
        >>> family = Family("linear", ("torch.nn.modules.linear.Linear",), lambda net: (), lambda net: (3, 32, 32))
        >>> family.includes(nn.Linear(2, 2))
        True
    """

    name: str
    classes: tuple[str, ...]
    units: Callable[[Any], Iterable[Unit]]
    input_size: Callable[[Any], tuple[int, int, int]] | None = None
    built_in: bool = False

    def includes(self, network: nn.Module) -> bool:
        """Return True if `network` is an instance of one of the family's classes."""
        return any(f"{base.__module__}.{base.__qualname__}" in self.classes for base in type(network).__mro__)


_families: list[Family] = []


def register_family(family: Family) -> Family:
    """Register a family in this process; it takes precedence over the ones registered before.

    Args:
        family: The family.

    Returns:
        The same family.

    Raises:
        TypeError: The argument is not a `Family`.
    """
    if not isinstance(family, Family):
        raise TypeError(f"{family!r} is not a Family")
    _families.insert(0, family)
    return family


def list_families() -> tuple[Family, ...]:
    """Return all families, including those of installed packages, the last registered first."""
    load_entry_points(ENTRY_POINTS, register_family)
    return tuple(_families)


def recognise(network: nn.Module) -> tuple[nn.Module, Family]:
    """Return the network inside all wrappers, and its family.

    A module of no known family is looked into through the attributes `WRAPPERS`, in that order, if nothing beside
    that attribute has parameters: a backbone with a head behind it is a network of its own.
    """
    core: nn.Module | None = network
    while core is not None:
        for family in list_families():
            if family.includes(core):
                return core, family
        core = _unwrap(core)
    raise UnknownStructureError(_unknown(network))


def _unwrap(module: nn.Module) -> nn.Module | None:
    """Return the child that `module` only wraps, or None."""
    children = dict(module.named_children())
    parameters = set(module.parameters())
    inside = (children[name] for name in WRAPPERS if name in children)
    return next((child for child in inside if parameters == set(child.parameters())), None)


def _unknown(network: nn.Module) -> str:
    """Return an error message that describes a network of no known family."""
    children = ", ".join(f"{name} ({type(child).__name__})" for name, child in network.named_children())
    lists = [
        f"{name} ({len(module)} x {type(next(iter(module))).__name__})"
        for name, module in network.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) > 1
        and len({type(child) for child in module}) == 1
    ]
    return (
        f"no family is known for {type(network).__module__}.{type(network).__qualname__} "
        f"(children: {children or 'none'}; possible blocks: {', '.join(lists[:8]) or 'none'}); "
        "register one as shown in docs/anatomy.md "
        f"(known: {', '.join(sorted(family.name for family in list_families()))})."
    )


def unknown_block(name: str, block: nn.Module) -> UnknownStructureError:
    """Return the error for a block whose units a family does not know."""
    return UnknownStructureError(
        f"{name} is a {type(block).__name__}, whose units are not known; "
        "register a family that defines them (docs/anatomy.md)."
    )


class Step(NamedTuple):
    """One residual step of a block; `branch` is read after the last norm, scale and drop."""

    kind: Kind
    module: nn.Module
    norm: nn.Module | None
    branch: Site
    attention: AttentionSpec | None = None
    activation: Site | None = None


def residual_block(name: str, stage: int, states: list[Site], steps: list[Step]) -> Iterator[Unit]:
    """Yield the units of a block whose residual steps lead from each of `states` to the next, named `name`.kind."""
    for step, (before, after) in zip(steps, pairwise(states), strict=True):
        yield Unit(
            name=f"{name}.{step.kind}",
            kind=step.kind,
            stage=stage,
            module=step.module,
            norm=step.norm,
            block=name,
            input=before,
            output=after,
            residual=Residual(before, step.branch, after),
            removal=Silence(step.branch),
            attention=step.attention,
            activation=step.activation,
        )


def transformer_block(
    name: str,
    stage: int,
    block: Any,
    layout: Layout,
    *,
    attention: AttentionSpec | None = None,
    post_norm: bool = False,
) -> Iterator[Unit]:
    """Return the units of a block with timm's names: norm1, attn, drop_path1, norm2, mlp, drop_path2.

    Pre-norm: x + attn(norm1(x)), so the state between the steps enters norm2. Post-norm: x + norm1(attn(x)),
    so it enters the MLP, and the input of norm2 is another quantity.
    """
    between = block.mlp if post_norm else block.norm2
    return residual_block(
        name,
        stage,
        [into(block, layout), into(between, layout), out_of(block, layout)],
        [
            Step("msa", block.attn, block.norm1, out_of(block.drop_path1, layout), attention),
            Step("mlp", block.mlp, block.norm2, out_of(block.drop_path2, layout), activation=hidden(block.mlp)),
        ],
    )


_EXTRA: dict[str, Kind] = {"MsaBlock": "msa", "MlpBlock": "mlp"}
"""The blocks that the treatment `extra_block` adds, each an attention or an MLP alone."""


def is_extra(block: nn.Module) -> bool:
    """Return True for a block that the treatment `extra_block` has added."""
    return type(block).__name__ in _EXTRA


def extra_step(name: str, stage: int, block: Any, layout: Layout) -> Iterator[Unit]:
    """Return the unit of a block that the treatment `extra_block` has added."""
    kind, branch = _EXTRA[type(block).__name__], out_of(block.drop_path, layout)
    if kind == "msa":
        step = Step(kind, block.attn, block.norm, branch, softmax_attention(block.attn, layout))
    else:
        step = Step(kind, block.mlp, block.norm, branch, activation=hidden(block.mlp))
    return residual_block(name, stage, [into(block, layout), out_of(block, layout)], [step])


def hidden(mlp: nn.Module) -> Site | None:
    """Return the site after the activation function of an MLP with timm's names; for a gated MLP, after its gate."""
    act = getattr(mlp, "act", None)
    return out_of(act, OFF_GRID) if isinstance(act, nn.Module) else None


def activation_among(layers: nn.Module) -> Site | None:
    """Return the site after the last activation function among the children, recognised by its module in PyTorch."""
    found = [module for module in layers.children() if type(module).__module__ == nn.GELU.__module__]
    return out_of(found[-1], OFF_GRID) if found else None


def softmax_attention(
    module: nn.Module, keys: Layout, windows: Callable[[Size], Windows] | None = None
) -> AttentionSpec | None:
    """Return the attention of a module, or None if a treatment has removed its softmax."""
    return None if getattr(module, "softmax_free", False) else AttentionSpec(module, keys, windows)


def image_channels(network: nn.Module) -> int:
    """Return the number of input channels of a network: those of its first convolution."""
    return next(module.in_channels for module in network.modules() if isinstance(module, nn.Conv2d))


def stem(module: nn.Module, network: nn.Module, output: Site) -> Unit:
    """Return the unit that turns the image into features."""
    return Unit("stem", "stem", 0, module, into(network), output)


def position(parameter: nn.Parameter, module: nn.Module, before: Site, after: Site, stage: int = 0) -> Unit:
    """Return the unit that adds a position embedding between two sites; removing it sets the embedding to zero."""
    return Unit("position", "position", stage, module, before, after, removal=Erase(parameter))


def pool(name: str, stage: int, module: nn.Module, before: Site, after: Site) -> Unit:
    """Return the unit that subsamples before `stage`."""
    return Unit(f"{name}.pool", "pool", stage, module, before, after)


def head(module: nn.Module, network: nn.Module, last: Unit, norm: nn.Module | None = None) -> Unit:
    """Return the unit from the last state to the network's output; `norm` acts on that state, before any pooling.

    Libraries use an identity if there is no such norm.
    """
    acting = None if isinstance(norm, nn.Identity) else norm
    return Unit("head", "head", last.stage, module, last.output, out_of(network, OFF_GRID), acting)


def count_prefix(network: nn.Module, own: int) -> int:
    """Return the number of prefix tokens inside the blocks: the network's own, and those of the treatment `registers`.

    Raises:
        AnatomyError: The network's own tokens were changed after the treatment, which counts them.
    """
    added = getattr(network, "registers", None)
    if added is None or not hasattr(added, "reg_token"):
        return own
    if added.prefix != own:
        raise AnatomyError(f"its registers come after {added.prefix} tokens, but it has {own} before its patches")
    return own + len(added.reg_token)


def is_smoothing(module: nn.Module) -> bool:
    """Return True for the blur that `spatial_smoothing` adds at the end of a stage, which is not a block."""
    return type(module).__name__ == "Blur"


def read_after_blur(unit: Unit, blur: nn.Module) -> Unit:
    """Return a stage's last unit with its output read after the blur, as the next unit sees it."""
    return replace(unit, output=out_of(blur))


def conv_unit(
    name: str,
    stage: int,
    block: nn.Module,
    residual: Residual,
    removal: Removal | None = None,
    *,
    activation: Site | None,
) -> Unit:
    """Return the unit of a convolutional block on [B, C, H, W]; by default, removing it sets its branch to zero."""
    return Unit(
        name=f"{name}.conv",
        kind="conv",
        stage=stage,
        module=block,
        block=name,
        input=into(block),
        output=out_of(block),
        residual=residual,
        removal=removal or Silence(residual.branch),
        activation=activation,
    )
