"""Sharpness-aware minimisation [chen2022 Eq. 1-2]: step with the gradient at w + eps, applied at w.

Every group of micro-batches with its own eps takes two passes: one at w, kept apart from the other gradients and not
synchronised (each process climbs on its own images: m-sharpness; processes that divide the weights climb together),
and one at w + eps, with the same dropout masks and with BatchNorm's running statistics frozen. Only the second
gradients are summed, synchronised, clipped and used for the step. Weight decay is left to the optimizer and acts at w.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from vitclinic._core.errors import TreatmentError
from vitclinic.data import Batch
from vitclinic.treatments.sam_core import Ascent, Group, OrthogonalPart, sharpness_aware_gradients
from vitclinic.treatments.treatment import InputAscent, Losses, LossesAndGradients, StepRule, Treatment, register

Part = tuple[Batch, float]
"""Images of one pass, and their share of a micro-batch."""


@register
class SharpnessAware(Treatment):
    """Sharpness-aware minimisation: step from w with the gradient at w + rho g / |g| [chen2022 Eq. 1-2].

    Attributes:
        rho: Length of the ascent; 0 is the plain step.
        adaptive: ASAM, which measures the ascent relative to the size of each weight [Kwon et al., ICML 2021].
        eta: Constant that ASAM adds to the size of a weight.
        every: LookSAM: steps from one ascent to the next [Liu et al., CVPR 2022].
        alpha: LookSAM: weight of the reused component.
        m: Images per ascent; all of a process's micro-batch unless given.
        ascent: One ascent per micro-batch, or one for the whole `batch`.
        start: Share of the run that is trained with plain steps before.
    """

    name: ClassVar[str] = "sam"
    paper: ClassVar[str] = "chen2022 Eq. 1-2, App. B, Table 11"
    changes: ClassVar[str] = (
        "the step: the gradient is taken at the worst weights within rho, and applied at the weights"
    )
    costs: ClassVar[str] = (
        "two forward and backward passes a step (1 + (1 - start) / every on average), and a copy of the weights"
    )

    rho: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.1, description="length of the ascent; 0 is the plain step"
    )
    adaptive: bool = Field(False, description="ASAM: the ascent is measured relative to each weight's size")
    eta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.01, description="ASAM: constant added to a weight's size"
    )
    every: Annotated[int, Field(ge=1)] = Field(1, description="LookSAM: steps from one ascent to the next")
    alpha: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.7, description="LookSAM: weight of the reused component"
    )
    m: Annotated[int, Field(ge=1)] | None = Field(
        None, description="images per ascent; all of a process's micro-batch unless given"
    )
    ascent: Literal["micro_batch", "batch"] = Field(
        "micro_batch", description="with accumulation: an ascent for every micro-batch, or one for all of them"
    )
    start: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of the run that is trained with plain steps before"
    )

    @model_validator(mode="after")
    def _one_group_size(self) -> SharpnessAware:
        if self.m is not None and self.ascent == "batch":
            raise ValueError(
                "'m' divides a batch into ascents, but 'ascent: batch' asks for a single one: remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _check_unused_options(self) -> SharpnessAware:
        fields = SharpnessAware.model_fields
        if self.eta != fields["eta"].default and not self.adaptive:
            raise ValueError("'eta' is only for ASAM: add 'adaptive: true'")
        if self.alpha != fields["alpha"].default and self.every == 1:
            raise ValueError("'alpha' is only for LookSAM: set 'every' above 1")
        return self

    def step_rule(self) -> StepRule | None:
        if self.rho == 0:
            return None
        reused = OrthogonalPart(self.every, self.alpha) if self.every > 1 else None
        return SharpnessAwareStep(
            Ascent(self.rho, self.adaptive, self.eta), reused, m=self.m, together=self.ascent == "batch"
        )

    def step_rule_start(self) -> float:
        return self.start

    def passes(self) -> float:
        return 1 + (1 - self.start) / self.every if self.rho else 1.0

    def pass_images(self, images: int) -> int:
        return min(images, self.m) if self.rho and self.m and self.every == 1 else images

    def ascent_images(self, images: int) -> int:
        return min(images, self.m) if self.rho and self.m else images

    def copies(self) -> float:
        """Return 1, for w while the weights are at w + eps; LookSAM also keeps the first gradient and its component."""
        if not self.rho:
            return 0.0
        return 1.0 if self.every == 1 else 3.0


class SharpnessAwareStep:
    """The step rule of SAM, for the training loop.

    Args:
        ascent: The climb from w to w + eps.
        reused: LookSAM's reused component, if any.
        m: Images per ascent.
        together: Use one ascent for all micro-batches of a step.
    """

    def __init__(
        self, ascent: Ascent, reused: OrthogonalPart | None = None, *, m: int | None = None, together: bool = False
    ) -> None:
        self.ascent, self.reused, self.m, self.together = ascent, reused, m, together
        self.inputs: InputAscent | None = None
        self.images = 0

    def take_input_ascent(self, inputs: InputAscent) -> None:
        """Perturb the images together with the weights, in the same backward pass [chen2022 Eq. 5]."""
        if self.reused is not None:
            raise TreatmentError(
                "adversarial cannot be combined with sam's every above 1: the steps in between have no first pass that"
                " could perturb the images. Set sam's every to 1."
            )
        self.inputs = inputs

    def kinds(self) -> list[tuple[float, StepRule]]:
        """Return steps with an ascent and, for LookSAM, those in between."""
        if self.reused is None:
            return [(1.0, self)]
        share, alpha = 1 / self.reused.every, self.reused.alpha
        always, once = copy.copy(self), copy.copy(self)
        always.reused, once.reused = OrthogonalPart(1, alpha), OrthogonalPart(sys.maxsize, alpha)
        return [(share, always), (1 - share, once)]

    def __call__(self, batches: Sequence[Batch], losses_and_gradients: LossesAndGradients) -> Losses:
        parameters = losses_and_gradients.parameters
        if self.reused is not None and not self.reused.due(parameters):
            passes = [(losses_and_gradients(batch, sync=batch is batches[-1]), 1.0) for batch in batches]
            self.reused.reuse(parameters)
            return _mean(passes)
        parts = [(part, len(part) / len(batch)) for batch in batches for part in batch.split(self.m)]
        groups = [parts] if self.together else [[part] for part in parts]
        self.images = max(sum(len(part) for part, _ in group) for group in groups) * losses_and_gradients.processes
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
        """Return the two passes of one ascent; the very last pass synchronises the processes."""
        started: list[Part] = []

        def first() -> list[tuple[Losses, float]]:
            started.extend((self.inputs.start(part) if self.inputs else part, share) for part, share in group)
            return [(losses_and_gradients(part, sync=False, weight=share), share) for part, share in started]

        def second(finite: bool) -> None:
            for (part, share), (climbed, _) in zip(group, started, strict=True):
                images = self.inputs.finish(part, climbed) if self.inputs else part
                # A first gradient that is not finite must skip the step in every process. They all wait for each other
                # in the last pass, so it still runs, and makes the common gradient not finite.
                weight = share if finite else math.nan
                losses_and_gradients(images, sync=last and part is group[-1][0], weight=weight)
            started.clear()

        return Group(first, second)

    def state_dict(self) -> dict[str, Any]:
        """Return LookSAM's state and `images`, the actual m, which also depends on the number of processes."""
        return {"images": self.images, **({} if self.reused is None else self.reused.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.images = state["images"]
        if self.reused is not None:
            self.reused.load_state_dict(state)


def _mean(passes: Sequence[tuple[Losses, float]]) -> Losses:
    """Return the mean of each named loss, weighted by the shares of the images."""
    total = sum(share for _, share in passes)
    return {name: torch.stack([p[name] * (s / total) for p, s in passes]).sum() for name in passes[0][0]}
