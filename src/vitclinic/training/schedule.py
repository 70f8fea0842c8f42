"""Durations of a training, and the learning rate as a function of the step."""

from __future__ import annotations

import math
import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from vitclinic._core.config import Settings

_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(steps?|epochs?|%)?")


def _check_duration(value: str | int | float) -> str | int | float:
    match = _PATTERN.fullmatch(str(value).strip())
    if match is None:
        raise ValueError("write a number of epochs, or a text such as '500 steps' or '5%'")
    if match[2] == "%" and float(match[1]) > 100:
        raise ValueError("a run has no more than 100%")
    return value


Duration = Annotated[str | int | float, AfterValidator(_check_duration)]
"""A stretch of training: `5` (epochs), `"5 epochs"`, `"500 steps"` or `"5%"` of the run."""


def is_share(duration: Duration) -> bool:
    """Tell whether a duration is a share of the run."""
    return str(duration).strip().endswith("%")


def in_steps(duration: Duration, steps_per_epoch: float, total_steps: int) -> float:
    """Convert a duration to a number of steps.

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


class ScheduleConfig(Settings):
    """`schedule` of a recipe."""

    main_key: ClassVar[str | None] = "name"

    name: Literal["cosine", "linear", "polynomial", "exponential", "constant"] = "cosine"
    warmup: Duration = Field("5%", description="linear rise from 0: epochs, 'n steps' or 'n%'")
    final: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="last learning rate, as a share of lr")
    power: Annotated[float, Field(gt=0)] = Field(0.9, description="polynomial only: (1 - progress) ** power")

    @model_validator(mode="after")
    def _exponential_has_an_end(self) -> ScheduleConfig:
        if self.name == "exponential" and not self.final:
            raise ValueError("an exponential schedule never reaches 0: set 'final' above 0, such as 0.01")
        if "power" in self.model_fields_set and self.name != "polynomial" and self.power != 0.9:
            raise ValueError("'power' is only for the polynomial schedule")
        return self


class Schedule:
    """The factor on the peak learning rate as a function of the step, counted from 0."""

    def __init__(self, config: ScheduleConfig, steps_per_epoch: float, total_steps: int) -> None:
        self.config = config
        self.total = total_steps
        self.warmup = min(in_steps(config.warmup, steps_per_epoch, total_steps), total_steps)

    def __call__(self, step: float) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        if self.config.name == "constant":
            return 1.0
        progress = (step - self.warmup) / max(1.0, self.total - self.warmup)
        if self.config.name == "exponential":
            return float(self.config.final**progress)
        if self.config.name == "cosine":
            fall = (1 + math.cos(math.pi * progress)) / 2
        else:
            fall = (1 - progress) ** (self.config.power if self.config.name == "polynomial" else 1)
        return self.config.final + (1 - self.config.final) * fall
