"""Losses and matches of detection: what its task computes with torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from vitclinic._core.detection import Matches, box_overlaps, mask_overlaps, match_objects
from vitclinic._core.distributed import Distributed
from vitclinic._core.errors import DataError, ModelError
from vitclinic.anatomy import eval_mode
from vitclinic.data import Batch, Dataset, evaluation_batches
from vitclinic.models import Normalized
from vitclinic.models.detector import Detector
from vitclinic.tasks.criterion import Criterion

if TYPE_CHECKING:
    from vitclinic.treatments import Losses


class DetectionCriterion(Criterion):
    """The losses of Mask R-CNN: objectness and proposals of the first stage, classes, boxes and masks of the second."""

    def forward(self, network: nn.Module, batch: Batch) -> tuple[Any, Losses]:
        assert isinstance(network, Normalized)
        assert isinstance(network.backbone, Detector)
        assert batch.annotations
        detector, objects = network.backbone, batch.annotations.objects
        if detector.regions.has_mask():
            if any("masks" not in each and len(each["labels"]) for each in objects):
                raise DataError("The objects of these images have boxes and no masks: write task.masks=false.")
            none = torch.zeros(0, *batch.images.shape[2:], dtype=torch.uint8, device=batch.images.device)
            objects = tuple({"masks": none, **each} for each in objects)  # data without any object says no masks
        maps = network(batch.images)
        size = (batch.images.shape[2], batch.images.shape[3])
        return maps, detector.compute_losses(maps, size, objects, batch.keys)


def match_split(
    network: nn.Module,
    dataset: Dataset,
    split: str,
    distributed: Distributed,
    batch_size: int,
    kinds: Sequence[str],
) -> Iterator[dict[str, Matches]]:
    """Yield the matches of this process's share of a split, image by image.

    Args:
        network: The network, which takes pixels in [0, 1].
        dataset: The data.
        split: `train`, `val` or `test`.
        distributed: The processes that divide the images.
        batch_size: Images per forward pass.
        kinds: What to match: `boxes`, `masks` or both.

    Raises:
        ModelError: A score is not finite.
    """
    parameter = next(network.parameters())
    with torch.no_grad(), eval_mode(network):
        for batch in evaluation_batches(dataset, split, batch_size, distributed.rank, distributed.size):
            moved = batch.to(parameter.device, parameter.dtype)
            assert moved.annotations is not None
            for found, objects in zip(network(moved.images), moved.annotations.objects, strict=True):
                yield {kind: match_image(found, objects, kind, len(dataset.classes)) for kind in kinds}


def match_image(found: dict[str, Tensor], objects: dict[str, Tensor], kind: str, classes: int) -> Matches:
    """Return the detections of an image matched to its objects, by the overlap of `boxes` or of `masks`."""
    crowd = objects["iscrowd"].cpu().numpy()
    if kind == "masks":
        overlaps = mask_overlaps(found["masks"].cpu().numpy(), objects["masks"].cpu().numpy().astype(bool), crowd)
    else:
        overlaps = box_overlaps(_numbers(found["boxes"]), _numbers(objects["boxes"]), crowd)
    labels, object_labels = (each["labels"].cpu().numpy().astype(np.int64) for each in (found, objects))
    scores = _numbers(found["scores"])
    if not np.isfinite(scores).all():
        raise ModelError("the scores of some detections are not finite (NaN or infinity).")
    return match_objects(overlaps, labels, scores, object_labels, crowd, classes)


def _numbers(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    return tensor.double().cpu().numpy()
