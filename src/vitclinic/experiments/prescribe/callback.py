"""Who hears of a prescription as it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vitclinic.experiments.prescribe.arms import Arm
from vitclinic.experiments.prescribe.ledger import Decided
from vitclinic.experiments.prescribe.plan import Stage
from vitclinic.experiments.prescribe.selection import Tried


class Watcher:
    """Override what you need."""

    def on_reading(self, what: str, done: int, total: int) -> None:
        """Progress of decoding the data."""

    def on_measuring(self, arm: str, done: int, total: int) -> None:
        """The cost of an arm's step is about to be measured."""

    def on_plan(
        self, plan: Sequence[Stage], arms: Sequence[Arm], left_out: Mapping[str, str], used: float, budget: float
    ) -> None:
        """What is going to happen; no trial has been made, or (resumed) some have."""

    def on_stage(self, decided: Decided) -> None:
        """A rung, or the final comparison, begins."""

    def on_progress(self, done: float, total: float) -> None:
        """So many of the planned seconds are done."""

    def on_tried(self, tried: Tried, kept: Sequence[str]) -> None:
        """A rung has ended; these arms go on."""
