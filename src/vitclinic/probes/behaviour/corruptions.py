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

from vitclinic._core.facts import KeyScalars
from vitclinic.data import Batch
from vitclinic.data.corruptions import FIFTEEN, NINETEEN, SEVERITIES, SMALLEST, Corruption
from vitclinic.probes.behaviour.behaviour import BehaviourProbe, is_correct
from vitclinic.probes.estimates import accuracy, mean_over
from vitclinic.probes.partial import Partial
from vitclinic.probes.probe import Cheaper, DoesNotApply, Result, register
from vitclinic.probes.subject import Subject

SAVED_EVERY = 1.0
"""Seconds of work that a killed exam may lose."""

SHOWN = 3
"""The severity of the samples, which show what was done to the images."""
SAMPLE_SIDE = 64
"""Pixels of a sample's longer side, at most."""

_UNKNOWN = -1

Seen = tuple[NDArray[np.int64], NDArray[np.int8]]
"""Places of images, and a column of `Outcomes.correct` for each."""


class Outcomes:
    """Whether each image was recognised under each corruption and severity, and as it is: row 0."""

    def __init__(self, names: Sequence[str], images: int) -> None:
        self.cells: list[tuple[str, int] | None] = [None, *((name, s) for name in names for s in SEVERITIES)]
        self.correct: NDArray[np.int8] = np.full((len(self.cells), images), _UNKNOWN, np.int8)

    @property
    def num_known(self) -> int:
        return int((self.correct != _UNKNOWN).sum())

    @property
    def by_corruption(self) -> NDArray[np.int8]:
        """[corruptions, severities, images]."""
        return self.correct[1:].reshape(-1, len(SEVERITIES), self.correct.shape[1])

    def take(self, arrays: dict[str, NDArray[np.int8]] | None) -> None:
        """Go on from what was kept before."""
        if arrays is not None and arrays["correct"].shape == self.correct.shape:
            self.correct[...] = arrays["correct"]


@register
class Corruptions(BehaviourProbe):
    """Accuracy under 15 or 19 corruptions at 5 severities [park2022 Fig. 12b; chen2022 Table 2].

    The mean over corruptions and severities of the accuracy, not relative to another network (no mCE). Images are
    corrupted in [0, 1], each by its own random numbers.
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

    kinds: Literal[15, 19] = Field(15, description="the 15 of the benchmark, or with the 4 kept for validation")
    images: Annotated[int, Field(ge=1)] = Field(1000, description="at most so many images, stratified")

    @property
    def corruptions(self) -> tuple[str, ...]:
        return FIFTEEN if self.kinds == 15 else NINETEEN

    def forwards(self, subject: Subject) -> float:
        return float(len(subject) * (1 + self.kinds * len(SEVERITIES)))

    def check(self, subject: Subject) -> None:
        if min(subject.dataset.size) < SMALLEST:
            side = " x ".join(map(str, subject.dataset.size))
            raise DoesNotApply(f"corruptions are defined from {SMALLEST} pixels a side, and the images are {side}.")

    def measure(self, subject: Subject) -> Result:
        outcomes = Outcomes(self.corruptions, len(subject))
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
        """The first image as it is and under each corruption, [1 + corruptions, H, W(, C)], made small."""
        batch = next(subject.batches())
        image, row = batch.images[:1], subject.images.rows[batch.indices.numpy()[:1]]
        shown = [Corruption(name, SHOWN, seed=subject.seed)(image, row) for name in self.corruptions]
        return _small(torch.cat([image, *shown]))

    def _own(self, subject: Subject, unseen: NDArray[np.int64], outcomes: Outcomes, partial: Partial) -> Iterator[Seen]:
        """What becomes of this process's batches, every n-th of the images that are not known under all corruptions."""
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
        self, subject: Subject, batch: Batch, places: NDArray[np.int64], outcomes: Outcomes, partial: Partial
    ) -> None:
        """All corruptions of one batch: its images are read once."""
        rows = subject.images.rows[places]  # an image's own number, whatever the limit
        for cell, row in zip(outcomes.cells, outcomes.correct, strict=True):
            if (row[places] != _UNKNOWN).all():
                continue
            images = batch.images if cell is None else Corruption(*cell, seed=subject.seed)(batch.images, rows)
            row[places] = is_correct(subject, images, batch.targets)
            partial.write({"correct": outcomes.correct}, every=SAVED_EVERY)
            subject.progress(self.name, outcomes.num_known, outcomes.correct.size)

    def _result(self, outcomes: Outcomes) -> Result:
        clean, corrupted = outcomes.correct[0], outcomes.by_corruption
        share = corrupted.mean((0, 1), dtype=np.float64)
        scalars = {
            "accuracy": mean_over(share, 0.0, 1.0),
            "clean_accuracy": accuracy(clean > 0),
            "drop": mean_over(clean - share, -1.0, 1.0),
        }
        for name, by_severity in zip(self.corruptions, corrupted, strict=True):
            scalars[f"accuracy_{name}"] = mean_over(by_severity.mean(0, dtype=np.float64), 0.0, 1.0)
        cells = [[accuracy(row > 0) for row in by_severity] for by_severity in corrupted]
        table = {key: np.array([[getattr(cell, field) for cell in row] for row in cells]) for key, field in _FIELDS}
        return Result(scalars, arrays={"severity": np.array(SEVERITIES), **table})


_FIELDS = (("accuracy", "value"), ("low", "low"), ("high", "high"))


def _small(images_nchw: Tensor) -> NDArray[np.uint8]:
    """Pixels in [0, 1] as bytes, [n, H, W, C] or [n, H, W] of one channel, the longer side at most `SAMPLE_SIDE`."""
    images = images_nchw.detach().float().cpu()
    factor = SAMPLE_SIDE / max(images.shape[-2:])
    if factor < 1:
        size = [max(1, round(side * factor)) for side in images.shape[-2:]]
        images = F.interpolate(images, size=size, mode="bilinear", antialias=True, align_corners=False)
    pixels: NDArray[np.uint8] = images.clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).numpy()
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels
