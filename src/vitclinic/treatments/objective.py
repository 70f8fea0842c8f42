"""The base class of added losses, apart from `treatment.py` because it needs torch."""

from __future__ import annotations

from torch import Tensor, nn

from vitclinic.data.stream import Batch


class Objective(nn.Module):
    """An added loss; its parameters are trained and saved in the run's state, not in the exported network."""

    def forward(self, batch: Batch, logits: Tensor) -> Tensor:
        """Return the loss of this batch, a scalar; hidden states are read by hooks registered in the constructor."""
        raise TypeError(f"{type(self).__name__} must implement forward().")
