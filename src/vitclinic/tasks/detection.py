"""Detection and instance masks with Mask R-CNN [hyeonwoo2023 Table 7; He et al., ICCV 2017].

torch is imported inside the functions: a typo in a recipe should not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from vitclinic._core.errors import DataError
from vitclinic.tasks.dense import Dense
from vitclinic.tasks.task import BATCH_SIZE, Metric, Score, register

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitclinic._core.distributed import Distributed
    from vitclinic.data import Batch, Dataset, ImageSpec
    from vitclinic.tasks.criterion import Criterion
    from vitclinic.treatments import Losses

_EVALUATED = 16
"""Images of a batch at validation, at most: each may have a hundred masks."""


@register
class Detection(Dense):
    """Find objects with boxes and, unless `masks` is false, their pixels: Mask R-CNN on the backbone's pyramid.

    Scores have COCO's `ap`, `ap50` and `ap75` of boxes, `mask_ap`, `mask_ap50` and `mask_ap75` of masks, `miss` (1 -
    ap), `class_ap`, the AP of the boxes of each class (null for one without objects), `objects`, the number of objects
    to be found, and `count`.

    Attributes:
        masks: Predict masks, too.
        width: Channels of the feature pyramid.
        anchors: Side of an anchor in pixels of its level.
        samples: Regions of an image that are trained on.
        proposals: Regions of an image that the second stage looks at.
    """

    name = "detection"
    title = "detection"
    paper = "hyeonwoo2023 Sec. 4.4, Table 7"
    metrics = (
        Metric("ap", share=True),
        Metric("ap50", share=True),
        Metric("ap75", share=True, headline=False),
        Metric("mask_ap", share=True, headline=False),
        Metric("mask_ap50", share=True, headline=False),
        Metric("mask_ap75", share=True, headline=False),
    )
    selects = "ap"
    loss_metric = "miss"
    target = "objects"

    masks: bool = Field(True, description="predict the pixels of objects, too")
    width: Annotated[int, Field(ge=8)] = Field(256, description="channels of the feature pyramid")
    anchors: Annotated[float, Field(gt=0)] | None = Field(
        None, description="side of an anchor in pixels of its level; 8, or less for images below 256 pixels"
    )
    samples: Annotated[int, Field(ge=4)] = Field(512, description="regions of an image that are trained on")
    proposals: Annotated[int, Field(ge=4)] = Field(1000, description="regions that the second stage looks at")

    def attach(self, backbone: nn.Module, spec: ImageSpec) -> nn.Module:
        from vitclinic.models.detector import Detector, DetectorOptions

        options = DetectorOptions(self.masks, self.width, self.anchors, self.samples, self.proposals)
        return Detector(backbone, spec, options)

    def criterion(self, network: nn.Module, spec: ImageSpec) -> Criterion:
        from vitclinic.tasks.detection_losses import DetectionCriterion

        return DetectionCriterion()

    def losses(self, outputs: Any, batch: Batch) -> Losses:
        raise TypeError("the losses of detection are those of its criterion")

    def measure(self, outputs: Any, batch: Batch) -> Tensor:
        raise TypeError("average precision is not a sum over images: see evaluate")

    def summarize(self, sums: list[float]) -> Score:
        raise TypeError("average precision is not a sum over images: see evaluate")

    def evaluate(
        self, network: nn.Module, dataset: Dataset, split: str, distributed: Distributed, batch_size: int = BATCH_SIZE
    ) -> Score:
        from vitclinic._core.detection import Detections, name_precision, summarize_precision
        from vitclinic.tasks.detection_losses import match_split

        kinds = ("boxes", "masks") if self.masks else ("boxes",)
        own = distributed.gather(
            lambda: list(match_split(network, dataset, split, distributed, min(batch_size, _EVALUATED), kinds))
        )
        images = [image for part in own for image in part]
        score: Score = {}
        of_classes: dict[str, float | None] = {}
        for kind, prefix in zip(kinds, ("", "mask_"), strict=False):
            found = Detections([image[kind] for image in images], len(dataset.classes))
            if not found.objects.sum():
                raise DataError(
                    f"The {split} images of '{dataset.name}' show no objects: AP is not defined without any."
                )
            precision = found.average_precision()
            numbers = summarize_precision(precision)
            of_classes = of_classes or name_precision(precision, dataset.classes)
            score |= {f"{prefix}{name}": number for name, number in zip(("ap", "ap50", "ap75"), numbers, strict=True)}
            score["objects"] = int(found.objects.sum())
        return {**score, "miss": 1 - score["ap"], "class_ap": of_classes, "count": len(images)}
