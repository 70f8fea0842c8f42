"""Made treatments, costs, a clock and trials: prescriptions whose outcome is known, in seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from vitclinic.experiments.prescribe import ledger, plan, stages
from vitclinic.experiments.prescribe.prescription import Trial
from vitclinic.training.budget import Cost
from vitclinic.training.passes import PlainStep
from vitclinic.training.trainer import Trainer
from vitclinic.treatments import Treatment
from vitclinic.treatments.treatment import TREATMENTS

RECIPE: dict[str, Any] = {
    "model": {
        "name": "vit_tiny_fitted",
        "patch_size": 4,
        "embed_dim": 16,
        "depth": 1,
        "num_heads": 2,
        "class_token": False,
        "global_pool": "avg",
    },
    "data": {"source": "digits", "limit": 100, "augment": "none"},
    "optimizer": {"name": "sgd", "lr": 1e-4, "momentum": 0.9},
    "schedule": {"name": "constant", "warmup": 0},
    "clip": None,
    "batch_size": 50,
    "steps": 30,
    "workers": 0,
}
"""Learns nothing: its learning rate is far too small."""


class _Louder(PlainStep):
    """The gradient times a factor: with plain SGD, a learning rate so much larger."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, batches: Any, losses_and_gradients: Any) -> Any:
        losses = super().__call__(batches, losses_and_gradients)
        for parameter in losses_and_gradients.parameters:
            parameter.grad.mul_(self.factor)
        return losses


def louder(treatment: str, by: float) -> type[Treatment]:
    class Louder(Treatment):
        name: ClassVar[str] = treatment

        def step_rule(self) -> _Louder:
            return _Louder(by)

    return Louder


class Unfit(Treatment):
    """Somebody's own treatment, with a mistake in it."""

    name: ClassVar[str] = "mistaken"

    def operate(self, network: Any, case: Any) -> Any:
        raise ZeroDivisionError("somebody's mistake")


MADE = {"helping": 1000.0, "neutral": 1.0, "harmless": 1.0001, "diverging": 1e12, "dear": 1.0}
STEP_COSTS = {"helping": 2.0, "neutral": 1.0, "harmless": 1.5, "diverging": 0.5, "dear": 25.0}
"""In plain steps."""


class Clock:
    """Stands still unless told otherwise."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def _measured(recipes: Any, dataset: Any, distributed: Any, device: Any) -> list[Cost]:
    """A plain step takes 1 s and scoring nothing; treatments still have to fit the network."""
    for recipe in recipes:
        Trainer(recipe, dataset, 1, distributed, device)
    ratios = [sum(STEP_COSTS.get(treatment.name, 0.0) for treatment in recipe.treatments) or 1.0 for recipe in recipes]
    return [Cost(ratio, 0.0, 0.0) for ratio in ratios]


@contextmanager
def made_world() -> Iterator[Clock]:
    """The made treatments, costs and clock, and few seeds: a trial is mostly the making of its directory."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        for name, factor in MADE.items():
            patch.setitem(TREATMENTS._known, name, louder(name, factor))
        patch.setitem(TREATMENTS._known, "mistaken", Unfit)
        patch.setattr(ledger, "measure_costs", _measured)
        patch.setattr(ledger, "measure_cost", lambda recipe, *rest: _measured([recipe], *rest)[0])
        patch.setattr(ledger, "time", clock)
        patch.setattr(plan, "SELECTION_SEEDS", 1)
        patch.setattr(plan, "FINAL_SEEDS", (3, 3))
        patch.setattr(plan, "LARGEST_UNSEEN", 1.0)  # so few seeds will do
        yield clock


@contextmanager
def pretended_trials(gains: Mapping[str, float]) -> Iterator[list[list[str]]]:
    """Trials that are not run: an accuracy is 0.3 and the gain of each remedy; a gain may be of `a + b` together.

    Yields the names of the arms of every stage that is run.
    """
    seen: list[list[str]] = []

    def run(recipes: Any, pool: Any, callbacks: Any) -> list[Any]:
        seen.append([])
        return [SimpleNamespace(status="finished", recipe=recipe) for recipe in recipes]

    def read(self: Any, arm: str, seed: int, outcome: Any, split: str) -> Trial:
        seen[-1].append(arm)
        parts = set(arm.split(" + "))
        accuracy = 0.3 + math.fsum(gain for name, gain in gains.items() if set(name.split(" + ")) <= parts)
        return Trial(arm, seed, outcome.recipe.steps, "finished", accuracy + 1e-3 * (seed % 3), 1.0, "run")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "run_all", run)
        patch.setattr(stages.Stages, "_read_trial", read)
        yield seen
