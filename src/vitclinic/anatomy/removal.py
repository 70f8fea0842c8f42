"""Ways of removing a unit from a network, each undone when its context ends, even after an exception.

What comes before a removed unit need not be computed again: `Replay` returns recorded outputs of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from vitclinic.anatomy.forward import Removable, eager
from vitclinic.anatomy.sites import Site, watch

if TYPE_CHECKING:
    from vitclinic.anatomy.anatomy import Anatomy


@dataclass(frozen=True, eq=False)
class Silence:
    """Removal that sets a branch to zero after its last norm and scale: what it is added to, or lies beside, stays.

    Example:
        >>> from vitclinic.anatomy import out_of
        >>> layer = nn.Linear(2, 2)
        >>> with Silence(out_of(layer)).apply():
        ...     layer(torch.ones(1, 2)).sum().item()
        0.0
    """

    branch: Site

    @property
    def how(self) -> str:
        """Description of the removal."""
        return "branch set to zero"

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Set the branch to zero until the context ends."""
        with _keep_hooks(watch(self.branch, torch.zeros_like)):
            yield


@dataclass(frozen=True, eq=False)
class Bypass:
    """Removal that replaces a conv by the identity or, with a stride s, by taking every s-th pixel [park2022]."""

    conv: nn.Conv2d

    @property
    def how(self) -> str:
        """Description of the removal."""
        return "conv replaced by " + ("the identity" if self.conv.stride == (1, 1) else "subsampling")

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Replace the conv until the context ends."""
        rows, columns = self.conv.stride

        def subsample(_: nn.Module, args: tuple[Any, ...], __: Tensor) -> Tensor:
            x_bchw: Tensor = args[0]
            # A copy: the layers that follow may work in place, and the input is not theirs.
            return x_bchw[..., ::rows, ::columns].clone()

        with _keep_hooks([self.conv.register_forward_hook(subsample)]):
            yield


@dataclass(frozen=True, eq=False)
class Erase:
    """Removal that sets a parameter added to the state, such as a position embedding, to zero."""

    parameter: nn.Parameter

    @property
    def how(self) -> str:
        """Description of the removal."""
        return "parameter set to zero"

    @contextmanager
    def apply(self) -> Iterator[None]:
        # Swapping the storage, not writing into it: the values come back bit for bit, and no graph built
        # earlier is told that its tensor has changed.
        """Set the parameter to zero until the context ends."""
        values = self.parameter.data
        self.parameter.data = torch.zeros_like(values)
        try:
            with eager():
                yield
        finally:
            self.parameter.data = values


@contextmanager
def _keep_hooks(handles: Sequence[Removable]) -> Iterator[None]:
    """Run the network eagerly, so that its hooks are called, and remove these when the context ends."""
    try:
        with eager():
            yield
    finally:
        for handle in handles:
            handle.remove()


class Stretch(NamedTuple):
    """A module on the path through the network, and the depth of its last unit."""

    module: nn.Module
    last: int


class Replay:
    """Context in which a network can skip everything before a unit, by replaying a recorded pass.

        with Replay(anatomy) as replay:
            with replay.record():
                network(images)
            with replay.skip_before(unit.depth), anatomy.remove(unit):
                network(images)  # computes only from the unit's block on

    The outputs are those of the full computation, bit for bit. Blocks, stems and pools can be skipped; modules that run
    several times in a pass, or return more than tensors and plain values, are computed again. Recorded outputs are
    returned as copies, since the network may write into them.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        self.stretches = stretches(anatomy)
        self._kept: dict[nn.Module, Any] = {}
        self._unfit: set[nn.Module] = set()
        self._recording = False
        self._skipping_before = 0
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        self._undo.enter_context(eager())
        for stretch in self.stretches:
            self._replace_forward(stretch)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        self._kept.clear()

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the outputs of the modules during one pass of the network."""
        self._kept.clear()
        self._unfit.clear()
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    @contextmanager
    def skip_before(self, depth: int) -> Iterator[None]:
        """Replay the modules whose units all come before `depth`."""
        self._skipping_before = depth
        try:
            yield
        finally:
            self._skipping_before = 0

    @property
    def recorded_bytes(self) -> int:
        """Memory of the recorded outputs."""
        return sum(tensor.nbytes for value in self._kept.values() for tensor in _tensors(value))

    def _replace_forward(self, stretch: Stretch) -> None:
        # A hook sees inputs and outputs, but cannot keep a module from computing.
        module: Any = stretch.module
        own: Callable[..., Any] = module.forward
        before = vars(module).get("forward")

        def forward(*args: Any, **kwargs: Any) -> Any:
            if stretch.last < self._skipping_before and module in self._kept:
                return _copy(self._kept[module])
            output = own(*args, **kwargs)
            if self._recording:
                self._keep(module, output)
            return output

        def restore() -> None:
            if before is None:
                del module.forward
            else:
                module.forward = before

        module.forward = forward
        self._undo.callback(restore)

    def _keep(self, module: nn.Module, output: Any) -> None:
        if module in self._kept or not _is_plain(output):
            self._unfit.add(module)
        if module in self._unfit:
            self._kept.pop(module, None)
        else:
            self._kept[module] = _copy(output)


def stretches(anatomy: Anatomy) -> list[Stretch]:
    """Return the blocks, stems and pools of the network that contain no part of a later unit.

    There are none of an observed network: its blocks may hand on more than their outputs, such as features kept aside.
    """
    if anatomy.observed:
        return []
    found = [Stretch(unit.module, unit.depth) for unit in anatomy.of_kind("stem", "pool") if unit.module is not None]
    paths = dict(anatomy.network.named_modules())
    found += [Stretch(paths[block.name], block.units[-1].depth) for block in anatomy.blocks if block.name in paths]
    return [stretch for stretch in found if not _reaches_beyond(stretch, anatomy)]


def _reaches_beyond(stretch: Stretch, anatomy: Anatomy) -> bool:
    inside = set(stretch.module.modules())
    return any(unit.module in inside for unit in anatomy.units[stretch.last + 1 :])


def _is_plain(value: Any) -> bool:
    """Return True if `value` consists of tensors, numbers and strings only, so that a copy shares nothing with it."""
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, Tensor | bool | int | float | str | torch.Size)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(map(_copy, value))
    if type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
