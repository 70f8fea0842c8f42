"""Accuracy under noise in one frequency band [park2022 Fig. 2b].

    x' = x + a F^-1( F(delta) * M_f )

with delta Gaussian, M_f a ring in the frequency plane, and a such that |x' - x| is the same for every ring.

Shapes: B images, C channels.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic.data import Batch
from vitclinic.data.corruptions.noise import Draws, lengths
from vitclinic.probes.behaviour.behaviour_probe import BehaviourProbe, divide_images
from vitclinic.probes.behaviour.intervals import Correct, drop, mean_over, share_correct
from vitclinic.probes.behaviour.predictions import is_correct
from vitclinic.probes.probe import Result, register
from vitclinic.probes.subject import Subject

Rings = NDArray[np.int64]
"""Ring of each frequency, [height, width]."""


@register
class FrequencyNoise(BehaviourProbe):
    """Drop in accuracy under Gaussian noise in one ring of frequencies at a time [park2022 Fig. 2b].

    x' = x + a F^-1(F(delta) * M_r) with delta Gaussian, M_r a ring in the frequency plane, and a such that the noise
    has the same norm for every ring.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> FrequencyNoise(width=0.5)(model, loader).arrays["drop"].shape  # three rings
        (3,)
    """

    name = "frequency_noise"
    group = "Behaviour"
    rank = 200
    title = "Noise by frequency"
    question = "Noise of which frequencies hurts it most?"
    paper = "Park and Kim 2022, Fig. 2b (P8)"
    key_scalars: ClassVar[KeyScalars] = {"drop_low": "lower", "drop_high": "lower"}
    revision: ClassVar[int] = 3  # rings of both halves are in neither; intervals have a width

    strength: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        0.1, description="root mean square of the noise for pixels in [0, 1]; the same for every ring"
    )
    width: Annotated[float, Field(ge=0.001, le=1.5)] = Field(0.1, description="width of a ring, in units of pi")

    def forwards(self, subject: Subject) -> float:
        return float(len(subject) * (1 + len(np.unique(rings(*subject.dataset.size, self.width)))))

    def measure(self, subject: Subject) -> Result:
        ring_hw = rings(*subject.dataset.size, self.width)
        clean = np.zeros(len(subject), np.bool_)
        noisy = {int(ring): np.zeros(len(subject), np.bool_) for ring in np.unique(ring_hw)}

        def measure_batch(batch: Batch) -> int:
            self._measure_batch(subject, batch, ring_hw, clean, noisy)
            return len(batch)

        divide_images(subject, self.name, len(subject), subject.own_batches(), measure_batch, (clean, *noisy.values()))
        return self._result(subject, ring_hw, clean, noisy)

    def _measure_batch(
        self, subject: Subject, batch: Batch, ring_hw: Rings, clean: Correct, noisy: dict[int, Correct]
    ) -> None:
        places = batch.indices.numpy()
        images = batch.images.to(torch.promote_types(subject.dtype, torch.float32))
        clean[places] = is_correct(subject, images, batch.targets)
        draws = Draws(self.name, subject.seed, subject.images.rows[places], subject.device)
        delta = draws.normal(*images.shape[1:]).to(images)
        for ring, correct in noisy.items():
            noise = self.strength * unit_noise(delta, torch.from_numpy(ring_hw == ring))
            correct[places] = is_correct(subject, images + noise, batch.targets)

    def _result(self, subject: Subject, ring_hw: Rings, clean: Correct, noisy: dict[int, Correct]) -> Result:
        edges = self.width * np.arange(int(ring_hw.max()) + 2)
        centres = (edges[1:] + edges[:-1]) / 2
        size = subject.dataset.channels * math.prod(subject.dataset.size)
        scalars = {
            "clean_accuracy": share_correct(clean),
            "l2_norm": Scalar(value=self.strength * math.sqrt(size)),
        }
        for name, low, high in (("drop_low", 0.0, 0.5), ("drop_high", 0.5, 1.0)):
            inside = (edges[:-1] >= low - 1e-9) & (edges[1:] <= high + 1e-9)
            if chosen := [correct for ring, correct in noisy.items() if inside[ring]]:
                scalars[name] = mean_drop(clean, chosen)
        nothing = Scalar(value=math.nan, low=math.nan, high=math.nan)
        drops = [drop(clean, noisy[ring]) if ring in noisy else nothing for ring in range(len(centres))]
        arrays = {
            "frequency": centres,
            "frequencies": np.bincount(ring_hw.ravel(), minlength=len(centres)),
            "accuracy": np.array([noisy[r].mean() if r in noisy else math.nan for r in range(len(centres))]),
            "drop": np.array([scalar.value for scalar in drops]),
            "drop_interval": np.array([(scalar.low, scalar.high) for scalar in drops]),
        }
        return Result(scalars, arrays=arrays)


def rings(height: int, width: int, thickness: float) -> Rings:
    """Return the ring of each frequency of an image's Fourier transform, [height, width].

    Ring r holds the frequencies whose distance from zero, in units of pi, is at least r and less than r + 1 times the
    thickness. Every frequency is in one ring, including the corners of the plane, up to sqrt(2) pi.
    """
    vertical, horizontal = 2 * np.fft.fftfreq(height)[:, None], 2 * np.fft.fftfreq(width)[None]
    distance = np.hypot(vertical, horizontal) / thickness
    found: Rings = np.floor(distance + 1e-9).astype(np.int64)  # a frequency on an edge is in the outer ring
    return found


def unit_noise(delta_bchw: Tensor, mask_hw: Tensor) -> Tensor:
    """Return the part of `delta` at the masked frequencies, scaled to a root mean square of 1 in each image."""
    height, width = mask_hw.shape
    spectrum = torch.fft.rfft2(delta_bchw) * mask_hw[:, : width // 2 + 1].to(delta_bchw.device)
    part = torch.fft.irfft2(spectrum, (height, width))
    unit: Tensor = part * (math.sqrt(part[0].numel()) / lengths(part).clamp_min(1e-30))
    return unit


def mean_drop(clean: Correct, noisy: list[Correct]) -> Scalar:
    """Return the drop in accuracy, averaged over several kinds of noise; an image under all of them is one sample."""
    return mean_over(clean - np.mean(noisy, axis=0), -1.0, 1.0)
