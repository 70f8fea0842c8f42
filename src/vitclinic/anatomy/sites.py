"""Sites at which a tensor can be read in a network, the layout of its features on their grid, and taps at sites."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from vitclinic._core.errors import AnatomyError
from vitclinic.anatomy.forward import Operand, Removable, eager, is_recomputing, look, watch_addition

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
        size: The grid's size, where it is known from a recorded pass.
        spatial: False for logits, or for a class token alone.
        has_class: True if the first prefix token is the class token.
    """

    prefix: int = 0
    channels_last: bool = False
    grid_at: Site | None = None
    size: Size | None = None
    spatial: bool = True
    has_class: bool = True
    """Ignored without a prefix."""


NCHW = Layout()
NHWC = Layout(channels_last=True)
OFF_GRID = Layout(spatial=False)


@dataclass(frozen=True, eq=False)
class Arrangement:
    """A layout of tokens that is none of ours, such as [N, B, C], and the way to [B, N, C] with prefix tokens first.

    Args:
        axes: The axes of images, tokens (one or two) and channels, in this order.
        order: Which of the flattened tokens comes where; None if they are in order.
    """

    axes: tuple[int, ...]
    order: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        """Return a tensor as [B, N, C]."""
        x_bnc = x.permute(self.axes).flatten(1, -2)
        return x_bnc if self.order is None else x_bnc[:, self.order.to(x.device)]

    def begins_with(self, count: int) -> bool:
        """Return True if so many tokens come first already, as in a network whose patches alone are in disorder."""
        return self.order is None or bool((self.order[:count].cpu() == torch.arange(count)).all())

    def undo(self, x_bnc: Tensor, like: Tensor) -> Tensor:
        """Return [B, N, C] in the arrangement of another tensor."""
        if self.order is not None:
            x_bnc = x_bnc[:, self.order.argsort().to(x_bnc.device)]
        back = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return x_bnc.reshape([like.shape[axis] for axis in self.axes]).permute(back)


@dataclass(frozen=True, eq=False)
class Site:
    """One end of a module, its input or its output, or a place at an addition inside it.

    Args:
        module: The module.
        end: `in` or `out`; `left`, `right`, `sum` or `change` (sum minus state) of an addition.
        layout: The layout of the features.
        item: The index of the value among several inputs or outputs, or of the state that an addition changes.
        first: Keep only this many tokens.
        within: The block or network, if it calls the module several times (a shared dropout or ReLU).
        call: Which of these calls is meant, from 0.
        addition: Which addition inside the call is meant, from 0.
        additions: How many there are inside the call, if known.
        overwritten: True if the network later writes to this tensor in place, so that a reader must copy it.
        arrangement: How its axes lie, if they do not lie as the layout says; readers see it as the layout says.
    """

    module: nn.Module
    end: Literal["in", "out"] | Operand
    layout: Layout = NCHW
    item: int = 0
    first: int | None = None
    within: nn.Module | None = None
    call: int = 0
    addition: int = 0
    additions: int | None = None
    overwritten: bool = False
    arrangement: Arrangement | None = None

    def pick(self, values: Any) -> Any:
        """Return this site's value among a module's inputs or outputs."""
        value = values if isinstance(values, Tensor) else values[self.item]
        if self.arrangement is not None:
            return self.arrangement.apply(value)
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


def watch(site: Site, act: Callable[[Any], Tensor | None]) -> Sequence[Removable]:
    """Call `act` with each value that passes `site`; if it returns a tensor, that replaces the value.

    A value that enters a module can be read and not replaced. Returns the handles of the hooks; removing them stops it.
    If `act` is a method, a deep copy of the network is watched by a copy of its object.
    """
    watcher = _Watcher(site, act)
    if site.end != "in" and site.end != "out":
        place = (site.call, site.addition, site.additions)
        return [watch_addition(site.module, *place, site.end, site.within, watcher.visit, site.item)]
    handles = [] if site.within is None else [site.within.register_forward_pre_hook(watcher.restart)]
    if site.end == "in":
        # First of all hooks: what the module is called with, not what another hook (a treatment's) makes of it.
        handles.append(site.module.register_forward_pre_hook(watcher.before, with_kwargs=True, prepend=True))
    else:
        handles.append(site.module.register_forward_hook(watcher.after))
    return handles


