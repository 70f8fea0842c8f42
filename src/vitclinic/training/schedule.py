"""How long things last, and the learning rate over time."""

from __future__ import annotations

import math
import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from vitclinic.config import Config

_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(steps?|epochs?|%)?")


def _checked(value: str | int | float) -> str | int | float:
    match = _PATTERN.fullmatch(str(value).strip())
    if match is None:
        raise ValueError("write a number of epochs, or such as '500 steps' or '5%'")
    return value


Duration = Annotated[str | int | float, AfterValidator(_checked)]
"""A stretch of training: `5` (epochs), `"5 epochs"`, `"500 steps"` or `"5%"` of the run."""


def in_steps(duration: Duration, steps_per_epoch: float, total_steps: int) -> float:
    """A duration as a number of steps.

    Example:
        >>> in_steps(2, 10, 100), in_steps("30 steps", 10, 100), in_steps("5%", 10, 100)
        (20.0, 30.0, 5.0)
    """
    match = _PATTERN.fullmatch(str(duration).strip())
    assert match is not None  # `Duration` was validated
    amount, unit = float(match[1]), match[2] or "epochs"
    if unit == "%":
        return amount / 100 * total_steps
    return amount if unit.startswith("step") else amount * steps_per_epoch


class ScheduleConfig(Config):
    """`schedule` of a recipe."""

    main_key: ClassVar[str | None] = "name"

    name: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Duration = Field("5%", description="linear rise from 0: epochs, 'n steps' or 'n%'")
    final: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="last learning rate, as a share of lr")


class Schedule:
    """The factor on the learning rate at each step, numbered from 0."""

    def __init__(self, config: ScheduleConfig, steps_per_epoch: float, total_steps: int) -> None:
        self.config = config
        self.total = total_steps
        self.warmup = min(in_steps(config.warmup, steps_per_epoch, total_steps), total_steps)

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        if self.config.name == "constant":
            return 1.0
        progress = (step - self.warmup) / max(1.0, self.total - self.warmup)
        fall = (1 + math.cos(math.pi * progress)) / 2 if self.config.name == "cosine" else 1 - progress
        return self.config.final + (1 - self.config.final) * fall
