"""Semantic segmentation: the class of each pixel, by a head on the backbone's pyramid.

torch is imported inside the functions: a typo in a recipe should not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from vitclinic._core.errors import DataError
from vitclinic.tasks.dense import Dense
from vitclinic.tasks.task import BATCH_SIZE, Metric, Score, register

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from vitclinic._core.distributed import Distributed
    from vitclinic.data import Batch, Dataset, ImageSpec
    from vitclinic.training.recipe import Recipe
    from vitclinic.treatments import Losses

Side = Annotated[int, Field(ge=1)]


@register
class Segmentation(Dense):
    """The class of each pixel, by UPerNet or a linear head on the pyramid of any backbone with an anatomy.

    Scores have `miou`, the mean over classes of intersection over union, all images together, with its 95% interval
    over images (bootstrap), `iou` of each class (null for one that is nowhere), `pixel_accuracy`, `nll` and `count`.

    Attributes:
        head: `upernet` (segmentation-models-pytorch's decoder; extra `dense`), or `linear`.
        width: Channels of UPerNet and of the auxiliary head.
        auxiliary: Weight of the loss of an auxiliary head on the second coarsest map; 0 is none.
        norm: Norms of the head: `group`, which does not depend on the batch, or `batch`.
        crop: Size of the training crops and of the windows that val and test images are seen by; by default whole
            images.

    Example:
        >>> Segmentation(head="linear").scale
        [0.75, 1.5]
    """

    name = "segmentation"
    title = "semantic segmentation"
    paper = "hyeonwoo2023 4.3, Table 6; gong2021 5.2"
    metrics = (
        Metric("miou", share=True, interval=True),
        Metric("pixel_accuracy", share=True, headline=False),
        Metric("nll"),
    )
    selects = "miou"
    loss_metric = "nll"
    target = "mask"

    head: Literal["upernet", "linear"] = Field("upernet", description="upernet (the extra `dense`) or linear")
    width: Side = Field(256, description="channels of UPerNet and of the auxiliary head")
    auxiliary: Annotated[float, Field(ge=0)] = Field(0.4, description="weight of the auxiliary loss; 0 is none")
    norm: Literal["group", "batch"] = Field("group", description="norms of the head")
    crop: Side | Annotated[list[Side], Field(min_length=2, max_length=2)] | None = Field(
        None, description="size of training crops and evaluation windows; whole images unless given"
    )

    def check(self, recipe: Recipe) -> None:
        """Refuse a batch norm of one image, besides what all such tasks refuse."""
        super().check(recipe)
        if self.norm == "batch" and recipe.batch_size // recipe.accumulate < 2:
            raise ValueError("task.norm batch needs several images at a time: choose group, or a larger batch_size")

    def frame(self, spec: ImageSpec) -> ImageSpec:
        from dataclasses import replace

        if self.crop is None:
            return spec
        height, width = (self.crop, self.crop) if isinstance(self.crop, int) else self.crop
        return replace(spec, img_size=(height, width))

    def attach(self, backbone: nn.Module, spec: ImageSpec) -> nn.Module:
        from vitclinic.models.segmenter import Segmenter

        return Segmenter(backbone, spec, self.head, self.width, self.auxiliary > 0, self.norm)

    def losses(self, outputs: Tensor | dict[str, Tensor], batch: Batch) -> Losses:
        from vitclinic.models.segmenter import pixel_loss, read_masks

        if not isinstance(outputs, dict):
            return {"task": pixel_loss(outputs, read_masks(batch))}
        auxiliary = self.auxiliary * pixel_loss(outputs["aux"], read_masks(batch))
        return {"task": pixel_loss(outputs["out"], read_masks(batch)), "auxiliary": auxiliary}

    def measure(self, outputs: Tensor, batch: Batch) -> Tensor:
        raise TypeError("The metrics of segmentation cannot be averaged over images; use evaluate().")

    def summarize(self, sums: list[float]) -> Score:
        raise TypeError("The metrics of segmentation cannot be averaged over images; use evaluate().")

    def evaluate(
        self, network: nn.Module, dataset: Dataset, split: str, distributed: Distributed, batch_size: int = BATCH_SIZE
    ) -> Score:
        import numpy as np

        from vitclinic._core.segmentation import count_batch
        from vitclinic.models.segmenter import read_masks, score_pixels

        window, classes = self.frame(dataset.spec).img_size, len(dataset.classes)

        def own() -> list[tuple[NDArray[np.int64], float, int]]:
            scored = score_pixels(network, dataset, split, window, batch_size, distributed.rank, distributed.size)
            return [count_batch(scores, read_masks(batch), classes) for batch, scores in scored]

        parts = [part for of_process in distributed.gather(own) for part in of_process]
        counts = np.concatenate([part[0] for part in parts])
        if not counts[:, 2].sum():
            raise DataError(f"The {split} masks of '{dataset.name}' are void everywhere: there is no class to score.")
        nll = sum(part[1] for part in parts) / max(1, sum(part[2] for part in parts))
        return summarize_counts(counts, nll, dataset.classes)


def summarize_counts(counts: NDArray[np.int64], nll: float, classes: tuple[str, ...]) -> Score:
    """Return the score of a split from the counts of its images [n, 3, K]."""
    import numpy as np

    from vitclinic._core.segmentation import class_iou, mean_iou, mean_iou_interval

    low, high = mean_iou_interval(counts)
    both, _, true = counts.sum(0)
    iou = class_iou(counts.sum(0))
    return {
        "miou": float(mean_iou(counts.sum(0))),
        "miou_low": low,
        "miou_high": high,
        "iou": {name: None if np.isnan(value) else float(value) for name, value in zip(classes, iou, strict=True)},
        "pixel_accuracy": float(both.sum() / max(1, true.sum())),
        "nll": nll,
        "count": len(counts),
    }
