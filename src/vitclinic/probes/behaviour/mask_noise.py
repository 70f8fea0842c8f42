"""Mean IoU of masks on noisy and blurred images [hyeonwoo2023 Table 9].

Shapes: B images, C channels, K classes, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic._core.records import Scalar
from vitclinic._core.registry import FigureSpec, KeyScalars
from vitclinic._core.segmentation import count_batch, mean_iou, resample_counts
from vitclinic._core.statistics import t_interval
from vitclinic.data.corruptions.blur import gaussian_smooth
from vitclinic.data.corruptions.noise import Draws
from vitclinic.models.segmenter import Segmenter, read_masks, score_pixels, slide
from vitclinic.probes.behaviour.segmentation import find_segmenter
from vitclinic.probes.probe import Cheaper, OwningProbe, Result, register
from vitclinic.probes.subject import Subject

_LEVELS = 255
_TITLES = {
    "miou": "as they are",
    "miou_shot_noise": "shot noise",
    "miou_gaussian_noise_5": "Gaussian noise, 5 levels",
    "miou_gaussian_noise_10": "Gaussian noise, 10 levels",
    "miou_gaussian_blur_1": "Gaussian blur, 1 pixel",
    "miou_gaussian_blur_2": "Gaussian blur, 2 pixels",
}

Change = Callable[[Tensor, Draws], Tensor]


@register
class MaskNoise(OwningProbe):
    """Mean IoU on images with shot noise, Gaussian noise and Gaussian blur [hyeonwoo2023 Table 9].

    Gaussian noise has a standard deviation of 5 and of 10 of 255 levels, Gaussian blur one of 1 and of 2 pixels. Shot
    noise is Poisson(x photons) / photons. Noise is drawn `draws` times, each image by itself; the score is the mean,
    with a 95% t interval over the draws, as in the paper. It says how much the noise matters, not the choice of images.

    Attributes:
        draws: How often noise is drawn.
        photons: Photons of a white pixel in shot noise, which the paper leaves open: the weakest of ImageNet-C.
        images: Images, at most.
    """

    name = "mask_noise"
    group = "Behaviour"
    rank = 175
    title = "Masks of noisy images"
    question = "How much of the masks is lost to noise and blur?"
    paper = "Hyeon-Woo et al. 2023, Table 9"
    key_scalars: ClassVar[KeyScalars] = {"miou_changed": "higher", "drop": "lower"}
    by_default: ClassVar[bool] = False
    cheaper: ClassVar[Cheaper] = ({"images": 50, "draws": 2}, {"images": 200})
    figures = (
        FigureSpec(
            name="mask-noise",
            kind="scalars",
            values=_TITLES,
            axis="mean IoU",
            title="Masks of noisy and blurred images",
            reading="Bars are the mean IoU, all images together, with what was done to them. Intervals are over draws"
            " of the noise: they say nothing of other images.",
            paper="Hyeon-Woo et al. 2023, Table 9",
            share=True,
        ),
    )

    draws: Annotated[int, Field(ge=1)] = Field(5, description="how often noise is drawn")
    photons: Annotated[float, Field(gt=0, le=10_000)] = Field(60, description="photons of a white pixel in shot noise")
    images: Annotated[int, Field(ge=1)] = Field(1000, description="maximum number of images")

    def view(self, subject: Subject) -> Subject:
        return subject if self.images >= len(subject) else subject.on(subject.split, self.images)

    def check(self, subject: Subject) -> None:
        find_segmenter(subject)

    def forwards(self, subject: Subject) -> float:
        return float(len(subject) * (3 + 3 * self.draws))

    def measure(self, subject: Subject) -> Result:
        changes = self._changes()
        clean, counts = self._count(subject, changes)
        scores = {name: mean_iou(of_draws.sum(1)) for name, of_draws in counts.items()}  # [draws] each
        pooled = {name: of_draws.sum(0) for name, of_draws in counts.items()}
        scalars = {"miou": Scalar(value=float(mean_iou(clean.sum(0))), n=len(subject))}
        for name, of_draws in scores.items():
            low, high = t_interval(of_draws.tolist()) or (None, None)
            scalars[f"miou_{name}"] = Scalar(value=float(of_draws.mean()), low=low, high=high, n=len(subject))
        changed = float(np.mean([of_draws.mean() for of_draws in scores.values()]))
        # Samples of images, the same for all changes, so that the drop is that of pairs.
        sampled = np.mean([mean_iou(resample_counts(each, subject.seed)) for each in pooled.values()], axis=0)
        lost = mean_iou(resample_counts(clean, subject.seed)) - sampled
        scalars["miou_changed"] = _with_spread(changed, sampled, len(subject))
        scalars["drop"] = _with_spread(scalars["miou"].value - changed, lost, len(subject))
        return Result(scalars, arrays={f"draws_{name}": of_draws for name, of_draws in scores.items()})

    def _changes(self) -> dict[str, tuple[int, Change]]:
        """Return how often each change is drawn, and the change of images in [0, 1]."""
        random: dict[str, Change] = {"shot_noise": lambda x, draws: add_shot_noise(x, self.photons, draws)}
        for deviation in (5, 10):
            random[f"gaussian_noise_{deviation}"] = _gaussian_noise(deviation)
        fixed = {f"gaussian_blur_{sigma}": _blur(sigma) for sigma in (1, 2)}
        return {
            **{name: (self.draws, change) for name, change in random.items()},
            **{name: (1, change) for name, change in fixed.items()},
        }

    @torch.no_grad()
    def _count(
        self, subject: Subject, changes: dict[str, tuple[int, Change]]
    ) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
        """Return the counts of the images, [n, 3, K], and of each change [draws, n, 3, K]."""
        network, classes, seen = find_segmenter(subject), len(subject.classes), 0
        segmenter = network.backbone
        assert isinstance(segmenter, Segmenter)
        clean = np.zeros((len(subject), 3, classes), np.int64)
        counts = {name: np.zeros((draws, *clean.shape), np.int64) for name, (draws, _) in changes.items()}
        for batch, scores in score_pixels(
            network, subject.dataset, subject.split, segmenter.window, subject.batch_size
        ):
            masks, rows = read_masks(batch), subject.images.rows[batch.indices.cpu().numpy()]
            places = slice(seen, seen + len(batch))
            clean[places] = count_batch(scores, masks, classes)[0]
            for name, (draws, change) in changes.items():
                for draw in range(draws):
                    numbers = Draws(f"{self.name} {name} {draw}", subject.seed, rows, batch.images.device)
                    images = _round(change(batch.images.float(), numbers)).to(batch.images)
                    found = count_batch(slide(network, images, segmenter.window), masks, classes)[0]
                    counts[name][draw, places] = found
            seen += len(batch)
            subject.progress(self.name, seen, len(subject))
        return clean, counts


def _with_spread(value: float, sampled: NDArray[np.float64], n: int) -> Scalar:
    """Return a value with as wide an interval as its bootstrap samples have around their median."""
    low, middle, high = np.quantile(sampled, (0.025, 0.5, 0.975))
    return Scalar(value=value, low=value + float(low - middle), high=value + float(high - middle), n=n)


def add_shot_noise(images: Tensor, photons: float, draws: Draws) -> Tensor:
    """Return Poisson(x photons) / photons of images of 256 levels."""
    rates = tuple(level / _LEVELS * photons for level in range(_LEVELS + 1))
    return draws.poisson(rates, (images * _LEVELS).round().int()) / photons


def _gaussian_noise(deviation: float) -> Change:
    return lambda images, draws: images + draws.normal(*images.shape[1:]) * (deviation / _LEVELS)


def _blur(sigma: float) -> Change:
    return lambda images, _: gaussian_smooth(images, sigma)


def _round(images: Tensor) -> Tensor:
    """Return images of 256 levels, as files have them."""
    return (images.clamp(0, 1) * _LEVELS).round() / _LEVELS
