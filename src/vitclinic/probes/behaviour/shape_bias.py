"""Shape bias: decisions by shape or by texture [Geirhos et al. 2019], on cue conflicts of the `shapes` data set."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from vitclinic._core.registry import KeyScalars
from vitclinic.data import shapes
from vitclinic.data.augment import to_unit_interval
from vitclinic.data.decoding import decode_and_fit
from vitclinic.probes.behaviour.behaviour_probe import divide_images
from vitclinic.probes.behaviour.intervals import share
from vitclinic.probes.behaviour.predictions import predict
from vitclinic.probes.probe import Cheaper, DoesNotApply, Need, OwningProbe, Result, register
from vitclinic.probes.subject import Subject


@register
class ShapeBias(OwningProbe):
    """Share of decisions by shape when shape and texture disagree, for networks trained on `shapes` [Geirhos 2019].

    Each image has the shape of one class and the texture of another. shape_bias = shape decisions / (shape + texture
    decisions); decisions for a third class do not count.
    """

    name = "shape_bias"
    group = "Behaviour"
    rank = 210
    title = "Shape or texture"
    question = "Does it decide by shape or by texture where the two disagree?"
    paper = "Geirhos et al. 2019, Fig. 4; Park and Kim 2022, Sec. 3"
    key_scalars: ClassVar[KeyScalars] = {"shape_bias": "higher"}
    needs: ClassVar[frozenset[Need]] = frozenset({"labels"})
    by_default: ClassVar[bool] = False
    cheaper: ClassVar[Cheaper] = ({"images": 180}, {"images": 450})

    images: Annotated[int, Field(ge=1)] = Field(
        900, description="number of images; every 90 hold each pair of classes once"
    )

    def conditions(self, subject: Subject) -> dict[str, Any]:
        return {"shapes": shapes.VERSION}

    def forwards(self, subject: Subject) -> float:
        return float(self.images)

    def check(self, subject: Subject) -> None:
        if subject.classes != shapes.CLASSES:
            raise DoesNotApply("it needs a network trained on the `shapes` data set, and this one has other classes.")

    def measure(self, subject: Subject) -> Result:
        chosen, shape, texture = (np.zeros(self.images, np.int64) for _ in range(3))

        def measure_batch(rows: NDArray[np.int64]) -> int:
            images, shape[rows], texture[rows] = conflicts(subject, rows)
            found = predict(subject, images.to(subject.device, subject.dtype))
            chosen[rows] = found.cpu().numpy()
            return len(rows)

        mine = np.array_split(np.arange(self.images), subject.distributed.size)[subject.distributed.rank]
        batches = (mine[start : start + subject.batch_size] for start in range(0, len(mine), subject.batch_size))
        divide_images(subject, self.name, self.images, batches, measure_batch, (chosen, shape, texture))
        return _result(chosen, shape, texture)


def conflicts(subject: Subject, rows: NDArray[np.int64]) -> tuple[torch.Tensor, NDArray[np.int64], NDArray[np.int64]]:
    """Return images as the network takes them, the classes of their shapes, and those of their textures."""
    drawn = [shapes.cue_conflict(subject.seed, int(row)) for row in rows]
    size, channels = subject.dataset.size, subject.dataset.channels
    pixels = np.stack([decode_and_fit(Image.fromarray(image), channels, size) for image, _, _ in drawn])
    return to_unit_interval(pixels), np.array([s for _, s, _ in drawn]), np.array([t for _, _, t in drawn])


def count_decisions(
    predicted: NDArray[np.int64], shape: NDArray[np.int64], texture: NDArray[np.int64], classes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the number of predictions for the shape, and for the texture, by the class of the shape."""
    by_shape, by_texture = (np.bincount(shape[predicted == cue], minlength=classes) for cue in (shape, texture))
    return by_shape, by_texture


def _result(chosen: NDArray[np.int64], shape: NDArray[np.int64], texture: NDArray[np.int64]) -> Result:
    n, classes = len(shape), len(shapes.CLASSES)
    shape_decisions, texture_decisions = count_decisions(chosen, shape, texture, classes)
    scalars = {
        "shape_decisions": share(int(shape_decisions.sum()), n),
        "texture_decisions": share(int(texture_decisions.sum()), n),
    }
    decided = shape_decisions + texture_decisions
    if decided.any():
        scalars["shape_bias"] = share(int(shape_decisions.sum()), int(decided.sum()))
    for name, ours, both in zip(shapes.CLASSES, shape_decisions.tolist(), decided.tolist(), strict=True):
        if both:
            scalars[f"shape_bias_{name}"] = share(ours, both)
    images = np.bincount(shape, minlength=classes)
    arrays = {"images": images, "shape_decisions": shape_decisions, "texture_decisions": texture_decisions}
    reason = None if decided.any() else "no decision is for the shape or the texture, so there is no ratio."
    return Result(scalars, arrays=arrays).unless(reason)
