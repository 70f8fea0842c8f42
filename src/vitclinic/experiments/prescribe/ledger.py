"""`plan.json`: what a prescription measured and decided, so that one that goes on keeps its numbers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vitclinic._core.errors import RunError
from vitclinic._core.io import write_json
from vitclinic.experiments.prescribe.arms import Arm
from vitclinic.experiments.prescribe.plan import Stage
from vitclinic.training.budget import Cost

SCHEMA = 1
FILE = "plan.json"


@dataclass(frozen=True)
class Decided:
    """A stage as it is run: its arms, how many steps each makes, and its seeds. Never changed again."""

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
        self.identity = dict(identity)
        self.costs: dict[str, Cost] = {}
        self.left_out: dict[str, str] = {}
        self.candidates: list[Arm] | None = None
        self.plan: list[Stage] = []
        self.decided: list[Decided] = []
        self.used = 0.0
        if self.path.is_file():
            self._read()
        self._since = time.monotonic()

    def save(self) -> None:
        """Write all of it, with the time used up to now."""
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
                "candidates": None if self.candidates is None else [arm.treatments for arm in self.candidates],
                "plan": [asdict(stage) for stage in self.plan],
                "decided": [
                    {
                        "stage": asdict(decided.stage),
                        "arms": [arm.treatments for arm in decided.arms],
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
        """Note how long a stage took, once."""
        self.save()
        decided = self.decided[number]
        if decided.spent is None:
            self.decided[number] = replace(decided, spent=self.used - decided.began)
            self.save()

    @property
    def slowness(self) -> float:
        """How many times longer than planned the ended stages took."""
        ended = [decided for decided in self.decided if decided.spent is not None]
        planned = sum(decided.stage.planned for decided in ended)
        return sum(decided.spent or 0.0 for decided in ended) / planned if planned else 1.0

    def _read(self) -> None:
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            other = stored["schema"] != SCHEMA or stored["identity"] != self.identity
            if other and not stored["decided"]:
                return  # nothing was tried, as with a budget that was too small: nothing is lost
            if other:
                raise RunError(
                    f"'{self.path.parent}' holds another prescription (other data, recipe, budget, treatments or seed);"
                    " give another --out."
                )
            self.used = stored["used"]
            self.costs = {name: Cost(**cost) for name, cost in stored["costs"].items()}
            if stored["candidates"] is not None:
                self.left_out = stored["left_out"]  # until there is a plan, what could not be tried is tried again
                self.candidates = [Arm(tuple(treatments)) for treatments in stored["candidates"]]
            self.plan = [Stage(**stage) for stage in stored["plan"]]
            self.decided = [
                Decided(
                    Stage(**entry["stage"]),
                    tuple(Arm(tuple(treatments)) for treatments in entry["arms"]),
                    entry["steps"],
                    entry["seeds"],
                    entry["began"],
                    entry["spent"],
                )
                for entry in stored["decided"]
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"'{self.path}' cannot be read ({error}); remove it or give another --out.") from error
