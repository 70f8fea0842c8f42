"""Patch dropout: in training, a random share of the patches does not enter the blocks (Liu et al. 2023).

Shapes: B images, N tokens (P prefix tokens, then the patches), D channels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import timm.layers
import torch
from pydantic import Field
from torch import Tensor, nn

from vitclinic._core.errors import first_line
from vitclinic.anatomy import Site, Unit, taps
from vitclinic.data import ImageSpec
from vitclinic.treatments.parts import check_tokens, examine, missing, replace_at, run_once
from vitclinic.treatments.treatment import Treatment, register

Axes = tuple[int, int, int]


class PatchDropout(timm.layers.PatchDropout):  # type: ignore[misc]
    """timm's patch dropout, for tokens in any order of axes: it keeps int((1 - rate) (N - P)) patches of each image.

    Which ones is drawn for every image alone, from torch's global generator; prefix tokens stay, patches keep their
    order, and in evaluation nothing is dropped.

    Args:
        rate: Share of the patches to drop.
        prefix: Number of prefix tokens P, such as the class token.
        axes: The axes of images, tokens and channels.

    Example:
        >>> drop = PatchDropout(0.75, prefix=1)
        >>> tokens = torch.arange(10.0).reshape(1, 5, 2)
        >>> drop(tokens).shape, drop.eval()(tokens).shape
        (torch.Size([1, 2, 2]), torch.Size([1, 5, 2]))
    """

    def __init__(self, rate: float, prefix: int, axes: Axes = (0, 1, 2)) -> None:
        super().__init__(rate, num_prefix_tokens=prefix, ordered=True)
        self.axes = axes

    def extra_repr(self) -> str:
        return f"{self.prob:g}, after {self.num_prefix_tokens} tokens"

    def drop(self, x: Tensor) -> Tensor:
        """Return the tokens without those that are dropped, on the axes that they came on."""
        back = sorted(range(3), key=self.axes.__getitem__)
        kept: Tensor = self(x.permute(self.axes))
        return kept.permute(back)


@register
class PatchDropoutTreatment(Treatment):
    """A random share of the patches is left out of every training pass (Liu et al. 2023).

    Attributes:
        rate: The share of the patches to drop.
    """

    name: ClassVar[str] = "patch_dropout"
    paper: ClassVar[str] = "liu2023 (PatchDropout)"
    changes: ClassVar[str] = "in training, a random share of the patches does not enter the blocks"
    costs: ClassVar[str] = "no parameters; less time: the blocks see the kept patches alone"
    part: ClassVar[str] = "one sequence of tokens that carry their positions with them through all blocks"

    rate: float = Field(0.5, ge=0, lt=1, description="share of the patches that a training pass leaves out")

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        inside = [unit for unit in examine(self, network, spec).units if unit.block is not None]
        check_tokens(self, network, inside, spec)
        entry, axes = _find_entry(self, network, inside[0])
        _check_positions(self, network, entry, axes, inside, spec)
        dropout = PatchDropout(self.rate, entry.layout.prefix, axes)
        network.add_module(self.name, dropout)
        handles = replace_at(entry, dropout.drop)
        try:
            _run_with(network, dropout, spec)
        except Exception as error:  # of whatever counts tokens
            for handle in handles:
                handle.remove()
            delattr(network, self.name)
            reason = first_line(error)
            raise missing(self, network, f"with fewer tokens this one fails ({reason})") from error
        dropout.train(network.training)
        return network


def _find_entry(treatment: Treatment, network: nn.Module, first: Unit) -> tuple[Site, Axes]:
    """Return where the tokens enter the first block, and the axes of images, tokens and channels there."""
    site, arrangement = first.input, first.input.arrangement
    axes = (0, 1, 2) if arrangement is None else arrangement.axes
    if site.end != "in" or site.within is not None or len(axes) != 3 or (arrangement and arrangement.order is not None):
        raise missing(treatment, network, "no module is called once with the tokens that enter the first block")
    return replace(site, arrangement=None), axes


def _check_positions(
    treatment: Treatment, network: nn.Module, entry: Site, axes: Axes, inside: list[Unit], spec: ImageSpec
) -> None:
    """Raise if the blocks know a patch by its place in the sequence: another order must only reorder their output.

    Blocks with rotary or relative positions, or with convolutions, would take the kept patches for neighbours.
    """
    shuffle = _Shuffle(entry.layout.prefix, axes[1])
    states = []
    for act in (shuffle.learn, shuffle.apply):
        handles = replace_at(entry, act)
        try:
            with taps({"state": inside[-1].output}) as seen:
                run_once(network, spec)
        finally:
            for handle in handles:
                handle.remove()
        states.append(seen["state"])
    expected_bnd, shuffled_bnd = states[0][:, shuffle.order], states[1]
    tolerance = 1000 * torch.finfo(expected_bnd.dtype).eps * expected_bnd.abs().max()
    if (shuffled_bnd - expected_bnd).abs().max() > tolerance:
        raise missing(treatment, network, "the blocks of this one know a patch by its place in the sequence")


class _Shuffle:
    """Patches in another order, the same at every call."""

    order: Tensor

    def __init__(self, prefix: int, axis: int) -> None:
        self.prefix, self.axis = prefix, axis

    def learn(self, x: Tensor) -> Tensor:
        """Draw the order for as many tokens."""
        patches = torch.randperm(x.shape[self.axis] - self.prefix, generator=torch.Generator().manual_seed(0))
        self.order = torch.cat((torch.arange(self.prefix), patches + self.prefix)).to(x.device)
        return x

    def apply(self, x: Tensor) -> Tensor:
        """Return the tokens in that order."""
        return x.index_select(self.axis, self.order)


def _run_with(network: nn.Module, dropout: PatchDropout, spec: ImageSpec) -> None:
    """Run a network on two images, with only its patch dropout in training mode."""

    def wake(*_: object) -> None:
        dropout.train()  # the network's `eval()` has just put it to sleep

    handle = network.register_forward_pre_hook(wake)
    try:
        with torch.random.fork_rng():
            run_once(network, spec, batch=2)
    finally:
        handle.remove()
