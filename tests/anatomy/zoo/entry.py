"""One network of the zoo: how to build it, which images it takes, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from tests.anatomy.networks import shaken

Library = Literal["timm", "transformers", "torchvision", "hand-written"]


@dataclass(frozen=True)
class Entry:
    """A small network of one architecture, with random weights.

    Attributes:
        construct: Makes the network; call `build` instead, which fixes the seed.
        image: Channels, height and width of the images it takes.
        library: Where its code comes from.
        has_attention: Whether softmax weights over positions mix tokens, from the architecture's paper and code.
        notes: What is peculiar to its structure.
    """

    construct: Callable[[], nn.Module]
    image: tuple[int, int, int]
    library: Library
    has_attention: bool
    notes: str = ""

    def build(self) -> nn.Module:
        """Return the network in evaluation mode, with the same random weights at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.construct().eval()

    def awake(self) -> nn.Module:
        """Return the network at ordinary values, as after training: no branch near zero, BatchNorms that saw data.

        Freshly built, some networks hardly answer to their images, and removing a branch that starts at zero changes
        nothing.
        """
        network = shaken(self.build())
        norms = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.train()
            norm.momentum = None  # the mean over the images, not a moving one
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            network(self.images(8))
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        return network.eval()

    def images(self, number: int = 2) -> torch.Tensor:
        """Return so many random images of its size, always the same."""
        return torch.randn(number, *self.image, generator=torch.Generator().manual_seed(1))
