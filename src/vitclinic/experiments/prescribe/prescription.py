"""What a prescription ends in: a recipe or the sentence that nothing helped, and the evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from vitclinic._core.io import write_json, write_text
from vitclinic._core.statistics import PairedDifference
from vitclinic.experiments.prescribe.arms import PLAIN, Arm
from vitclinic.experiments.prescribe.selection import Tried, Verdict
from vitclinic.training import Recipe

SCHEMA = 1


@dataclass(frozen=True)
class Prescription:
    """The winner of the selection against the plain recipe on fresh seeds, and how it came to win."""

    folder: Path
    verdict: Verdict
    winner: Arm
    effect: PairedDifference
    """The winner's accuracy on test less the plain recipe's: the only number here that selection has not touched."""
    plain: Recipe
    """The recipe as it was given."""
    rungs: Sequence[Tried]
    final: Tried
    left_out: Mapping[str, str]
    """Treatments that were not tried, or not to the end, with the reason."""
    step_costs: Mapping[str, float]
    """Seconds a step, measured beforehand, by arm."""
    own_steps: int
    """The recipe's own length."""
    budget: float
    used: float
    """Seconds."""

    @property
    def recipe(self) -> Recipe:
        """The recipe to train with: with the winner's treatments if they helped, as it was given otherwise."""
        return self.plain.add_treatments(self.winner.treatments) if self.verdict == "helps" else self.plain

    @property
    def file(self) -> Path | None:
        """The recipe file, if there is something to prescribe."""
        return self.folder / "prescription.yaml" if self.verdict == "helps" else None

    @property
    def statement(self) -> str:
        """One sentence."""
        found, interval = self.effect, f"95% interval {self.effect.low:+.1%} to {self.effect.high:+.1%}"
        measured = f"{found.mean:+.1%} test accuracy ({interval}, {found.pairs} fresh seeds)"
        if self.verdict == "helps":
            return f"{self.winner.name} helps: {measured}, at the same training time."
        return f"Nothing helped: the best of the selection, {self.winner.name}, has {measured}."

    @property
    def cost_ratio(self) -> float:
        """What a step of the winner costs, in steps of the plain recipe."""
        return self.step_costs[self.winner.name] / self.step_costs[PLAIN]

    def record(self) -> dict[str, Any]:
        """All of it as plain data; what depends on the clock is under `timing`."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "statement": self.statement,
            "winner": self.winner.name,
            "treatments": list(self.winner.treatments),
            "effect": {"measure": "test accuracy, winner - plain, paired by fresh seeds", **asdict(self.effect)},
            "recipe": self.recipe.plain(),
            "own_steps": self.own_steps,
            "final": _stage(self.final, "test accuracy on fresh seeds"),
            "rungs": [_stage(rung, "val accuracy; selection, optimistic") for rung in self.rungs],
            "left_out": dict(self.left_out),
            "timing": {"budget": self.budget, "used": self.used, "step_seconds": dict(self.step_costs)},
        }

    def write(self) -> None:
        """`prescription.json`, and `prescription.yaml` if there is something to prescribe."""
        write_json(self.folder / "prescription.json", self.record())
        if self.file is not None:
            text = "".join(f"# {line}\n" for line in self._header())
            write_text(self.file, text + yaml.safe_dump(self.recipe.plain(), sort_keys=False))

    def _header(self) -> list[str]:
        steps = {trial.arm: trial.steps for trial in self.final.trials}
        return [
            self.statement,
            f"Trials of {self.final.seconds:.0f} s each: {steps[self.winner.name]} steps, {steps[PLAIN]} of the plain"
            f" recipe; a step costs {self.cost_ratio:.2f} plain ones.",
            f"The length below is the recipe's own, {self.own_steps} steps.",
            "command: vitclinic train prescription.yaml",
        ]


def _stage(tried: Tried, measure: str) -> dict[str, Any]:
    return {
        "name": tried.name,
        "measure": measure,
        "trial_seconds": tried.seconds,
        "seeds": list(tried.seeds),
        "arms": [
            {
                "arm": arm,
                "mean": tried.mean(arm),
                "accuracies": tried.accuracies(arm),
                "steps": next(trial.steps for trial in tried.trials if trial.arm == arm),
                "diverged": tried.diverged(arm),
                "runs": [trial.run for trial in tried.trials if trial.arm == arm],
            }
            for arm in tried.arms
        ],
        "failed": dict(tried.failed),
    }
