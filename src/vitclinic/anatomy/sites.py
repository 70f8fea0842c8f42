"""Sites at which a tensor can be read in a network, and the layout of its features on their grid.

A `Site` is one end of one module: its input or its output. Everything that looks into a network (taps, the residual
check, the removal of a unit) does so through `watch`.

Shapes: B batch, C channels, H and W the grid, N = prefix tokens + H * W.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitclinic._core.errors import AnatomyError

Size = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Layout:
    """Layout of the features in a part of the network: [B, N, C], [B, H, W, C] or [B, C, H, W].

    A tensor with three axes holds tokens; one with four axes is a feature map. The size of a flattened grid is not
    guessed from N: it is read at `grid_at` during a forward pass.

    Args:
        prefix: The number of tokens off the grid, which come first (class, distillation and register tokens).
        channels_last: True if a feature map is [B, H, W, C].
        grid_at: The site at which the grid's size can be read.
        spatial: False for logits, or for a class token alone.
        has_class: True if the first prefix token is the class token.
    """

    prefix: int = 0
    channels_last: bool = False
    grid_at: Site | None = None
    spatial: bool = True
    has_class: bool = True
    """Ignored without a prefix."""


NCHW = Layout()
NHWC = Layout(channels_last=True)
OFF_GRID = Layout(spatial=False)


@dataclass(frozen=True, eq=False)
class Site:
    """One end of a module: its input or its output.

    Args:
        module: The module.
        end: `in` or `out`.
        layout: The layout of the features.
        item: The index of the value among several inputs or outputs.
        first: Keep only this many tokens.
        within: The block, if it calls the module several times (a shared dropout or ReLU).
        call: Which of these calls is meant, from 0.
        overwritten: True if the network later writes to this tensor in place, so that a reader must copy it.
    """

    module: nn.Module
    end: Literal["in", "out"]
    layout: Layout = NCHW
    item: int = 0
    first: int | None = None
    within: nn.Module | None = None
    call: int = 0
    overwritten: bool = False

    def pick(self, values: Any) -> Any:
        """Return this site's value among a module's inputs or outputs."""
        value = values if isinstance(values, Tensor) else values[self.item]
        return value if self.first is None else value[:, : self.first]

    def size_of(self, value: Any) -> Size:
        """Return (H, W) of a value seen here: a tensor with four axes, or the size itself."""
        if isinstance(value, Tensor):
            height, width = value.shape[1:3] if self.layout.channels_last else value.shape[2:4]
        else:
            height, width = value
        return int(height), int(width)


def into(module: nn.Module, layout: Layout = NCHW, **fields: Any) -> Site:
    """Return the site at the input of `module`.

    Args:
        module: The module.
        layout: The layout of its input.
        fields: Further fields of the `Site`.
    """
    return Site(module, "in", layout, **fields)


def out_of(module: nn.Module, layout: Layout = NCHW, **fields: Any) -> Site:
    """Return the site at the output of `module`.

    Args:
        module: The module.
        layout: The layout of its output.
        fields: Further fields of the `Site`.
    """
    return Site(module, "out", layout, **fields)


def watch(site: Site, act: Callable[[Any], Tensor | None]) -> list[RemovableHandle]:
    """Call `act` with each value that passes `site`; if it returns a tensor, that replaces the value.

    Returns the handles of the hooks; removing them stops it.
    """
    calls = 0

    def due() -> bool:
        nonlocal calls
        calls += 1
        return site.within is None or calls == site.call + 1

    def restart(*_: Any) -> None:
        nonlocal calls
        calls = 0

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if due():
            act(site.pick((*args, *kwargs.values())))

    def after(_: nn.Module, __: Any, output: Any) -> Tensor | None:
        return act(site.pick(output)) if due() else None

    handles = [] if site.within is None else [site.within.register_forward_pre_hook(restart)]
    if site.end == "in":
        # First of all hooks: what the module is called with, not what another hook (a treatment's) makes of it.
        handles.append(site.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
    else:
        handles.append(site.module.register_forward_hook(after))
    return handles


def onto_grid(layout: Layout, activation: Tensor, size: Size | None) -> Tensor:
    """Return `activation` as [B, C, H, W] without prefix tokens; `size` is (H, W), for flattened grids."""
    if not layout.spatial:
        raise AnatomyError("these features have no grid: they are a class token, or the output of the network.")
    if activation.ndim == 4:
        return activation.permute(0, 3, 1, 2) if layout.channels_last else activation
    tokens_bnc = activation[:, layout.prefix :]
    if size is None or tokens_bnc.shape[1] != size[0] * size[1]:
        raise AnatomyError(
            f"{tokens_bnc.shape[1]} spatial tokens do not fit the grid {size} found when the network was examined; "
            "for images of another size, call Anatomy.of(network, example=images)."
        )
    batch, _, channels = tokens_bnc.shape
    return tokens_bnc.reshape(batch, *size, channels).permute(0, 3, 1, 2)
