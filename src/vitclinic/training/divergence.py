"""Divergence of a training: a loss that explodes or is NaN, or gradients that are not finite for long."""

from __future__ import annotations

import math

from vitclinic.training.rows import Row

EXPLODED = 10.0
"""A loss this many times that of the first step counts as divergence."""
STUCK = 50
"""This many steps in a row without a finite gradient count as divergence; a loss scaler needs a few to adapt."""


class DivergenceCheck:
    """The memory of past steps by which a divergence is detected."""

    def __init__(self) -> None:
        self.first_loss: float | None = None
        self.skipped = 0
        """Steps in a row whose gradient was not finite."""

    def count(self, stepped: bool) -> None:
        """Note whether a step had a finite gradient."""
        self.skipped = 0 if stepped else self.skipped + 1

    def find(self, row: Row) -> str | None:
        """Return the reason if a row of metrics shows a divergence, else None."""
        if not math.isfinite(row["loss"]):
            return f"the {row['kind']} loss became {row['loss']} at step {row['step']}"
        if row["kind"] != "train":
            return None
        if self.first_loss is None:
            self.first_loss = row["loss"]
        if row["loss"] > EXPLODED * max(abs(self.first_loss), 1.0):
            return f"the loss rose to {row['loss']:.3g} at step {row['step']}, from {self.first_loss:.3g} at the start"
        if self.skipped >= STUCK:
            return f"no finite gradient in the {self.skipped} steps up to step {row['step']}"
        return None
