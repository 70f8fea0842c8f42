"""Where a tensor can be read in a network, and how its features lie on their grid.

A `Site` is one end of one module: what goes into it or what comes out of it. Everything that looks into a
network (taps, the residual check, the removal of a unit) does so through `watch`.

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
    """How a part of the network keeps its features: [B, N, C], [B, H, W, C] or [B, C, H, W].

    A tensor with three axes holds tokens, the first `prefix` of them (class, distillation and register
    tokens) off the grid, of which the very first is the class token if it `has_class`; one with four axes is
    [B, H, W, C] if `channels_last`. The size of a flattened grid is not guessed from N: it is read at `grid_at`
    during a forward pass. Logits, or a class token alone, are not `spatial`.
    """

    prefix: int = 0
    channels_last: bool = False
    grid_at: Site | None = None
    spatial: bool = True
    has_class: bool = True
    """Of no account without a prefix."""


NCHW = Layout()
NHWC = Layout(channels_last=True)
OFF_GRID = Layout(spatial=False)


@dataclass(frozen=True, eq=False)
class Site:
    """One end of `module`: its input or its output.

    `item` picks one of several inputs or outputs; `first` keeps only the first tokens. A module that its
    block calls several times (a shared dropout or ReLU) needs `within`, the block, and `call`, which of the
    calls is meant. `overwritten` says that the network itself writes into this tensor later on, so that a
    reader must copy it.
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
        """This site's value among a module's inputs or outputs."""
        value = values if isinstance(values, Tensor) else values[self.item]
        return value if self.first is None else value[:, : self.first]

    def size_of(self, value: Any) -> Size:
        """(H, W) of a value seen here: a tensor with four axes, or the size itself."""
        if isinstance(value, Tensor):
            height, width = value.shape[1:3] if self.layout.channels_last else value.shape[2:4]
        else:
            height, width = value
        return int(height), int(width)


def into(module: nn.Module, layout: Layout = NCHW, **fields: Any) -> Site:
    """The site at which `module` receives its input."""
    return Site(module, "in", layout, **fields)


def out_of(module: nn.Module, layout: Layout = NCHW, **fields: Any) -> Site:
    """The site at which `module` gives its output."""
    return Site(module, "out", layout, **fields)


def watch(site: Site, act: Callable[[Any], Tensor | None]) -> list[RemovableHandle]:
    """Call `act` with each value that passes `site`; a tensor that it returns takes the value's place.

    Returns the handles of the hooks; removing them ends the watch.
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
    """`activation` as [B, C, H, W] without prefix tokens; `size` is (H, W), for flattened grids."""
    if not layout.spatial:
        raise AnatomyError("these features have no grid: they are a class token, or the output of the network.")
    if activation.ndim == 4:
        return activation.permute(0, 3, 1, 2) if layout.channels_last else activation
    tokens_bnc = activation[:, layout.prefix :]
    if size is None or tokens_bnc.shape[1] != size[0] * size[1]:
        raise AnatomyError(
            f"{tokens_bnc.shape[1]} spatial tokens do not fit the grid {size} that was seen when the network "
            "was examined; for images of another size make a new Anatomy.of(network, example=images)."
        )
    batch, _, channels = tokens_bnc.shape
    return tokens_bnc.reshape(batch, *size, channels).permute(0, 3, 1, 2)
