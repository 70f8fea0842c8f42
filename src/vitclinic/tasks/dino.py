"""DINO: self-distillation without labels [Caron et al., ICCV 2021; wang2022 Table 2].

torch is imported inside the functions: a typo in a recipe should not wait for torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from vitclinic.tasks.representation import NearestNeighbours
from vitclinic.tasks.task import register

if TYPE_CHECKING:
    from torch import nn

    from vitclinic.data import Augment, Dataset, ImageSpec, TrainingStream
    from vitclinic.tasks.criterion import Criterion
    from vitclinic.training.recipe import Recipe

Share = Annotated[float, Field(ge=0, le=1)]
Range = Annotated[list[Share], Field(min_length=2, max_length=2)]
Temperature = Annotated[float, Field(gt=0)]
Width = Annotated[int, Field(ge=1)]

_JUDGED_FROM = 0.3
"""Share of a run after which the teacher's entropies must have left their values at the start."""


@register
class Dino(NearestNeighbours):
    """Features without labels: a student predicts the teacher, its moving average, from other crops of an image.

    Labels serve the metrics alone. The network to use is the teacher: checkpoints hold it, with the student beside it.
    Rows of training have `teacher_entropy` (mean entropy of its targets) and `mean_entropy` (entropy of their mean),
    both as shares of log K.

    Attributes:
        outputs: Number of prototypes K.
        hidden: Width of the projection head.
        bottleneck: Width before the prototypes.
        global_scale: Least and largest share of an image's area in the two global crops.
        local_crops: Number of local crops.
        local_scale: Least and largest share of the area in a local crop.
        local_size: Side of local crops, as a share of the images' side.
        student_temperature: The student's temperature.
        teacher_temperature: The teacher's temperature after its warm-up.
        warmup_temperature: The teacher's temperature at the start.
        temperature_warmup: Share of the run in which it rises.
        momentum: Momentum of the teacher at the start; it rises to 1 along a cosine.
        centring: How collapse is avoided: a moving `centre`, or `sinkhorn`.
        centre_momentum: Momentum of the centre.
        freeze_prototypes: Share of the run at the start in which the prototypes stay as they are.

    Example:
        >>> task = Dino(momentum=0.99, teacher_temperature=0.07)
        >>> round(task.momentum_at(0.5), 4), task.teacher_temperature_at(1.0)
        (0.995, 0.07)
    """

    name = "dino"
    title = "self-distillation (DINO)"
    paper = "wang2022 Table 2"
    learns_from: ClassVar[str] = "several crops of an image"

    outputs: Width = Field(1024, description="number of prototypes")
    hidden: Width = Field(512, description="width of the projection head")
    bottleneck: Width = Field(128, description="width before the prototypes")
    global_scale: Range = Field([0.4, 1.0], description="share of an image's area in the two global crops")
    local_crops: Annotated[int, Field(ge=0)] = Field(4, description="number of local crops")
    local_scale: Range = Field([0.1, 0.4], description="share of an image's area in a local crop")
    local_size: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="side of local crops, as a share of the images' side"
    )
    student_temperature: Temperature = Field(0.1, description="student temperature")
    teacher_temperature: Temperature = Field(0.04, description="teacher temperature after the warm-up")
    warmup_temperature: Temperature = Field(0.04, description="teacher temperature at the start")
    temperature_warmup: Share = Field(0.3, description="share of the run in which the teacher's temperature changes")
    momentum: Share = Field(0.996, description="momentum of the teacher at the start; it rises to 1 along a cosine")
    centring: Literal["centre", "sinkhorn"] = Field("centre", description="what keeps the outputs from collapsing")
    centre_momentum: Share = Field(0.9, description="momentum of the centre")
    freeze_prototypes: Share = Field(0.01, description="share of the run in which the prototypes are fixed")

    @model_validator(mode="after")
    def _ranges_are_in_order(self) -> Dino:
        for name in ("global_scale", "local_scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(
                    f"'{name}' is the least and the largest share of the area, above 0 (got {low}, {high})"
                )
        if self.centring == "sinkhorn" and self.centre_momentum != type(self).model_fields["centre_momentum"].default:
            raise ValueError("'centre_momentum' is only for 'centring: centre'")
        return self

    def check(self, recipe: Recipe) -> None:
        """Refuse averaged weights, which the teacher is, and augmentation beside the crops."""
        if recipe.ema is not None:
            raise ValueError("the task dino has a moving average of its own, the teacher: remove ema")
        super().check(recipe)
        crops = 2 * recipe.batch_size
        if self.centring == "sinkhorn" and self.outputs > crops:
            raise ValueError(
                f"task.centring sinkhorn shares the {crops} global crops of a step out evenly, which"
                f" {self.outputs} prototypes cannot have: set task.outputs to {crops} or fewer"
            )
        augment, plain = recipe.data.augment, type(recipe.data.augment)(level="light")
        kept = augment.model_copy(update={"flip": None}).resolve()
        other = [part for part, value in kept if value != getattr(plain.resolve(), part)]
        if other:
            raise ValueError(
                f"the task dino draws its own crops and colours: remove data.augment.{other[0]} (flip may be set)"
            )

    @property
    def varies_size(self) -> bool:
        return self.local_crops > 0 and self.local_size < 1

    def teacher_temperature_at(self, progress: float) -> float:
        """Return the teacher's temperature when this share of the run is done: linear, then constant."""
        done = min(1.0, progress / self.temperature_warmup) if self.temperature_warmup else 1.0
        return self.warmup_temperature + done * (self.teacher_temperature - self.warmup_temperature)

    def momentum_at(self, progress: float) -> float:
        """Return the teacher's momentum when this share of the run is done: a cosine from `momentum` to 1."""
        return 1 - (1 - self.momentum) * (1 + math.cos(math.pi * progress)) / 2

    def passes(self, spec: ImageSpec) -> float:
        return 2 * (1 + 1 / 3) + self.local_crops * self.local_size**2

    def stream(self, dataset: Dataset, augment: Augment, seed: int, network: nn.Module) -> TrainingStream:
        from vitclinic.data import TrainingStream
        from vitclinic.data.crops import Crop

        flips = bool(augment.resolve().flip)
        large = (self.global_scale[0], self.global_scale[1])
        local = Crop(
            self._local_size(dataset.size, network), (self.local_scale[0], self.local_scale[1]), flips, blur=0.5
        )
        views = [Crop(dataset.size, large, flips, blur=1.0), Crop(dataset.size, large, flips, blur=0.1, solarize=0.2)]
        return TrainingStream(dataset, augment, seed, [*views, *[local] * self.local_crops])

    def _local_size(self, full: tuple[int, int], network: nn.Module) -> tuple[int, int]:
        """Return the size of local crops: a multiple of the network's patch."""
        from vitclinic.models.input_sizes import nearest_size

        return nearest_size(full, self.local_size, network)

    def criterion(self, network: nn.Module, spec: ImageSpec) -> Criterion:
        from vitclinic.tasks.dino_criterion import DinoCriterion

        local = self._local_size(spec.img_size, network) if self.local_crops else None
        return DinoCriterion(self, network, spec, local)

    def find_failure(self, row: Mapping[str, Any], progress: float) -> str | None:
        if row["kind"] != "train":
            return super().find_failure(row, progress)
        if progress < _JUDGED_FROM:
            return None
        if row["teacher_entropy"] > 0.99:
            return (
                f"the teacher has collapsed to a uniform output (its entropy is {row['teacher_entropy']:.1%} of log K)"
            )
        if row["mean_entropy"] < 0.05:
            return (
                f"the teacher has collapsed to one output (its mean has {row['mean_entropy']:.1%} of the entropy log K)"
            )
        return None
