"""Ladders: arms that differ in one number of their recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, model_validator

from vitclinic._core.config import Config
from vitclinic.training import Recipe
from vitclinic.training.overrides import merge, nest


class Ladder(Config):
    """Arms that differ in one number of their recipe, to find the largest at which training still learns.

    Its rungs are arms `NAME, rung 1` and so on; expectations on a measure `learns` compare ladders by their names, by
    log2 of the largest value at which a run learned (one step below the first rung if none did).
    """

    changes: dict[str, Any] = Field(default_factory=dict, description="what all rungs change of the base")
    key: str = Field("optimizer.lr", description="the recipe's key that differs")
    values: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=2)] = Field(description="ascending")

    @model_validator(mode="after")
    def _ascends(self) -> Ladder:
        if sorted(set(self.values)) != self.values:
            raise ValueError("write the values of a ladder in ascending order")
        return self

    def arms(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the rungs as arms: (name, changes to the base)."""
        for number, value in enumerate(self.values, 1):
            yield f"{name}, rung {number}", merge(Recipe, self.changes, nest(self.key, value))
