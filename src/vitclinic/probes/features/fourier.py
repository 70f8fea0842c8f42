"""Fourier analysis of feature maps [park2022 Fig. 2a, 8, D.2].

Frequencies are in units of pi, the highest that a grid can hold. Along the half-diagonal, from the centre of the
spectrum to its corner, both axes have the same frequency. A side of n positions has bins at multiples of 2 / n, and so
at pi only if n is even. Between bins (odd sides, the shorter side of a grid that is not square), the log amplitude is
interpolated bilinearly from the nearest bins of the periodic spectrum.

Shapes: B images, C channels, N = H * W positions, F frequencies, M bins of the spectrum.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitclinic._core.registry import KeyScalars
from vitclinic.probes.features.changes import ChangesTally
from vitclinic.probes.probe import Need, Result, StreamingProbe, Tally, register
from vitclinic.probes.subject import Subject

FLOOR = 1e-6
"""Lower bound of amplitudes before the logarithm, since maps of zeros have an amplitude of 0."""

Bin = tuple[int, int]


@register
class Fourier(StreamingProbe):
    """Log amplitude of the state after each unit at high frequency relative to zero, and its change [park2022 Fig. 8].

    Delta log amplitude is log |FFT2| of each feature map, averaged over channels and images, along the half-diagonal of
    the spectrum and relative to frequency 0. The number of a unit is its value at frequency pi.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> measurement = Fourier()(model, loader)
        >>> [row.name for row in measurement.units if row.kind == "msa"][:2]
        ['blocks.0.msa', 'blocks.1.msa']
    """

    name = "fourier"
    group = "Representation"
    rank = 40
    title = "Frequencies by depth"
    question = "Which layers damp high frequencies, and which amplify them?"
    paper = "Park and Kim 2022, Fig. 2a, 8, D.2 (P6)"
    key_scalars: ClassVar[KeyScalars] = {
        "delta_log_amplitude_last": None,
        "delta_log_amplitude_change_msa": None,
        "delta_log_amplitude_change_mlp": None,
        "delta_log_amplitude_change_conv": None,
    }
    needs: ClassVar[frozenset[Need]] = frozenset({"anatomy"})

    def begin(self, subject: Subject) -> Tally:
        return _Tally(subject.anatomy)


class _Tally(ChangesTally):
    number = "delta_log_amplitude"

    def numbers(self, maps: Tensor) -> Tensor:
        return relative_log_amplitude(maps)

    def finish(self) -> Result:
        """Return the result with the curves: one row per unit, padded with NaN if grids differ in size."""
        units = self.find_units()
        diagonals = [half_diagonal(self.sizes[unit.output]) for unit in units]
        curves: dict[str, list[NDArray[Any]]] = {
            "frequencies": [diagonal.frequencies for diagonal in diagonals],
            "interpolated": [diagonal.interpolated for diagonal in diagonals],
            "delta_log_amplitude": [self.states[unit.name].mean for unit in units],
            "half_width": [self.states[unit.name].half_width() for unit in units],
        }
        return replace(super().finish(), arrays={name: _pad_rows(rows) for name, rows in curves.items()})


def log_amplitude(maps: Tensor) -> Tensor:
    """Return log |FFT2| of feature maps [B, C, H, W] along the half-diagonal, averaged over channels, [B, F].

    `half_diagonal((H, W)).frequencies` are the frequencies, from 0 to 1 (times pi).

    Example:
        >>> import torch
        >>> checkerboard = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])  # all at frequency pi, on top of a mean
        >>> log_amplitude(0.5 + checkerboard.expand(1, 3, 2, 2)).exp()
        tensor([[2., 4.]])
    """
    x_bcn = maps.flatten(2)
    basis, weights = _tensors((maps.shape[2], maps.shape[3]), maps.dtype, maps.device)
    mean = x_bcn.mean(2, keepdim=True)
    # The mean only affects frequency 0. Subtracting it keeps small amplitudes precise, and constant maps exactly 0.
    parts = torch.bmm(basis.expand(len(x_bcn), -1, -1), (x_bcn - mean).transpose(1, 2))
    real, imaginary = parts.chunk(2, dim=1)
    constant = mean.transpose(1, 2) * x_bcn.shape[2]
    amplitude_bmc = torch.cat((constant.abs(), torch.hypot(real, imaginary)), dim=1)
    return amplitude_bmc.clamp_min(FLOOR).log().mean(2) @ weights


def relative_log_amplitude(maps: Tensor) -> Tensor:
    """Return the log amplitude of feature maps [B, C, H, W] less that at frequency 0, [B, F]."""
    log = log_amplitude(maps)
    return log - log[:, :1]


class HalfDiagonal(NamedTuple):
    """Half-diagonal of the spectrum of a grid."""

    frequencies: NDArray[np.float64]
    """[F], from 0 to 1, in units of pi: the bins of the longer side, and 1."""
    interpolated: NDArray[np.bool_]
    """[F], True if a frequency lies between bins."""
    basis: NDArray[np.float64]
    """[2 (M - 1), N], cosines and sines at all bins but frequency 0."""
    weights: NDArray[np.float64]
    """[M, F], weight of each bin (frequency 0 first) in the value at each frequency."""


@lru_cache(maxsize=16)
def half_diagonal(size: tuple[int, int]) -> HalfDiagonal:
    """Return the half-diagonal for a grid of (rows, columns)."""
    longer = max(size)
    shares = [(k, longer) for k in range((longer + 1) // 2)] + [(1, 2)]  # of 2 pi
    corners = [_corners(size, numerator, denominator) for numerator, denominator in shares]
    bins = list(dict.fromkeys(bin_ for corner in corners for bin_ in corner))
    weights = np.array([[corner.get(bin_, 0.0) for corner in corners] for bin_ in bins])
    frequencies = np.array([2 * numerator / denominator for numerator, denominator in shares])
    between = [any(n * side % d for side in size if side > 1) for n, d in shares]
    return HalfDiagonal(frequencies, np.array(between), _waves(size, bins[1:]), weights)


def _corners(size: tuple[int, int], numerator: int, denominator: int) -> dict[Bin, float]:
    """Return the bins around the frequency 2 pi numerator / denominator on both axes, with their bilinear weights."""
    ends: list[list[tuple[int, float]]] = []
    for side in size:
        low, rest = divmod(numerator * side, denominator)
        ends.append([(low, 1 - rest / denominator), ((low + 1) % side, rest / denominator)])
    weights: dict[Bin, float] = defaultdict(float)
    for row, row_weight in ends[0]:
        for column, column_weight in ends[1]:
            if row_weight * column_weight > 0:
                opposite = (-row % size[0], -column % size[1])  # has the same amplitude, since maps are real
                weights[min((row, column), opposite)] += row_weight * column_weight
    return weights


def _waves(size: tuple[int, int], bins: list[Bin]) -> NDArray[np.float64]:
    """Return cosines, then sines, of the bins at all positions, row by row, [2 M, N]."""
    rows, columns = (axis.ravel() for axis in np.indices(size))
    picked = np.array(bins, dtype=np.int64).reshape(-1, 2, 1)
    turns = (picked[:, 0] * rows * size[1] + picked[:, 1] * columns * size[0]) % (size[0] * size[1])
    phases = 2 * math.pi * turns / (size[0] * size[1])
    return np.concatenate((np.cos(phases), np.sin(phases)))


@lru_cache(maxsize=16)
def _tensors(size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    diagonal = half_diagonal(size)
    return torch.tensor(diagonal.basis, dtype=dtype, device=device), torch.tensor(
        diagonal.weights, dtype=dtype, device=device
    )


def _pad_rows(rows: list[NDArray[Any]]) -> NDArray[Any]:
    """Stack rows of different lengths, padded with NaN (or False)."""
    longest = max(len(row) for row in rows)
    filler = False if rows[0].dtype == np.bool_ else math.nan
    return np.array([np.pad(row, (0, longest - len(row)), constant_values=filler) for row in rows])
