"""The ledger of a prescription: measured costs and decisions, in `plan.json`, so that a resumed one keeps them."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter

from vitclinic._core.distributed import ALONE, pick_device
from vitclinic._core.errors import DamagedFileError, RecipeError, RunError, VitclinicError
from vitclinic._core.io import read_record, write_json
from vitclinic._core.time import seconds
from vitclinic.data import Dataset
from vitclinic.experiments.prescribe.arms import PLAIN, Arm, Reason, Trials
from vitclinic.experiments.prescribe.plan import Stage
from vitclinic.training import Recipe, build_recipe
from vitclinic.training.budget import Cost, image_counts, measure_cost, measure_costs, total_steps

log = logging.getLogger(__name__)

SCHEMA = 2
"""1 had treatments alone for arms."""
FILE = "plan.json"
LEAST_STEPS, ENOUGH_STEPS = 10, 100
"""A trial has an epoch, or `ENOUGH_STEPS` if an epoch is longer, and never less than `LEAST_STEPS`."""
_ADVICE = "remove it, or choose another `out`"

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Steps = Annotated[int, Field(ge=1)]

SAME_TIME = 0.05
"""Times that differ by less are the same, to the precision of measured costs."""


@dataclass(frozen=True)
class DecidedStage:
    """A stage as it is run: its arms, the steps of each, and its seeds. Never changed again."""

    stage: Stage
    arms: tuple[Arm, ...]
    steps: Mapping[str, int]
    """By the arm's name."""
    seeds: Sequence[int]
    began: float
    """Seconds that the prescription had used by then."""
    spent: float | None = None
    """Seconds that it took, once it has ended."""


