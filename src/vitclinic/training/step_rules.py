"""The step rules of a run: the treatments' own from a share of the run on, and the one before."""

from __future__ import annotations

from collections.abc import Sequence

from vitclinic.training.passes import choose_early_rule, choose_step_rule
from vitclinic.training.replanning import Course
from vitclinic.treatments import MixedSteps, StepRule, Treatment


class StepRules:
    """The rule that makes each step of a run, by its place in the run.

    Args:
        treatments: The treatments of the recipe.
    """

    def __init__(self, treatments: Sequence[Treatment]) -> None:
        self.own = choose_step_rule(treatments)
        self.early = choose_early_rule(treatments)
        self.start = max((t.step_rule_start() for t in treatments if t.step_rule() is not None), default=0.0)
        """Share of the run from which on the treatments' own rule is due."""

    def are_late(self, course: Course, step: int) -> bool:
        """Tell whether the treatments' own rule is due at a step."""
        return course(step) >= self.start * course.planned - 1e-9

    def due(self, course: Course, step: int) -> StepRule:
        """Return the rule of a step."""
        return self.own if self.are_late(course, step) else self.early

    def kinds(self) -> list[tuple[float, StepRule]]:
        """Return the kinds of steps that differ in cost: the share of the run's steps, and a rule that makes such."""
        late = self.own.kinds() if isinstance(self.own, MixedSteps) else [(1.0, self.own)]
        parts = [(self.start, self.early), *((share * (1 - self.start), rule) for share, rule in late)]
        return [(share, rule) for share, rule in parts if share > 0]
