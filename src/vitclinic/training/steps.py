"""The plain step rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitclinic.data import Batch
from vitclinic.treatments import Losses, LossesAndGradients


class PlainStep:
    """Back-propagation: the mean gradient of the micro-batches, synchronised with the last of them."""

    def __call__(self, batches: Sequence[Batch], losses_and_gradients: LossesAndGradients) -> Losses:
        passes = [losses_and_gradients(batch, sync=batch is batches[-1]) for batch in batches]
        return mean_losses(passes)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def mean_losses(passes: Sequence[Losses]) -> Losses:
    """The mean over micro-batches of each named loss."""
    return {name: sum(p[name] for p in passes) / len(passes) for name in passes[0]}  # type: ignore[misc]
