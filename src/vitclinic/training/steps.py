"""The plain step rules: back-propagation, and back-propagation after the images have climbed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitclinic.data import Batch
from vitclinic.treatments import InputAscent, Losses, LossesAndGradients
from vitclinic.treatments.ascent import frozen, kept_buffers


class PlainStep:
    """Back-propagation: the mean gradient of the micro-batches, synchronised with the last of them."""

    def __call__(self, batches: Sequence[Batch], losses_and_gradients: LossesAndGradients) -> Losses:
        passes = [losses_and_gradients(batch, sync=batch is batches[-1]) for batch in batches]
        return mean_losses(passes)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class InputAscentStep(PlainStep):
    """Back-propagation on images that climbed first, by a pass that moves no running statistics."""

    def __init__(self, inputs: InputAscent) -> None:
        self.inputs = inputs

    def __call__(self, batches: Sequence[Batch], losses_and_gradients: LossesAndGradients) -> Losses:
        return super().__call__([self._climbed(batch, losses_and_gradients) for batch in batches], losses_and_gradients)

    def _climbed(self, batch: Batch, losses_and_gradients: LossesAndGradients) -> Batch:
        started = self.inputs.start(batch)
        with kept_buffers(losses_and_gradients.module), frozen(losses_and_gradients.module):
            losses_and_gradients(started, sync=False)
        return self.inputs.finish(batch, started)


def mean_losses(passes: Sequence[Losses]) -> Losses:
    """The mean over micro-batches of each named loss."""
    return {name: sum(p[name] for p in passes) / len(passes) for name in passes[0]}  # type: ignore[misc]