class _Watcher:
    """The hooks of one watched site; methods, not closures, so that a copied network has hooks of its own."""

    def __init__(self, site: Site, act: Callable[[Any], Tensor | None]) -> None:
        self._site, self._act = site, act
        self._calls = 0

    def restart(self, *_: Any) -> None:
        self._calls = 0

    def before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._due():
            self.visit((*args, *kwargs.values()))

    def after(self, _: nn.Module, __: Any, output: Any) -> Any:
        replaced = self.visit(output) if self._due() else None
        return replaced if replaced is None or isinstance(output, Tensor) else _put(output, self._site.item, replaced)

    def visit(self, values: Any) -> Tensor | None:
        """Show a value in the site's layout, and return what replaces it as the network has it."""
        site = self._site
        with look():
            replaced = self._act(site.pick(values))
            if replaced is None or site.arrangement is None:
                return replaced
            return site.arrangement.undo(replaced, values if isinstance(values, Tensor) else values[site.item])

    def _due(self) -> bool:
        if self._site.within is None:  # nothing to count, for which torch.compile would compile every call anew
            return True
        self._calls += 1
        return self._calls == self._site.call + 1


def _put(output: Any, item: int, value: Tensor) -> Any:
    """Return a module's outputs with one of them replaced."""
    values = [*output]
    values[item] = value
    return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)


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


Key = TypeVar("Key", bound=Hashable)
_NAMED = 3
"""Taps that an error names."""


@contextmanager
def stream(sites: Mapping[Key, Site], consumer: Callable[[Key, Tensor], None], *, grad: bool = False) -> Iterator[None]:
    """Call `consumer(key, activation)` for every activation that passes one of `sites` inside the context.

    The network's results do not change. Compiled modules run eagerly, since their graphs do not see hooks. Activations
    that checkpointing recomputes in a backward pass are not reported again.

    Args:
        sites: The sites to read, by key.
        consumer: Called with the key and the activation. To keep a tensor of a site marked `overwritten`, copy it.
        grad: Keep activations attached to the autograd graph; by default they are detached.

    Raises:
        AnatomyError: A site was not reached before the context ended.
    """
    silent = dict(sites)

    def reader(key: Key) -> Callable[[Tensor], None]:
        def read(activation: Tensor) -> None:
            if is_recomputing():
                return
            silent.pop(key, None)
            consumer(key, activation if grad else activation.detach())

        return read

    with ExitStack() as hooks, eager():
        for key, site in sites.items():
            for handle in watch(site, reader(key)):
                hooks.callback(handle.remove)
        yield
    if silent:
        named = [*map(repr, silent)][:_NAMED] + [f"{len(silent) - _NAMED} more"] * (len(silent) > _NAMED)
        raise AnatomyError(
            f"the taps {', '.join(named)} were never reached: call the network inside the context, "
            "and create a new anatomy if its modules were replaced."
        )


def version_of(tensor: Tensor) -> int | None:
    """Return how often `tensor` was written to; None in inference mode, where torch does not count."""
    return None if tensor.is_inference() else tensor._version


class Activations(Mapping[Key, Tensor]):
    """The last activation at each tap; reading one that the network has since overwritten in place is an error."""

    def __init__(self) -> None:
        self._seen: dict[Key, tuple[Tensor, int | None]] = {}

    def keep(self, key: Key, activation: Tensor) -> None:
        """Store `activation` together with its version."""
        self._seen[key] = (activation, version_of(activation))

    def __getitem__(self, key: Key) -> Tensor:
        activation, version = self._seen[key]
        if version_of(activation) != version:
            raise AnatomyError(f"the network changed the activation {key!r} in place; mark its site `overwritten`.")
        return activation

    def __iter__(self) -> Iterator[Key]:
        return iter(self._seen)

    def __len__(self) -> int:
        return len(self._seen)


@contextmanager
def taps(sites: Mapping[Key, Site], *, grad: bool = False) -> Iterator[Activations[Key]]:
    """Keep the last activation at each of `sites`.

    Args:
        sites: The sites to read, by key.
        grad: Keep activations attached to the autograd graph; by default they are detached.

    Yields:
        The activations by key, filled as the network runs.

    Raises:
        AnatomyError: A site was not reached before the context ended.

    Example:
        >>> import timm, torch
        >>> from vitclinic.anatomy import Anatomy
        >>> network = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32)
        >>> anatomy = Anatomy.of(network)
        >>> with taps({"last": anatomy.units[-2].output}) as seen:
        ...     logits = network(torch.rand(1, 3, 32, 32))
        >>> seen["last"].shape
        torch.Size([1, 5, 192])
    """
    seen: Activations[Key] = Activations()

    def keep(key: Key, activation: Tensor) -> None:
        seen.keep(key, activation.clone() if sites[key].overwritten else activation)

    with stream(sites, keep, grad=grad):
        yield seen
