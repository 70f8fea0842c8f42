"""Slices: parts of the images, such as the darkest quarter, on which the network is worse than on the rest.

Each slice is compared with all other images by Fisher's exact test, one-sided, and the p values are adjusted for the
number of slices [Holm 1979]: if the network is equally good everywhere, the chance that any slice is called weak is at
most 5%, however the slices overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic._core.io import fingerprint
from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic._core.statistics import holm, share_interval
from vitclinic.data import Batch
from vitclinic.data.split import read_columns, read_sizes
from vitclinic.probes.behaviour.outcomes import Floats, Numbers, OutcomeTally, show_images
from vitclinic.probes.probe import DoesNotApply, Need, Result, StreamingProbe, Sum, Tally, register
from vitclinic.probes.subject import Subject

SIGNIFICANT = 0.05
PARTS = ("lowest quarter", "second quarter", "third quarter", "highest quarter")
MOST_VALUES = 50
"""Values of a column that are slices of their own, the commonest first."""
FEW_NUMBERS = 8
"""Up to so many different numbers in a column, each is a slice; more are divided into quarters."""
MOST_SIZED = 20_000
"""Images whose files are opened for their size."""
WORST = 3
"""Slices of which images are shown."""


@register
class Slices(StreamingProbe):
    """Accuracy on parts of the images (brightness, size, rare classes, columns of the data), against the rest.

    p of Fisher's exact test, one-sided, adjusted for the number of slices (Holm 1979).

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        >>> measurement = Slices(least=2)(model, [(torch.rand(8, 3, 32, 32), torch.arange(8))])
        >>> measurement.arrays["slice_feature"][0]
        np.str_('brightness')
    """

    name = "slices"
    group = "Behaviour"
    rank = 25
    revision: ClassVar[int] = 2  # does not apply where nothing was compared
    title = "Weak slices"
    question = "On which part of the images is the network worse than on the rest?"
    paper = "Fisher 1922; Holm 1979; Chung et al. 2019 (slice finding)"
    key_scalars: ClassVar[KeyScalars] = {"weak": None, "smallest_p": None}
    needs: ClassVar[frozenset[Need]] = frozenset({"labels", "logits"})
    on_all_images: ClassVar[bool] = True

    least: Annotated[int, Field(ge=2)] = Field(
        20, description="a slice has at least so many images, and so has the rest"
    )
    shown: Annotated[int, Field(ge=0)] = Field(12, description="maximum number of images to show of each worst slice")

    def conditions(self, subject: Subject) -> dict[str, Any]:
        """The columns of the data, which its digest leaves out."""
        columns = read_columns(subject.images)
        return {"columns": fingerprint({name: texts.tolist() for name, texts in columns.items()})} if columns else {}

    def begin(self, subject: Subject) -> Tally:
        return _Tally(subject, self.least, self.shown)


class ImageStatistics:
    """Brightness and contrast of each image, by its number; a `Sum` of a tally."""

    def __init__(self) -> None:
        self._parts: list[tuple[Numbers, Floats]] = []

    def add(self, batch: Batch) -> None:
        """Add the mean and the standard deviation of the grey pixels of each image."""
        grey_bn = batch.images.double().mean(1).flatten(1).cpu()
        self._parts.append((batch.indices.cpu().numpy(), np.stack([grey_bn.mean(1), grey_bn.std(1, correction=0)], 1)))

    def merge(self, other: ImageStatistics) -> None:
        """Add the images of another process."""
        self._parts += other._parts

    def collect(self) -> dict[str, Floats]:
        """Return the features of all images, in the order of the split."""
        numbers, values = (np.concatenate(parts) for parts in zip(*self._parts, strict=True))
        ordered = values[np.argsort(numbers, kind="stable")]
        return {"brightness": ordered[:, 0], "contrast": ordered[:, 1]}


class _Tally(OutcomeTally):
    def __init__(self, subject: Subject, least: int, shown: int) -> None:
        super().__init__(subject, shown)
        self.least, self.features = least, ImageStatistics()

    def end_batch(self, batch: Batch, logits: Tensor) -> None:
        super().end_batch(batch, logits)
        self.features.add(batch)

    def sums(self) -> Mapping[str, Sum]:
        return {**super().sums(), "features": self.features}

    def finish(self) -> Result:
        outcomes = self.outcomes.collect()
        slices = [*divide_numbers(self.features.collect()), *divide_numbers(_measure_files(self.subject))]
        slices += [*divide_numbers(_class_frequency(self.subject)), *divide_columns(read_columns(self.subject.images))]
        tests = compare_slices(slices, ~outcomes.is_wrong, self.least)
        if not tests:  # no weak slice among none would pass for a good network
            raise DoesNotApply(
                f"there are too few images to compare parts of them ({len(outcomes)}): a part, and the rest, must have"
                f" at least {self.least} images (the option least). Examine more images."
            )
        worst = sorted(range(len(tests)), key=lambda place: tests[place].p)[:WORST]
        shown: list[int] = []
        of: list[int] = []
        for place in worst:
            inside = np.flatnonzero(tests[place].part.inside & outcomes.is_wrong)
            most = inside[np.argsort(-outcomes.confidence[inside], kind="stable")][: self.shown]
            shown += most.tolist()
            of += [place] * len(most)
        arrays = {**_arrays(tests), "classes": np.array(self.subject.classes, dtype=np.str_)}
        arrays |= {"shown_slice": np.array(of, np.int64)}
        pictures = show_images(self.subject, outcomes.take(np.array(shown, np.int64)))
        return Result(_scalars(tests, outcomes.is_wrong), arrays={**arrays, **pictures})


@dataclass(frozen=True)
class Slice:
    """A part of the images: those with some values of a feature."""

    feature: str
    value: str
    inside: NDArray[np.bool_]


@dataclass(frozen=True)
class SliceTest:
    """Accuracy of a slice and of the rest, and how probable such a difference is by chance."""

    part: Slice
    images: int
    correct: int
    rest_images: int
    rest_correct: int
    p: float
    """One-sided: that the slice is not worse than the rest."""
    adjusted: float = 1.0
    """The same for all slices together."""


def divide_numbers(features: Mapping[str, Floats]) -> list[Slice]:
    """Divide images into quarters by each number; equal numbers stay together, and a constant gives no slice.

    Example:
        >>> [part.value for part in divide_numbers({"size": np.array([1.0, 2.0, 3.0, 4.0])})]
        ['lowest quarter (1 to 1)', 'second quarter (2 to 2)', 'third quarter (3 to 3)', 'highest quarter (4 to 4)']
    """
    found = []
    for feature, values in features.items():
        edges = np.quantile(values, (0.25, 0.5, 0.75), method="inverted_cdf")
        quarter = np.searchsorted(edges, values, side="left")
        present = np.unique(quarter)
        if len(present) > 1:
            for number in present:
                inside = quarter == number
                low, high = values[inside].min(), values[inside].max()
                found.append(Slice(feature, f"{PARTS[number]} ({low:.3g} to {high:.3g})", inside))
    return found


def divide_columns(columns: Mapping[str, NDArray[np.str_]]) -> list[Slice]:
    """Divide images by the values of each column: many different numbers into quarters, texts one by one."""
    found: list[Slice] = []
    for name, values in columns.items():
        known, counts = np.unique(values, return_counts=True)
        numbers = _as_numbers(known)
        if numbers is not None and len(known) > FEW_NUMBERS:
            found += divide_numbers({name: numbers[np.searchsorted(known, values)]})
        elif len(known) > 1:
            common = known[np.argsort(-counts, kind="stable")][:MOST_VALUES]
            found += [Slice(name, str(value), values == value) for value in common]
    return found


def _as_numbers(texts: NDArray[np.str_]) -> Floats | None:
    try:
        numbers = texts.astype(np.float64)
    except ValueError:
        return None
    return numbers if np.isfinite(numbers).all() else None


def _measure_files(subject: Subject) -> dict[str, Floats]:
    """Return pixels and aspect of the image files, before they were resized, where there are files."""
    sizes = read_sizes(subject.images) if len(subject) <= MOST_SIZED else None
    if sizes is None:
        return {}
    height, width = sizes.T.astype(np.float64)
    return {"size in pixels": height * width, "width / height": width / height}


def _class_frequency(subject: Subject) -> dict[str, Floats]:
    """Return how many training images the class of each image has; of data without, how many images here."""
    train = subject.dataset.splits.get("train")
    labels = subject.images.labels
    counted = labels if train is None or not len(train) else train.labels
    counts = np.bincount(counted, minlength=int(labels.max()) + 1)
    return {"images of the class": counts[labels].astype(np.float64)}


def compare_slices(slices: Sequence[Slice], correct: NDArray[np.bool_], least: int = 20) -> list[SliceTest]:
    """Test every slice of at least `least` images against the rest, and adjust the p values for their number."""
    from scipy.stats import hypergeom  # takes a while, and only this needs it

    n, right = len(correct), int(correct.sum())
    found = []
    for part in slices:
        images = int(part.inside.sum())
        if least <= images <= n - least:
            good = int(correct[part.inside].sum())
            p = float(hypergeom.cdf(good, n, right, images))
            found.append(SliceTest(part, images, good, n - images, right - good, min(1.0, p)))
    adjusted = holm([test.p for test in found])
    return [
        SliceTest(test.part, test.images, test.correct, test.rest_images, test.rest_correct, test.p, level)
        for test, level in zip(found, adjusted, strict=True)
    ]


def _scalars(tests: Sequence[SliceTest], wrong: NDArray[np.bool_]) -> dict[str, Scalar]:
    n = len(wrong)
    scalars = {
        "slices": Scalar(value=float(len(tests)), n=n),
        "weak": Scalar(value=float(sum(test.adjusted < SIGNIFICANT for test in tests)), n=n),
        "smallest_p": Scalar(value=min(test.adjusted for test in tests), n=n),
    }
    worst = min(tests, key=lambda test: test.p)
    low, high = share_interval(worst.correct, worst.images)
    value = worst.correct / worst.images
    scalars["worst_slice_accuracy"] = Scalar(value=value, low=low, high=high, n=worst.images)
    low, high = share_interval(worst.rest_correct, worst.rest_images)
    value = worst.rest_correct / worst.rest_images
    scalars["rest_accuracy"] = Scalar(value=value, low=low, high=high, n=worst.rest_images)
    return scalars


def _arrays(tests: Sequence[SliceTest]) -> dict[str, NDArray[np.generic]]:
    intervals = np.array([share_interval(test.correct, test.images) for test in tests]).reshape(-1, 2)
    return {
        "slice_feature": np.array([test.part.feature for test in tests], dtype=np.str_),
        "slice_value": np.array([test.part.value for test in tests], dtype=np.str_),
        "slice_images": np.array([test.images for test in tests], np.int64),
        "slice_accuracy": np.array([test.correct / test.images for test in tests]),
        "slice_accuracy_low": intervals[:, 0],
        "slice_accuracy_high": intervals[:, 1],
        "rest_accuracy": np.array([test.rest_correct / test.rest_images for test in tests]),
        "slice_p": np.array([test.p for test in tests]),
        "slice_p_adjusted": np.array([test.adjusted for test in tests]),
    }
