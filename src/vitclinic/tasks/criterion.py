"""Criteria: the losses of tasks that have a state, such as a projection head, a teacher or a centre."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vitclinic._core.distributed import Distributed
from vitclinic._core.errors import ModelError, first_line
from vitclinic.anatomy import eval_mode
from vitclinic.data import Batch, ImageSpec

if TYPE_CHECKING:
    from vitclinic.treatments import Losses


@dataclass(frozen=True)
class Moment:
    """The place of a step in a run."""

    step: int
    """Steps made before it."""
    total: int
    """Steps of the run."""

    @property
    def progress(self) -> float:
        """The share of the run that is done, from 0 to below 1."""
        return self.step / self.total


class Criterion(nn.Module):
    """The losses of a task with a state of its own. Its parameters are trained; it is saved in the run's state.

    A step calls `prepare` once, `forward` for each pass (twice for the same images with SAM) and `finish` once.
    """

    def prepare(self, network: nn.Module, batches: Sequence[Batch], moment: Moment, divided: bool) -> list[Batch]:
        """Return the micro-batches of a step with what does not depend on the pass, such as a teacher's outputs.

        Args:
            network: The network that is trained.
            batches: This process's micro-batches.
            moment: Where the run is.
            divided: A pass sees only a part of this process's images.
        """
        return list(batches)

    def forward(self, network: nn.Module, batch: Batch) -> tuple[Tensor, Losses]:
        """Return the network's outputs for `batch.images`, and the losses by name."""
        raise TypeError(f"{type(self).__name__} must implement forward().")

    def finish(self, network: nn.Module) -> None:
        """Update the state after a step that was made."""

    def facts(self) -> Mapping[str, float]:
        """Return numbers of the last step for its row of metrics, the same in every process."""
        return {}

    def exported(self, network: nn.Module) -> nn.Module:
        """Return the network to evaluate and store."""
        return network

    def needs_whole(self, divided: bool) -> bool:
        """Return True if more than `forward` computes with the network, which then must be whole in each process."""
        names = ("prepare", "finish", "exported")
        return any(getattr(type(self), name) is not getattr(Criterion, name) for name in names)


def count_features(network: nn.Module, spec: ImageSpec, size: tuple[int, int] | None = None) -> int:
    """Return the number of features of a network without a head, from one pass at `size`, or full size.

    Raises:
        ModelError: The network does not take images of that size, or does not return one vector for each.
    """
    parameter = next(network.parameters())
    height, width = size or spec.img_size
    try:
        with torch.no_grad(), eval_mode(network):
            shape = (2, spec.in_chans, height, width)
            features = network(torch.full(shape, 0.5, dtype=parameter.dtype, device=parameter.device))
    except Exception as error:  # whatever a network, or a treatment of it, says of images that it does not take
        reason = first_line(error)
        raise ModelError(f"The network does not take {height} x {width} pixels ({reason}).") from error
    if features.ndim != 2:
        raise ModelError(f"The network returns {tuple(features.shape)} for 2 images; expected a vector for each.")
    return int(features.shape[1])


def total_of_processes(part: Tensor) -> Tensor:
    """Return the sum of a tensor over all processes of the run; each must call this."""
    return Distributed.current().sum(part.clone)
