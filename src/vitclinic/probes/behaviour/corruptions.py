"""Accuracy under the corruptions of CIFAR-10-C and ImageNet-C [Hendrycks & Dietterich 2019]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vitclinic._core.registry import KeyScalars
from vitclinic.data import Batch
from vitclinic.data.corruptions import FIFTEEN, NINETEEN, SEVERITIES, SMALLEST, Corruption
from vitclinic.data.corruptions.weather import texture_bytes
from vitclinic.probes.behaviour.behaviour_probe import BehaviourProbe
from vitclinic.probes.behaviour.intervals import mean_over, share_correct
from vitclinic.probes.behaviour.predictions import is_correct
from vitclinic.probes.guards import Partial
from vitclinic.probes.probe import Cheaper, DoesNotApply, Result, register
from vitclinic.probes.subject import Subject

SAVED_EVERY = 1.0
"""Seconds of work that a killed exam may lose at most."""

SHOWN = 3
"""Severity of the samples shown in reports."""
SAMPLE_SIDE = 64
"""Maximum length of a sample's longer side in pixels."""

_UNKNOWN = -1
_WORKING = 3
"""Copies of a batch that its corruption holds, at 224 pixels a side."""

Seen = tuple[NDArray[np.int64], NDArray[np.int8]]
"""Indices of images, and their columns of `CorruptionOutcomes.correct`."""


class CorruptionOutcomes:
    """Correctness of each image, clean (row 0) and under each corruption and severity."""

    def __init__(self, names: Sequence[str], images: int) -> None:
        self.cells: list[tuple[str, int] | None] = [None, *((name, s) for name in names for s in SEVERITIES)]
        self.correct: NDArray[np.int8] = np.full((len(self.cells), images), _UNKNOWN, np.int8)

    @property
    def num_known(self) -> int:
        return int((self.correct != _UNKNOWN).sum())

    @property
    def by_corruption(self) -> NDArray[np.int8]:
        """Correctness as [corruptions, severities, images]."""
        return self.correct[1:].reshape(-1, len(SEVERITIES), self.correct.shape[1])

    def take(self, arrays: dict[str, NDArray[np.int8]] | None) -> None:
        """Resume from the arrays of an earlier attempt."""
        if arrays is not None and arrays["correct"].shape == self.correct.shape:
            self.correct[...] = arrays["correct"]


