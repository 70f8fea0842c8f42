"""The outcome of a prescription: its trials, the verdict, why each remedy was tried, and the recipe if one helped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from vitclinic._core.io import write_json, write_text
from vitclinic._core.statistics import PairedDifference, paired_difference
from vitclinic.experiments.prescribe.arms import PLAIN, Arm, Reason
from vitclinic.experiments.prescribe.plan import Stage
from vitclinic.experiments.prescribe.remedies import flatten
from vitclinic.training import Recipe
from vitclinic.training.recipe import DEFAULT_EPOCHS, LENGTHS, ModelConfig

SCHEMA = 2
"""1 had treatments alone for arms, and a recipe of the plain one's length."""
Verdict = Literal["helps", "nothing helped"]


@dataclass(frozen=True)
class Trial:
    """One run of an arm: its accuracy on val in a rung, on test in the final comparison."""

    arm: str
    seed: int
    steps: int
    status: Literal["finished", "diverged"]
    accuracy: float
    """For a diverged run, that of guessing."""
    nll: float | None
    run: str
    """The run's directory in `runs/`."""


@dataclass(frozen=True)
class TriedStage:
    """The trials of one stage."""

    stage: Stage
    seeds: Sequence[int]
    trials: Sequence[Trial]
    failed: Mapping[str, str] = field(default_factory=dict)
    """Arms with a failed run, which are out, and the reason."""

    @property
    def name(self) -> str:
        """Such as `rung 1`."""
        return self.stage.name

    @property
    def arms(self) -> list[str]:
        """The arms with all their trials, best first."""
        names = dict.fromkeys(trial.arm for trial in self.trials if trial.arm not in self.failed)
        return sorted(names, key=self._rank)

    def accuracies(self, arm: str) -> list[float]:
        """Return the accuracies of an arm, in the order of the seeds."""
        by_seed = {trial.seed: trial.accuracy for trial in self.trials if trial.arm == arm}
        return [by_seed[seed] for seed in self.seeds]

    def mean(self, arm: str) -> float:
        """Return the mean accuracy of an arm."""
        values = self.accuracies(arm)
        return math.fsum(values) / len(values)

    def diverged(self, arm: str) -> int:
        """Return how many trials of an arm diverged."""
        return sum(trial.arm == arm and trial.status == "diverged" for trial in self.trials)

    def best(self, count: int | None = None) -> list[str]:
        """Return the best arms, `count` of them or all, without the plain recipe."""
        return [arm for arm in self.arms if arm != PLAIN][:count]

    def _rank(self, arm: str) -> tuple[float, float]:
        """Order by mean accuracy, then by mean negative log-likelihood; ties stay in the order of the list."""
        losses = [math.inf if trial.nll is None else trial.nll for trial in self.trials if trial.arm == arm]
        return -self.mean(arm), math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.inf


