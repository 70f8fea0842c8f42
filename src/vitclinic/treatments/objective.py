"""An added loss: one of the seams of `treatment.py`, in a file of its own because it is a torch module."""

from __future__ import annotations

from torch import Tensor, nn

from vitclinic.data.batch import Batch


class Objective(nn.Module):
    """An added loss. Its parameters are trained and saved in the run's state, not in the exported network."""

    def forward(self, batch: Batch, logits: Tensor) -> Tensor:
        """Return the loss of this batch, a scalar. Hidden states are read by hooks set when the objective is made."""
        raise TypeError(f"{type(self).__name__} does not say what its loss is.")
