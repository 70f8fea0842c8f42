"""Average precision of boxes and masks, and the images in which most is missed or made up.

Shapes: n images, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic._core.detection import Detections, Matches, summarize_precision
from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic.anatomy import eval_mode
from vitclinic.models import Normalized
from vitclinic.models.detector import Detector
from vitclinic.probes.behaviour.outcomes import fit_thumbnail, show_pixels
from vitclinic.probes.probe import DoesNotApply, OwningProbe, Result, register
from vitclinic.probes.subject import Subject, find_headed
from vitclinic.tasks.detection_losses import match_image

SURE = 0.5
"""Score from which on a detection is shown, and counted where one image is judged."""
MOST_SHOWN = 20
"""Boxes of an image that are shown, at most."""
_NO_OBJECTS = "the network does not find objects; boxes are for runs of the task detection."
_DRAWS = 200
_NAMES = {"boxes": ("ap", "ap50", "ap75"), "masks": ("mask_ap", "mask_ap50", "mask_ap75")}


@dataclass(frozen=True)
class _Seen:
    """Objects found in an image, and those that are there."""

    matches: dict[str, Matches]
    """By `boxes` and `masks`."""
    found: dict[str, NDArray[Any]]
    """`boxes`, `labels` and `scores` of the detections that are sure."""
    objects: dict[str, NDArray[Any]]
    """`boxes` and `labels` of the objects."""
    quality: float
    """F1 of the sure detections at an overlap of 0.5: 2 right / (detections + objects); 1 if there is neither."""


@register
class DetectionPrecision(OwningProbe):
    """Average precision of boxes and masks as COCO counts it, and the worst images beside their boxes.

    `ap` is the mean over overlaps of 0.5, 0.55, ..., 0.95 and over classes that have objects. Intervals are bootstraps
    over images.
    """

    name = "detection"
    group = "Behaviour"
    rank = 55
    title = "Objects"
    question = "How well are objects found, and in which images is most missed or made up?"
    paper = "Lin et al. 2014; Hyeon-Woo et al. 2023, Table 7"
    key_scalars: ClassVar[KeyScalars] = {
        "ap": "higher",
        "ap50": "higher",
        "ap75": "higher",
        "mask_ap": "higher",
    }

    shown: Annotated[int, Field(ge=0)] = Field(36, description="maximum number of images that are kept to be shown")

    def check(self, subject: Subject) -> None:
        _find_detector(subject)

    def forwards(self, subject: Subject) -> float:
        return 4.0 * len(subject)  # the heads cost more than the backbone, by which a pass is timed

    def measure(self, subject: Subject) -> Result:
        seen = _look(subject)
        scalars: dict[str, Scalar] = {}
        arrays: dict[str, NDArray[Any]] = {"classes": np.array(subject.classes, dtype=np.str_)}
        for kind in seen[0].matches:
            names = _NAMES[kind]
            found = Detections([image.matches[kind] for image in seen], len(subject.classes))
            if not found.objects.sum():
                raise DoesNotApply("the images show no objects, and AP is not defined without any.")
            precision = found.average_precision()
            ends = np.nanquantile(found.bootstrap(_DRAWS, subject.seed), (0.025, 0.975), axis=0)
            for name, value, low, high in zip(names, summarize_precision(precision), *ends, strict=True):
                scalars[name] = Scalar(value=value, low=float(low), high=float(high), n=len(seen))
            arrays[f"class_{names[0]}"] = precision.mean(1)
            arrays[f"class_{names[1]}"] = precision[:, 0]
            arrays["class_objects"] = found.objects.sum(0)
        scalars["objects"] = Scalar(value=float(arrays["class_objects"].sum()))
        arrays["image_f1"] = np.array([image.quality for image in seen])
        return Result(scalars, arrays={**arrays, **self._show(subject, seen)})

    def _show(self, subject: Subject, seen: Sequence[_Seen]) -> dict[str, NDArray[Any]]:
        """Return the images of the lowest F1; boxes are in pixels of the thumbnails, after the row of their image."""
        worst = np.argsort([image.quality for image in seen], kind="stable")[: self.shown]
        factor, _ = fit_thumbnail(subject)
        kept = [seen[number] for number in worst]

        def join(parts: Sequence[dict[str, NDArray[Any]]], key: str, empty: tuple[int, ...]) -> NDArray[Any]:
            return np.concatenate([np.zeros(empty), *(part[key][:MOST_SHOWN] for part in parts)])

        arrays: dict[str, NDArray[Any]] = {}
        for name, parts in (("found", [one.found for one in kept]), ("truth", [one.objects for one in kept])):
            counts = [min(len(part["labels"]), MOST_SHOWN) for part in parts]
            arrays[f"shown_{name}_rows"] = np.repeat(np.arange(len(parts)), counts)
            arrays[f"shown_{name}_boxes"] = factor * join(parts, "boxes", (0, 4))
            arrays[f"shown_{name}_labels"] = join(parts, "labels", (0,)).astype(np.int64)
        arrays["shown_found_scores"] = join([one.found for one in kept], "scores", (0,))
        arrays["shown_f1"] = np.array([one.quality for one in kept])
        return {**show_pixels(subject, worst.astype(np.int64)), **arrays}


def _find_detector(subject: Subject) -> Normalized:
    return find_headed(subject, Detector, "objects", _NO_OBJECTS)


def _look(subject: Subject) -> list[_Seen]:
    """Return what is found in each image, matched to what is there."""
    network = _find_detector(subject)
    detector = network.backbone
    assert isinstance(detector, Detector)
    seen = []
    with torch.no_grad(), eval_mode(network):
        for batch in subject.batches():
            assert batch.annotations is not None
            for found, objects in zip(network(batch.images), batch.annotations.objects, strict=True):
                has_masks = detector.options.masks and "masks" in objects
                kinds = ("boxes", "masks") if has_masks else ("boxes",)
                seen.append(_judge(found, objects, kinds, len(subject.classes)))
            subject.progress(subject.name, int(batch.indices[-1]) + 1, len(subject))
    return seen


def _judge(found: dict[str, Tensor], objects: dict[str, Tensor], kinds: Sequence[str], classes: int) -> _Seen:
    matches = {kind: match_image(found, objects, kind, classes) for kind in kinds}
    sure = found["scores"] >= SURE
    boxes = matches["boxes"]
    counted = (boxes.scores >= SURE) & ~boxes.ignored[0]
    total = int(counted.sum()) + int(boxes.objects.sum())
    return _Seen(
        matches,
        {key: found[key][sure].double().cpu().numpy() for key in ("boxes", "labels", "scores")},
        {key: objects[key].double().cpu().numpy() for key in ("boxes", "labels")},
        2 * int((boxes.right[0] & counted).sum()) / total if total else 1.0,
    )