@dataclass(frozen=True)
class TriedRemedy:
    """A remedy that was tried alone: what it gained on val, and the findings that had suggested it."""

    arm: Arm
    gain: float
    """Its accuracy minus the plain recipe's in `stage`: on val, where the best of many is partly the luckiest."""
    stage: str
    """The last stage that had it."""
    reasons: Sequence[Reason] = ()

    def record(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        (change,) = self.arm.record()
        reasons = [asdict(reason) for reason in self.reasons]
        return {**change, "gain": self.gain, "stage": self.stage, "reasons": reasons}


_WORDS = {
    "optimizer.name": "optimizer",
    "optimizer.lr": "learning rate",
    "optimizer.weight_decay": "weight decay",
    "schedule.name": "schedule",
    "schedule.warmup": "warm-up",
    "data.augment.level": "augmentation",
    "data.augment.smoothing": "label smoothing",
    "batch_size": "batch size",
    "ema": "averaged weights (ema)",
}


def describe_changes(plain: Recipe, changed: Recipe) -> list[str]:
    """Return in words what changes from one recipe to another, one line for each part.

    Example:
        >>> from vitclinic.training import build_recipe
        >>> plain = build_recipe({"epochs": 12})
        >>> describe_changes(plain, build_recipe(plain, ["optimizer.lr=3e-3", "treatments=[gap_head]", "epochs=6"]))
        ['treatments: none becomes gap_head', 'learning rate: 0.001 becomes 0.003', 'epochs: 12 becomes 6']
    """
    pairs = [("network", _describe_network(plain.model), _describe_network(changed.model))]
    pairs.append(("treatments", _describe_treatments(plain), _describe_treatments(changed)))
    before, after = (
        dict(flatten(recipe.model_dump(mode="json", exclude={"model", "treatments", "task", *LENGTHS})))
        for recipe in (plain, changed)
    )
    keys = dict.fromkeys([*before, *after])
    pairs += [(_WORDS.get(key, key), _say(before.get(key)), _say(after.get(key))) for key in keys]
    for length in LENGTHS:
        default = DEFAULT_EPOCHS if length == "epochs" and plain.steps is None and plain.max_time is None else None
        old, new = getattr(plain, length), getattr(changed, length)
        pairs.append((length, _say(old or default), _say(new or default)))
    return [f"{what}: {old} becomes {new}" for what, old, new in pairs if old != new]


def _describe_network(model: ModelConfig) -> str:
    keywords = ", ".join(f"{key} {_say(value)}" for key, value in model.keywords.items())
    return f"{model.name} ({keywords})" if keywords else model.name


def _describe_treatments(recipe: Recipe) -> str:
    return ", ".join(_say(entry) for entry in recipe.treatments.written) or "none"


def _say(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def measure_effect(final: TriedStage, winner: str) -> PairedDifference:
    """Return the winner's test accuracy minus the plain recipe's, paired by fresh seeds."""
    return paired_difference(final.accuracies(PLAIN), final.accuracies(winner))


def judge_effect(found: PairedDifference) -> Verdict:
    """Return `helps` if all of the 95% interval is above zero: by chance alone, once in forty prescriptions."""
    return "helps" if found.low > 0 else "nothing helped"


@dataclass(frozen=True)
class Prescription:
    """The outcome of `prescribe`: the winner of the selection against the plain recipe on fresh seeds.

    Example:
        >>> found = vitclinic.prescribe(data="photos/", budget="1h")  # doctest: +SKIP
        >>> found.statement  # doctest: +SKIP
        'conv_stem helps: +4.1% test accuracy (95% interval +2.9% to +5.3%, 5 fresh seeds), at the same training time.'
        >>> vitclinic.train(found.recipe)  # doctest: +SKIP
    """

    folder: Path
    """The folder with trials and evidence."""
    verdict: Verdict
    winner: Arm
    effect: PairedDifference
    """The winner's test accuracy minus the plain recipe's: the only number here that the selection has not touched."""
    plain: Recipe
    """The recipe as it was given."""
    changed: Recipe
    """The winner's recipe, at a length that takes the same time as the plain one by the costs measured here."""
    rungs: Sequence[TriedStage]
    final: TriedStage
    left_out: Mapping[str, str]
    """Remedies and combinations that were not tried, or not to the end, with the reason."""
    reasons: Sequence[Reason]
    """What the exam found, if one was named, and suggests."""
    candidates: Sequence[Arm]
    """The single remedies, in the order in which they were proposed."""
    step_costs: Mapping[str, float]
    """Seconds per step, measured beforehand, by arm."""
    own_steps: int
    """The recipe's own length."""
    budget: float
    used: float
    """Seconds."""

    @property
    def recipe(self) -> Recipe:
        """The recipe to train with: with the winner's changes if they helped, as it was given otherwise."""
        return self.changed if self.verdict == "helps" else self.plain

    @property
    def changes(self) -> list[str]:
        """The changes from the plain recipe to the one to train with, in words."""
        return describe_changes(self.plain, self.recipe)

    @property
    def tried(self) -> list[TriedRemedy]:
        """The remedies that were tried alone, in the order in which they were proposed, with what they gained."""
        found = []
        for arm in self.candidates:
            # One remedy alone needs no rung: the final comparison is all that it was tried in.
            last = next((rung for rung in reversed(self.rungs or [self.final]) if arm.name in rung.arms), None)
            if last is not None:
                reasons = [reason for reason in self.reasons if reason.remedy == arm.name]
                found.append(TriedRemedy(arm, last.mean(arm.name) - last.mean(PLAIN), last.name, reasons))
        return found

    @property
    def file(self) -> Path | None:
        """The recipe file, if there is something to prescribe."""
        return self.folder / "prescription.yaml" if self.verdict == "helps" else None

    @property
    def statement(self) -> str:
        """The outcome in one sentence."""
        found, interval = self.effect, f"95% interval {self.effect.low:+.1%} to {self.effect.high:+.1%}"
        measured = f"{found.mean:+.1%} test accuracy ({interval}, {found.pairs} fresh seeds)"
        if self.verdict == "helps":
            return f"{self.winner.name} helps: {measured}, at the same training time."
        return f"Nothing helped: the best in the selection, {self.winner.name}, made {measured}."

    @property
    def cost_ratio(self) -> float:
        """The cost of a step of the winner relative to the plain recipe."""
        return self.step_costs[self.winner.name] / self.step_costs[PLAIN]

    def record(self) -> dict[str, Any]:
        """Return all of it as plain data; what depends on the clock is under `timing`."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "statement": self.statement,
            "winner": self.winner.name,
            "remedies": self.winner.record(),
            "changes": self.changes,
            "effect": {"measure": "test accuracy, winner - plain, paired by fresh seeds", **asdict(self.effect)},
            "recipe": self.recipe.plain(),
            "own_steps": self.own_steps,
            "tried": [one.record() for one in self.tried],
            "final": _describe_stage(self.final, "test accuracy on fresh seeds"),
            "rungs": [_describe_stage(rung, "val accuracy; selection, optimistic") for rung in self.rungs],
            "left_out": dict(self.left_out),
            "timing": {"budget": self.budget, "used": self.used, "step_seconds": dict(self.step_costs)},
        }

    def write(self) -> None:
        """Write `prescription.json`, and `prescription.yaml` if there is something to prescribe."""
        write_json(self.folder / "prescription.json", self.record())
        if self.file is not None:
            text = "".join(f"# {line}\n" for line in self._header())
            write_text(self.file, text + yaml.safe_dump(self.recipe.plain(), sort_keys=False))

    def _header(self) -> list[str]:
        steps = {trial.arm: trial.steps for trial in self.final.trials}
        return [
            self.statement,
            f"Trials of {self.final.stage.seconds:.0f} s each: {steps[self.winner.name]} steps, {steps[PLAIN]} of the"
            f" plain recipe; a step costs {self.cost_ratio:.2f} times a plain one.",
            self._describe_length(),
            *(f"change: {change}" for change in self.changes),
            "command: vitclinic train prescription.yaml",
        ]

    def _describe_length(self) -> str:
        """Say what the length of the prescribed recipe is."""
        same = all(getattr(self.recipe, length) == getattr(self.plain, length) for length in LENGTHS)
        if same:
            return f"The length below is the recipe's own ({self.own_steps} steps of the plain one)."
        return (
            f"The length below takes the time of your recipe's {self.own_steps} steps, by the costs of a step measured"
            " here."
        )


def _describe_stage(tried: TriedStage, measure: str) -> dict[str, Any]:
    return {
        "name": tried.name,
        "measure": measure,
        "trial_seconds": tried.stage.seconds,
        "detectable": tried.stage.detectable,
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