class Ledger:
    """The measured costs, the plan and the decided stages of one prescription, and the time it has used."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.path = folder / FILE
        self.identity = json.loads(json.dumps(identity))  # as it will be read again
        self.costs: dict[str, Cost] = {}
        self.left_out: dict[str, str] = {}
        self.reasons: list[Reason] = []
        self.candidates: list[Arm] | None = None
        self.plan: list[Stage] = []
        self.decided: list[DecidedStage] = []
        self.used = 0.0
        if self.path.is_file():
            self._read()
        self._since = time.monotonic()

    def save(self) -> None:
        """Write all of it, with the time used so far."""
        now = time.monotonic()
        self.used, self._since = self.used + now - self._since, now
        write_json(
            self.path,
            {
                "schema": SCHEMA,
                "identity": self.identity,
                "used": self.used,
                "costs": {name: asdict(cost) for name, cost in self.costs.items()},
                "left_out": self.left_out,
                "reasons": [asdict(reason) for reason in self.reasons],
                "candidates": None if self.candidates is None else [arm.record() for arm in self.candidates],
                "plan": [asdict(stage) for stage in self.plan],
                "decided": [
                    {
                        "stage": asdict(decided.stage),
                        "arms": [arm.record() for arm in decided.arms],
                        "steps": dict(decided.steps),
                        "seeds": list(decided.seeds),
                        "began": decided.began,
                        "spent": decided.spent,
                    }
                    for decided in self.decided
                ],
            },
        )

    def end_stage(self, number: int) -> None:
        """Note how long a stage took, if that is not known yet."""
        self.save()
        decided = self.decided[number]
        if decided.spent is None:
            self.decided[number] = replace(decided, spent=self.used - decided.began)
            self.save()

    @property
    def slowness(self) -> float:
        """The time that ended stages took, relative to plan."""
        ended = [decided for decided in self.decided if decided.spent is not None]
        planned = sum(decided.stage.planned for decided in ended)
        return sum(decided.spent or 0.0 for decided in ended) / planned if planned else 1.0

    def _read(self) -> None:
        try:
            stored = read_record(self.path, {"schema": int, "identity": dict, "decided": list}, _ADVICE)
            other = stored["schema"] != SCHEMA or stored["identity"] != self.identity
            if other and not stored["decided"]:
                return  # nothing was tried, as with a budget that was too small: nothing is lost
            if stored["schema"] != SCHEMA:
                raise RunError(
                    f"'{self.path.parent}' holds a prescription of another version of vitclinic, which cannot be"
                    " continued here: choose another `out`."
                )
            if other:
                raise RunError(
                    f"'{self.path.parent}' holds another prescription (other data, recipe, budget, remedies or seed):"
                    " choose another `out`."
                )
            self.used = TypeAdapter(Seconds).validate_python(stored["used"], strict=True)
            self.costs = TypeAdapter(dict[str, Cost]).validate_python(stored["costs"])
            if stored["candidates"] is not None:
                self.left_out = stored["left_out"]  # until there is a plan, what could not be tried is tried again
                self.reasons = TypeAdapter(list[Reason]).validate_python(stored["reasons"])
                self.candidates = [Arm.read(changes) for changes in stored["candidates"]]
            self.plan = TypeAdapter(list[Stage]).validate_python(stored["plan"])
            self.decided = [
                DecidedStage(
                    TypeAdapter(Stage).validate_python(entry["stage"]),
                    tuple(Arm.read(changes) for changes in entry["arms"]),
                    TypeAdapter(dict[str, Steps]).validate_python(entry["steps"]),
                    TypeAdapter(list[int]).validate_python(entry["seeds"]),
                    TypeAdapter(Seconds).validate_python(entry["began"]),
                    TypeAdapter(Seconds | None).validate_python(entry["spent"]),
                )
                for entry in stored["decided"]
            ]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DamagedFileError(f"'{self.path}' is damaged; {_ADVICE}.") from error


class Costs:
    """The cost of a step of each arm: measured once, that of the plain recipe first, and kept in the ledger."""

    def __init__(self, recipe: Recipe, dataset: Dataset, ledger: Ledger) -> None:
        self.recipe, self.dataset, self.ledger = recipe, dataset, ledger
        self.device = pick_device(recipe.device)
        if self.measure(Arm()) is None:
            raise RecipeError(f"The recipe itself cannot be trained: {ledger.left_out[PLAIN]}")

    @property
    def plain(self) -> Cost:
        """The cost of the recipe as it was given."""
        return self.ledger.costs[PLAIN]

    def measure(self, arm: Arm) -> Cost | None:
        """Return the cost of an arm; None, with the reason in the ledger, if it does not apply to this network."""
        ledger = self.ledger
        if arm.name not in ledger.costs and arm.name not in ledger.left_out:
            try:
                ledger.costs[arm.name] = self._measure(arm.apply(self.recipe))
            except VitclinicError as error:
                ledger.left_out[arm.name] = str(error)
            except Exception as error:  # a treatment of somebody's own may raise anything, and the others go on
                log.info("%s cannot be tried", arm.name, exc_info=error)
                ledger.left_out[arm.name] = f"{type(error).__name__}: {error}"
            ledger.save()
        return ledger.costs.get(arm.name)

    def _measure(self, recipe: Recipe) -> Cost:
        """Return the cost of a recipe, at the speed that the machine had when the plain one was measured.

        It takes turns with the plain recipe, so that the ratio is right however busy the machine is by now.
        """
        with torch.random.fork_rng():
            if PLAIN not in self.ledger.costs:
                return measure_cost(recipe, self.dataset, ALONE, self.device)
            plain, changed = measure_costs([self.recipe, recipe], self.dataset, ALONE, self.device)
        speed = self.plain.step / plain.step
        smaller = [step * speed for step in changed.smaller]
        return Cost(changed.step * speed, changed.image * speed, changed.start, smaller)

    def count_own_steps(self) -> int:
        """Return the recipe's own length; with `max_time`, by the measured cost."""
        if self.recipe.max_time is None:
            return total_steps(self.recipe, self.dataset, ALONE, self.device)
        within = seconds(self.recipe.max_time)
        return max(1, self.plain.steps_within(within, self.recipe, image_counts(self.dataset)))

    def count_least_steps(self) -> int:
        """Return the length of the shortest trial that says something about an arm."""
        epoch = math.ceil(len(self.dataset.train) / self.recipe.batch_size)
        return min(self.count_own_steps(), max(LEAST_STEPS, min(epoch, ENOUGH_STEPS)))

    def keep_time(self, arm: Arm) -> Recipe:
        """Return the recipe of an arm at a length that takes the time of the plain recipe, by the measured costs.

        A length in time stays as it is. Epochs or steps stay where they take the same time, but for `SAME_TIME`.
        """
        changed, images, cost = arm.apply(self.recipe), image_counts(self.dataset), self.ledger.costs[arm.name]
        if changed.max_time is not None:
            return changed
        own = self.count_own_steps()
        whole = self.plain.seconds(own, self.recipe, images)
        unchanged = total_steps(changed, self.dataset, ALONE, self.device)
        if abs(cost.seconds(unchanged, changed, images) / whole - 1) <= SAME_TIME:
            return changed
        steps = max(1, cost.steps_within(whole, changed, images))
        epochs = float(f"{steps * changed.batch_size / images['train']:.3g}")
        length: dict[str, Any] = {"epochs": epochs} if changed.steps is None else {"steps": steps}
        share = Trials(self.recipe, own, images).warmup_share(changed)
        if not str(changed.schedule.warmup).endswith("%") and float(share[:-1]) > 0:
            length["schedule.warmup"] = share  # epochs or steps are those of the old length
        return build_recipe(changed, length)
