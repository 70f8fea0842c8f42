"""Saliency: where on its image a class comes from, and whether such maps mean anything.

Shapes: n images, h x w the grid of a map, S steps, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic._core.errors import NoAttentionMapError
from vitclinic._core.images import Picture, beside
from vitclinic._core.records import Measurement, UnitRow
from vitclinic._core.registry import KeyScalars
from vitclinic.data import Batch
from vitclinic.data.randomness import generator
from vitclinic.probes.attention.maps import as_bytes
from vitclinic.probes.behaviour import saliency_maps
from vitclinic.probes.behaviour.behaviour_probe import BehaviourProbe, divide_images
from vitclinic.probes.behaviour.intervals import mean_over
from vitclinic.probes.behaviour.predictions import check_logits, predict
from vitclinic.probes.behaviour.saliency_maps import area_under, deletion_curve, insertion_curve, resize
from vitclinic.probes.guards import preserve_state
from vitclinic.probes.probe import Cheaper, DoesNotApply, Need, Result, check_finite, register, unit_row
from vitclinic.probes.subject import Subject

SHOWN = 8
"""Images of which pictures are kept."""


@register
class Saliency(BehaviourProbe):
    """Saliency maps of a class, with deletion and insertion scores beside those of shuffled maps (RISE).

    Maps by attention weighted with its gradient, by attention rollout, or by Grad-CAM. `gain` is (insertion - deletion)
    of the maps less that of the same maps with their cells shuffled: 0 if a map says no more than chance.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        >>> loader = [(torch.rand(4, 3, 32, 32), torch.arange(4))]
        >>> Saliency(method="rollout", steps=4)(model, loader).arrays["all_grid_maps"].shape
        (4, 2, 2)
    """

    name = "saliency"
    group = "Behaviour"
    rank = 205
    title = "Saliency"
    question = "Where on its image does a class come from, and do such maps mean anything?"
    paper = "Selvaraju et al. 2017; Abnar and Zuidema 2020; Chefer et al. 2021; Petsiuk et al. 2018 (RISE, Sec. 4)"
    key_scalars: ClassVar[KeyScalars] = {"gain": "higher", "insertion": "higher", "deletion": "lower"}
    needs: ClassVar[frozenset[Need]] = frozenset({"scores", "logits", "anatomy", "gradients"})
    cheaper: ClassVar[Cheaper] = ({"images": 16, "steps": 8, "draws": 1},)

    images: Annotated[int, Field(ge=1)] = Field(64, description="maximum number of images (stratified sample)")
    method: Literal["auto", "gradient_attention", "rollout", "grad_cam"] = Field(
        "auto",
        description="gradient_attention or rollout (global attention), grad_cam (any network), or the first that fits",
    )
    target: Literal["predicted", "label"] = Field("predicted", description="class to explain: predicted, or the label")
    unit: str | None = Field(None, description="unit whose output grad_cam reads; by default the last that matters")
    steps: Annotated[int, Field(ge=2)] = Field(16, description="steps in which pixels go and come")
    draws: Annotated[int, Field(ge=1)] = Field(2, description="shuffled maps per image to compare with")

    def check(self, subject: Subject) -> None:
        if subject.outputs == 1:
            raise DoesNotApply("the network has a single output, whose probability among classes is always 1.")
        if self.target == "label" and subject.outputs != len(subject.classes):
            raise DoesNotApply(
                f"the network has {subject.outputs} outputs and the data {len(subject.classes)} classes; use"
                " target=predicted."
            )

    def forwards(self, subject: Subject) -> float:
        return len(subject) * (4.0 + 2 * (1 + self.draws) * (self.steps + 1))

    def peak_memory(self, subject: Subject) -> float:
        images = next(subject.batches()).images
        with preserve_state(subject.network, subject.seed):
            fixed, _ = self._fix(subject)
            classes = self._classes(subject, next(subject.batches()))
            maps = subject.footprint.extrapolate(
                lambda some: fixed._find_maps(subject, some, classes[: len(some)]), images
            )
        return images.nbytes + max(maps, subject.footprint.forward(len(images)) + 3 * images.nbytes)

    def measure(self, subject: Subject) -> Result:
        fixed, first = self._fix(subject)
        height, width = first.maps.shape[1:]
        if height * width == 1:
            raise DoesNotApply("a map of a single position says nothing; choose another unit.")
        number, shown = len(subject), min(SHOWN, len(subject))
        maps = np.zeros((number, height, width))
        curves = np.zeros((number, 2, 1 + self.draws, self.steps + 1))
        images = np.zeros((shown, *subject.dataset.size, subject.dataset.channels), np.uint8)

        def measure_batch(batch: Batch) -> int:
            places = batch.indices.numpy()
            classes = self._classes(subject, batch)
            found = fixed._find_maps(subject, batch.images, classes).maps
            maps[places] = found.cpu().numpy()
            curves[places] = self._curves(subject, batch, classes, found)
            kept = places < shown
            images[places[kept]] = as_bytes(batch.images[kept]).reshape(kept.sum(), *images.shape[1:])
            return len(batch)

        divide_images(subject, self.name, number, subject.own_batches(), measure_batch, (maps, curves, images))
        rows = [] if first.unit is None else [unit_row(first.unit, gain=_scores(curves)["gain"])]
        return fixed._result(subject, maps, curves, images, rows)

    def _fix(self, subject: Subject) -> tuple[Saliency, saliency_maps.Found]:
        """Return the probe with method and unit settled by the first image, and the map of that image."""
        classes = self._classes(subject, next(subject.batches()))[:1]
        if self.method == "auto":
            fixed = self.model_copy(update={"method": "gradient_attention"})
            try:
                return fixed, fixed._find_maps(subject, subject.example, classes)
            except (DoesNotApply, NoAttentionMapError):
                return self.model_copy(update={"method": "grad_cam"})._fix(subject)
        found = self._find_maps(subject, subject.example, classes)
        return self if found.unit is None else self.model_copy(update={"unit": found.unit.name}), found

    def _classes(self, subject: Subject, batch: Batch) -> Tensor:
        return batch.targets if self.target == "label" else predict(subject, batch.images)

    def _find_maps(self, subject: Subject, images: Tensor, classes: Tensor) -> saliency_maps.Found:
        if self.method == "rollout":
            found = saliency_maps.roll_attention(subject, images)
        elif self.method == "gradient_attention":
            found = saliency_maps.roll_gradients(subject, images, classes)
        else:
            found = saliency_maps.weigh_features(subject, images, classes, self.unit)
        check_finite(found.maps.cpu(), found.unit or subject.anatomy.units[-1])
        return found

    @torch.no_grad()
    def _curves(self, subject: Subject, batch: Batch, classes: Tensor, maps: Tensor) -> NDArray[np.float64]:
        """Return insertion and deletion of each image, by its map and by shuffled ones, [B, 2, 1 + draws, S + 1]."""

        def probability(images: Tensor) -> Tensor:
            logits = check_logits(subject.logits(images), subject.name)
            return logits.double().softmax(1).gather(1, classes[:, None])[:, 0]

        found = []
        for draw in range(1 + self.draws):
            ordered = maps if draw == 0 else self._shuffle(maps, batch, subject.seed, draw)
            resized = resize(ordered, (batch.images.shape[2], batch.images.shape[3]))
            curves = (
                curve(probability, batch.images, resized, self.steps) for curve in (insertion_curve, deletion_curve)
            )
            found.append(torch.stack(list(curves), dim=1))
        together: NDArray[np.float64] = torch.stack(found, dim=2).cpu().numpy()
        return together

    def _shuffle(self, maps: Tensor, batch: Batch, seed: int, draw: int) -> Tensor:
        """Return the maps with their cells in a random order, which depends on image and draw, not on the batch."""
        cells = maps[0].numel()
        orders = [generator("saliency", seed, draw, int(index)).permutation(cells) for index in batch.indices]
        order = torch.from_numpy(np.stack(orders)).to(maps.device)
        return maps.flatten(1).gather(1, order).view_as(maps)

    def _result(
        self,
        subject: Subject,
        maps: NDArray[np.float64],
        curves: NDArray[np.float64],
        images: NDArray[np.uint8],
        rows: list[UnitRow],
    ) -> Result:
        means = curves.mean(0)  # [2, 1 + draws, S + 1]
        size = (int(subject.dataset.size[0]), int(subject.dataset.size[1]))
        everything = subject.on(subject.split).images.rows
        arrays: dict[str, NDArray[Any]] = {
            "method": np.array([self.method]),
            "maps": resize(torch.from_numpy(maps[: len(images)]), size).float().numpy(),
            "grid_maps": maps[: len(images)].astype(np.float32),
            "all_grid_maps": maps.astype(np.float32),
            "images": images[..., 0] if images.shape[-1] == 1 else images,
            "numbers": np.flatnonzero(np.isin(everything, subject.images.rows))[: len(images)],
            "insertion": means[0, 0],
            "deletion": means[1, 0],
            "shuffled_insertion": means[0, 1:].mean(0),
            "shuffled_deletion": means[1, 1:].mean(0),
        }
        return Result(_scores(curves), rows, arrays)

    def pictures(self, measurement: Measurement) -> Mapping[str, Picture]:
        """Return each image with its map beside it, by the image's index in the split."""
        arrays = measurement.arrays
        each = zip(arrays["numbers"], arrays["images"], arrays["maps"], strict=True)
        return {f"image-{number}": beside(image, saliency) for number, image, saliency in each}


def _scores(curves: NDArray[np.float64]) -> dict[str, Any]:
    """Return areas under the curves, and how much better the maps are than shuffled ones, with t intervals."""
    areas = area_under(torch.from_numpy(curves).flatten(0, 2)).numpy().reshape(curves.shape[:3])
    insertion, deletion = areas[:, 0], areas[:, 1]  # [n, 1 + draws]
    shuffled = insertion[:, 1:].mean(1), deletion[:, 1:].mean(1)
    gain = (insertion[:, 0] - deletion[:, 0]) - (shuffled[0] - shuffled[1])
    return {
        "gain": mean_over(gain),
        "insertion": mean_over(insertion[:, 0], 0, 1),
        "deletion": mean_over(deletion[:, 0], 0, 1),
        "shuffled_insertion": mean_over(shuffled[0], 0, 1),
        "shuffled_deletion": mean_over(shuffled[1], 0, 1),
        "confidence": mean_over(curves[:, 1, 0, 0], 0, 1),
    }
