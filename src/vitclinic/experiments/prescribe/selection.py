"""What trials say: which arms go on, and whether the winner helped. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vitclinic._core.statistics import PairedDifference, paired_difference
from vitclinic.experiments.prescribe.arms import PLAIN

Verdict = Literal["helps", "nothing helped"]


@dataclass(frozen=True)
class Trial:
    """One run of an arm: its accuracy on val in a rung, on test in the final comparison."""

    arm: str
    seed: int
    steps: int
    status: Literal["finished", "diverged"]
    accuracy: float
    """Of a diverged run, that of guessing."""
    nll: float | None
    run: str
    """The run's directory below `runs/`."""


@dataclass(frozen=True)
class Tried:
    """The trials of one stage."""

    name: str
    seconds: float
    seeds: Sequence[int]
    trials: Sequence[Trial]
    failed: Mapping[str, str] = field(default_factory=dict)
    """Arms of which a run failed, with the reason: they are out."""

    @property
    def arms(self) -> list[str]:
        """Those with all their trials, best first."""
        names = dict.fromkeys(trial.arm for trial in self.trials if trial.arm not in self.failed)
        return sorted(names, key=self._rank)

    def accuracies(self, arm: str) -> list[float]:
        """By seed."""
        by_seed = {trial.seed: trial.accuracy for trial in self.trials if trial.arm == arm}
        return [by_seed[seed] for seed in self.seeds]

    def mean(self, arm: str) -> float:
        values = self.accuracies(arm)
        return math.fsum(values) / len(values)

    def diverged(self, arm: str) -> int:
        return sum(trial.arm == arm and trial.status == "diverged" for trial in self.trials)

    def best(self, count: int) -> list[str]:
        """The `count` best arms but for the plain one."""
        return [arm for arm in self.arms if arm != PLAIN][:count]

    def _rank(self, arm: str) -> tuple[float, float]:
        """Accuracy decides; the mean negative log-likelihood where it is the same; then who was listed first."""
        losses = [math.inf if trial.nll is None else trial.nll for trial in self.trials if trial.arm == arm]
        return -self.mean(arm), math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.inf


def effect(final: Tried, winner: str) -> PairedDifference:
    """The winner's test accuracy less the plain recipe's, paired by fresh seeds."""
    return paired_difference(final.accuracies(PLAIN), final.accuracies(winner))


def verdict(found: PairedDifference) -> Verdict:
    """`helps` if all of the 95% interval is above zero: by chance alone, once in forty prescriptions."""
    return "helps" if found.low > 0 else "nothing helped"
