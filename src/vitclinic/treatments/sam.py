"""Sharpness-aware minimisation [chen2022 Eq. 1-2]: step with the gradient at w + eps, applied at w.

Every group of micro-batches that has its own eps takes two passes: at w, apart from the other gradients and never
synchronised (each process climbs on its own images: m-sharpness), and at w + eps, with the same dropout masks and
with BatchNorm's running statistics standing still. Only the second gradients are added up, synchronised, clipped and
stepped with. Weight decay is the optimizer's, at w.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from vitclinic._core.errors import TreatmentError
from vitclinic.data import Batch
from vitclinic.treatments.sam_core import Ascent, Group, OrthogonalPart, sharpness_aware_gradients
from vitclinic.treatments.treatment import InputAscent, Losses, LossesAndGradients, StepRule, Treatment, register

Part = tuple[Batch, float]
"""Images that are differentiated together, and their share of a micro-batch."""


@register
class SharpnessAware(Treatment):
    """`sam`: also adaptive (ASAM) and periodic (LookSAM)."""

    name: ClassVar[str] = "sam"
    paper: ClassVar[str] = "chen2022 Eq. 1-2, App. B, Table 11"
    changes: ClassVar[str] = (
        "the step: the gradient is taken at the worst weights within rho, and applied at the weights"
    )
    costs: ClassVar[str] = "two forward and backward passes a step (with every=k: 1 + 1/k), and a copy of the weights"

    rho: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.1, description="length of the ascent; 0 is the plain step"
    )
    adaptive: bool = Field(False, description="ASAM: the ascent is measured relative to each weight's size")
    eta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.01, description="what ASAM adds to a weight's size"
    )
    every: Annotated[int, Field(ge=1)] = Field(1, description="LookSAM: steps from one ascent to the next")
    alpha: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.7, description="LookSAM: weight of the reused part"
    )
    m: Annotated[int, Field(ge=1)] | None = Field(
        None, description="images an ascent; all of a process's micro-batch unless given"
    )
    ascent: Literal["micro_batch", "batch"] = Field(
        "micro_batch", description="with accumulation: an ascent for every micro-batch, or one for all of them"
    )

    @model_validator(mode="after")
    def _one_group_size(self) -> SharpnessAware:
        if self.m is not None and self.ascent == "batch":
            raise ValueError("'m' divides a batch into ascents and 'ascent: batch' makes it one: give one of them")
        return self

    @model_validator(mode="after")
    def _check_unused_options(self) -> SharpnessAware:
        fields = SharpnessAware.model_fields
        if self.eta != fields["eta"].default and not self.adaptive:
            raise ValueError("'eta' is ASAM's: give 'adaptive: true', too")
        if self.alpha != fields["alpha"].default and self.every == 1:
            raise ValueError("'alpha' is LookSAM's: give an 'every' above 1, too")
        return self

    def step_rule(self) -> StepRule | None:
        if self.rho == 0:
            return None
        reused = OrthogonalPart(self.every, self.alpha) if self.every > 1 else None
        return SharpnessAwareStep(
            Ascent(self.rho, self.adaptive, self.eta), reused, m=self.m, together=self.ascent == "batch"
        )

    def passes(self) -> float:
        return 1 + 1 / self.every if self.rho else 1.0


class SharpnessAwareStep:
    """The step rule. `together`: one ascent for all micro-batches of a step."""

    def __init__(
        self, ascent: Ascent, reused: OrthogonalPart | None = None, *, m: int | None = None, together: bool = False
    ) -> None:
        self.ascent, self.reused, self.m, self.together = ascent, reused, m, together
        self.inputs: InputAscent | None = None
        self.images = 0

    def take_input_ascent(self, inputs: InputAscent) -> None:
        """Let the images climb with the weights, by the same backward pass [chen2022 Eq. 5]."""
        if self.reused is not None:
            raise TreatmentError(
                "adversarial does not go with sam's every above 1: the steps in between have no first pass for its"
                " images to climb by. Set sam's every to 1."
            )
        self.inputs = inputs

    def __call__(self, batches: Sequence[Batch], losses_and_gradients: LossesAndGradients) -> Losses:
        parameters = losses_and_gradients.parameters
        if self.reused is not None and not self.reused.due(parameters):
            passes = [(losses_and_gradients(batch, sync=batch is batches[-1]), 1.0) for batch in batches]
            self.reused.reuse(parameters)
            return _mean(passes)
        parts = [(part, len(part) / len(batch)) for batch in batches for part in batch.split(self.m)]
        groups = [parts] if self.together else [[part] for part in parts]
        self.images = max(sum(len(part) for part, _ in group) for group in groups)
        losses = sharpness_aware_gradients(
            [self._two_passes(group, losses_and_gradients, last=group is groups[-1]) for group in groups],
            parameters,
            self.ascent,
            self.reused,
            module=losses_and_gradients.module,
            average=losses_and_gradients.average,
        )
        return _mean([found for of_group in losses for found in of_group])

    def _two_passes(
        self, group: list[Part], losses_and_gradients: LossesAndGradients, last: bool
    ) -> Group[list[tuple[Losses, float]]]:
        """Return the passes of one ascent; the last of all synchronises the processes."""
        started: list[Part] = []

        def first() -> list[tuple[Losses, float]]:
            started.extend((self.inputs.start(part) if self.inputs else part, share) for part, share in group)
            return [(losses_and_gradients(part, sync=False, weight=share), share) for part, share in started]

        def second(finite: bool) -> None:
            for (part, share), (climbed, _) in zip(group, started, strict=True):
                images = self.inputs.finish(part, climbed) if self.inputs else part
                # A first gradient that is not finite must skip the step in every process, and each of them waits
                # for the others in the last pass: so the pass is made, and makes the common gradient not finite.
                weight = share if finite else math.nan
                losses_and_gradients(images, sync=last and part is group[-1][0], weight=weight)
            started.clear()

        return Group(first, second)

    def state_dict(self) -> dict[str, Any]:
        """`images` records m as it was: the images of one ascent, which also depend on the number of processes."""
        return {"images": self.images, **({} if self.reused is None else self.reused.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.images = state["images"]
        if self.reused is not None:
            self.reused.load_state_dict(state)


def _mean(passes: Sequence[tuple[Losses, float]]) -> Losses:
    """The mean of each named loss, weighted by the images' shares."""
    total = sum(share for _, share in passes)
    return {name: torch.stack([p[name] * (s / total) for p, s in passes]).sum() for name in passes[0][0]}
