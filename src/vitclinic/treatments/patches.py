"""Where the patches of a network can be read: as they enter its first layer, and as they leave its last.

Shapes: B images, N patches, D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitclinic.anatomy import Anatomy, Site, evaluating, out_of, taps
from vitclinic.anatomy.families import recognise
from vitclinic.anatomy.sites import watch
from vitclinic.errors import TreatmentError


@dataclass(frozen=True, eq=False)
class Patches:
    """The patches of a network at images of one size.

    `first` is the patch embedding before the position embedding; `last` the output of the final norm or, where that
    acts on pooled features or is not there, of the last block.
    """

    first: Site
    last: Site
    size: tuple[int, int]
    """The images' height and width."""
    grid: tuple[int, int]
    """How many patches `last` has along each."""
    width: int
    """The channels of `last`."""
    kept: bool
    """Whether each patch of `first` is one of `last`, with as many channels: not where patches are merged."""

    @classmethod
    def of(cls, network: nn.Module, size: tuple[int, int] | None = None) -> Patches:
        """Found by a forward pass of one image of that size, by default the one the network is made for."""
        core, family = recognise(network)
        channels, *usual = family.input_size(core)
        like = next(parameter for parameter in core.parameters() if parameter.is_floating_point())
        height, width = size or usual
        example = torch.rand(1, channels, height, width, generator=torch.Generator().manual_seed(0)).to(like)
        anatomy = Anatomy.of(core, example)
        stem, head = anatomy.unit("stem"), anatomy.unit("head")
        sites = {"first": stem.output, "block": head.input}
        if head.norm is not None:
            sites["norm"] = out_of(head.norm, head.input.layout)
        with torch.no_grad(), evaluating(core), taps(sites) as seen:
            core(example)
        last = "norm" if "norm" in seen and seen["norm"].shape == seen["block"].shape else "block"
        rows, columns = anatomy.grid(head.input, seen["block"]).shape[2:]
        before, after = (patch_tokens(sites[end], seen[end]) for end in ("first", last))
        kept = before.shape == after.shape
        return cls(stem.output, sites[last], (height, width), (rows, columns), after.shape[2], kept)

    @property
    def cell(self) -> tuple[int, int]:
        """The pixels of one patch; images that do not divide into such cells are an error."""
        if self.size[0] % self.grid[0] or self.size[1] % self.grid[1]:
            raise TreatmentError(
                f"Images of {self.size[0]} x {self.size[1]} pixels do not divide into the network's"
                f" {self.grid[0]} x {self.grid[1]} last patches, so CutMix cannot keep to their borders: choose a size"
                " that divides, or switch the mixing loss off."
            )
        return self.size[0] // self.grid[0], self.size[1] // self.grid[1]


def patch_tokens(site: Site, activation: Tensor) -> Tensor:
    """What was read at `site` as [B, N, D], rows of the grid one after the other, prefix tokens stripped."""
    if activation.ndim == 3:
        return activation[:, site.layout.prefix :]
    x_bhwd = activation if site.layout.channels_last else activation.permute(0, 2, 3, 1)
    return x_bhwd.flatten(1, 2)


class Reader:
    """Hooks that hold a training pass's patches until the loss takes them; nothing is held of any other pass."""

    def __init__(self, **sites: Site) -> None:
        self._sites = sites
        self._held: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        for name, site in sites.items():
            self._handles += watch(site, self._holder(name, site))

    def _holder(self, name: str, site: Site) -> Callable[[Tensor], None]:
        def hold(activation: Tensor) -> None:
            if site.module.training and torch.is_grad_enabled():
                self._held[name] = activation

        return hold

    def take(self) -> list[Tensor]:
        """Each site's patches [B, N, D], in the order the sites were named; they are held no longer."""
        held, self._held = self._held, {}
        if held.keys() != self._sites.keys():
            raise TreatmentError(
                "There are no patches to compare: call the network in training mode, with gradients, before each use of"
                " its patch losses."
            )
        return [patch_tokens(site, held[name]) for name, site in self._sites.items()]

    def remove(self) -> None:
        """Take the hooks out of the network."""
        for handle in self._handles:
            handle.remove()
