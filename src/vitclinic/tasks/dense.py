"""Base of the tasks that learn from annotated images: what does not fit them, and how their images are augmented."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, model_validator

from vitclinic.tasks.task import Task, refuse_parts

if TYPE_CHECKING:
    from torch import nn

    from vitclinic.data import Augment, Dataset, ImageSpec, TrainingStream
    from vitclinic.training.recipe import Recipe
    from vitclinic.treatments import Treatment

Factor = Annotated[float, Field(gt=0)]
_CLASSIFIES = ("mixup", "cutmix", "smoothing", "erasing")


class Dense(Task):
    """Base of tasks whose head reads a pyramid of the backbone, and whose annotations move with the image."""

    default_source: ClassVar[str] = "scenes"

    scale: Annotated[list[Factor], Field(min_length=2, max_length=2)] = Field(
        [0.75, 1.5], description="least and largest factor on training images before they are cropped"
    )
    colour: Annotated[float, Field(ge=0, le=2)] = Field(
        0.5, description="strength of changes of brightness, contrast, saturation and hue"
    )

    @model_validator(mode="after")
    def _scale_is_in_order(self) -> Dense:
        if self.scale[0] > self.scale[1]:
            raise ValueError(f"'scale' is the least and the largest factor (got {self.scale[0]}, {self.scale[1]})")
        return self

    def num_outputs(self, spec: ImageSpec) -> int:
        return 0

    def check(self, recipe: Recipe) -> None:
        """Refuse what makes class labels of images, and what changes their size."""
        refuse_parts(self, recipe, _CLASSIFIES)
        if recipe.data.augment.resolve().randaugment != "off":
            raise ValueError(
                f"the task {self.name} moves annotations with its images: set data.augment.randaugment=off"
            )
        if recipe.progressive_resizing.shares:
            raise ValueError(
                f"the task {self.name} needs its masks and boxes at full size: remove progressive_resizing"
            )

    def stream(self, dataset: Dataset, augment: Augment, seed: int, network: nn.Module) -> TrainingStream:
        from vitclinic.data import TrainingStream
        from vitclinic.data.annotations import AnnotatedView

        size, parts = self.frame(dataset.spec).img_size, augment.resolve()
        if parts.level == "none":
            return TrainingStream(dataset, augment, seed, annotated=AnnotatedView(size))
        scale = (self.scale[0], self.scale[1])
        return TrainingStream(
            dataset, augment, seed, annotated=AnnotatedView(size, scale, bool(parts.flip), self.colour)
        )

    def adapt(self, treatments: Sequence[Treatment], network: nn.Module, spec: ImageSpec) -> list[Treatment]:
        """Leave Context Broadcasting out of the blocks whose output the pyramid reads [hyeonwoo2023 4.4]."""
        return [
            self._leave_out_read(each, network, spec) if each.name == "context_broadcasting" else each
            for each in treatments
        ]

    def _leave_out_read(self, treatment: Treatment, network: nn.Module, spec: ImageSpec) -> Treatment:
        import torch

        from vitclinic._core.errors import TreatmentError
        from vitclinic.anatomy import Anatomy
        from vitclinic.models.pyramid import choose_units
        from vitclinic.treatments.placing import Layers, select_blocks

        noise = torch.rand(1, spec.in_chans, *spec.img_size, generator=torch.Generator().manual_seed(0))
        anatomy = Anatomy.of(network, noise.to(next(network.parameters())))
        read = {unit.block for unit in choose_units(anatomy)}
        scaled = getattr(treatment, "scaled", False)
        layers: Layers = getattr(treatment, "layers", None) or ("all" if scaled else "upper")
        chosen = {block.name for block in select_blocks(anatomy.blocks, layers, treatment.name)}
        kept = [number for number, block in enumerate(anatomy.blocks) if block.name in chosen - read]
        if not kept:
            raise TreatmentError(
                f"{treatment.name}: the output of every block that it would go into feeds the head of {self.name}, and"
                " it is left out of those; use a deeper network, or layers: all."
            )
        return treatment.model_copy(update={"layers": kept})