@register
class Corruptions(BehaviourProbe):
    """Accuracy under 15 or 19 corruptions at 5 severities [park2022 Fig. 12b; chen2022 Table 2].

    The accuracy is averaged over corruptions and severities, and is not relative to another network (no mCE). Pixels in
    [0, 1] are corrupted, with random numbers of their own for each image. The corruptions are those of CIFAR-10-C and
    ImageNet-C [Hendrycks & Dietterich 2019].
    """

    name = "corruptions"
    group = "Behaviour"
    rank = 170
    title = "Corrupted images"
    question = "How much accuracy is lost to noise, blur, weather and compression?"
    paper = "Park and Kim 2022, Fig. 12b (P11); Hendrycks and Dietterich 2019"
    key_scalars: ClassVar[KeyScalars] = {"accuracy": "higher", "drop": "lower"}
    revision: ClassVar[int] = 3  # intervals have a width
    cheaper: ClassVar[Cheaper] = ({"images": 100}, {"images": 300})

    kinds: Literal[15, 19] = Field(15, description="15 (the benchmark) or 19 (with the four for validation)")
    images: Annotated[int, Field(ge=1)] = Field(1000, description="maximum number of images (stratified sample)")

    @property
    def corruptions(self) -> tuple[str, ...]:
        return FIFTEEN if self.kinds == 15 else NINETEEN

    def forwards(self, subject: Subject) -> float:
        return float(len(subject) * (1 + self.kinds * len(SEVERITIES)))

    def peak_memory(self, subject: Subject) -> float:
        size = min(subject.batch_size, len(subject))
        batch = size * subject.footprint.image
        return batch + max(subject.footprint.forward(size) + batch, texture_bytes() + _WORKING * batch)

    def check(self, subject: Subject) -> None:
        if min(subject.dataset.size) < SMALLEST:
            side = " x ".join(map(str, subject.dataset.size))
            raise DoesNotApply(f"corruptions need images of at least {SMALLEST} pixels a side, and these are {side}.")

    def measure(self, subject: Subject) -> Result:
        outcomes = CorruptionOutcomes(self.corruptions, len(subject))
        identity = f"{self.kinds} {subject.seed} {subject.data_digest}"
        partial = Partial(subject.scratch.get(self.name), identity, subject.distributed)
        outcomes.take(partial.read())
        unseen = np.flatnonzero((outcomes.correct == _UNKNOWN).any(0))
        batches = -(-len(unseen) // subject.batch_size)
        try:
            for found in subject.distributed.rounds(batches, self._own(subject, unseen, outcomes, partial)):
                for places, correct in found:
                    outcomes.correct[:, places] = correct
                partial.write({"correct": outcomes.correct}, every=SAVED_EVERY)
        finally:
            partial.write({"correct": outcomes.correct})
        samples = self._samples(subject)
        result = self._result(outcomes)
        return replace(result, arrays={**result.arrays, "samples": samples})

    def _samples(self, subject: Subject) -> NDArray[np.uint8]:
        """Return the first image, clean and under each corruption, [1 + corruptions, H, W(, C)], as thumbnails."""
        batch = next(subject.batches())
        image, row = batch.images[:1], subject.images.rows[batch.indices.numpy()[:1]]
        shown = [Corruption(name, SHOWN, seed=subject.seed)(image, row) for name in self.corruptions]
        return _small(torch.cat([image, *shown]))

    def _own(
        self, subject: Subject, unseen: NDArray[np.int64], outcomes: CorruptionOutcomes, partial: Partial
    ) -> Iterator[Seen]:
        """Yield the outcomes of this process's batches, every n-th of those that are not finished."""
        size, distributed = subject.batch_size, subject.distributed
        mine = unseen[np.arange(len(unseen)) // size % distributed.size == distributed.rank]
        if not len(mine):
            return
        for batch in subject.select(mine.tolist()).batches():
            places = mine[batch.indices.numpy()]
            self._measure_batch(subject, batch, places, outcomes, partial)
            yield places, outcomes.correct[:, places]

    @torch.no_grad()
    def _measure_batch(
        self, subject: Subject, batch: Batch, places: NDArray[np.int64], outcomes: CorruptionOutcomes, partial: Partial
    ) -> None:
        """Measure all corruptions of one batch, so that its images are read only once."""
        rows = subject.images.rows[places]  # the number of an image in its file, whatever the limit
        for cell, row in zip(outcomes.cells, outcomes.correct, strict=True):
            if (row[places] != _UNKNOWN).all():
                continue
            images = batch.images if cell is None else Corruption(*cell, seed=subject.seed)(batch.images, rows)
            row[places] = is_correct(subject, images, batch.targets)
            partial.write({"correct": outcomes.correct}, every=SAVED_EVERY)
            subject.progress(self.name, outcomes.num_known, outcomes.correct.size)

    def _result(self, outcomes: CorruptionOutcomes) -> Result:
        clean, corrupted = outcomes.correct[0], outcomes.by_corruption
        share = corrupted.mean((0, 1), dtype=np.float64)
        scalars = {
            "accuracy": mean_over(share, 0.0, 1.0),
            "clean_accuracy": share_correct(clean > 0),
            "drop": mean_over(clean - share, -1.0, 1.0),
        }
        for name, by_severity in zip(self.corruptions, corrupted, strict=True):
            scalars[f"accuracy_{name}"] = mean_over(by_severity.mean(0, dtype=np.float64), 0.0, 1.0)
        cells = [[share_correct(row > 0) for row in by_severity] for by_severity in corrupted]
        table = {key: np.array([[getattr(cell, field) for cell in row] for row in cells]) for key, field in _FIELDS}
        return Result(scalars, arrays={"severity": np.array(SEVERITIES), **table})


_FIELDS = (("accuracy", "value"), ("low", "low"), ("high", "high"))


def _small(images_nchw: Tensor) -> NDArray[np.uint8]:
    """Convert pixels in [0, 1] to thumbnails in bytes, [n, H, W, C], or [n, H, W] for one channel."""
    images = images_nchw.detach().float().cpu()
    factor = SAMPLE_SIDE / max(images.shape[-2:])
    if factor < 1:
        size = [max(1, round(side * factor)) for side in images.shape[-2:]]
        images = F.interpolate(images, size=size, mode="bilinear", antialias=True, align_corners=False)
    pixels: NDArray[np.uint8] = images.clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).numpy()
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels
