"""The summary: the key numbers of all probes, a column a network, and which of them is better.

A value is marked as the better one where "better" has a direction (`BETTER`), the networks were measured alike (the
same images, options and conditions, all converged), and its interval overlaps none of the others'. A number without an
interval is taken as exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vitclinic._core.records import Measurement, Scalar
from vitclinic.reports.figure import Examined
from vitclinic.reports.sections import in_order

Better = Literal["higher", "lower", "nearer to 0"]

KEY_SCALARS: dict[str, tuple[str, ...]] = {
    "accuracy": ("accuracy", "top5_accuracy", "nll", "ece"),
    "train_nll": ("nll",),
    "corruptions": ("accuracy", "drop"),
    "frequency_noise": ("drop_low", "drop_high"),
    "occlusion": ("accuracy", "drop"),
    "fgsm": ("robust_accuracy", "drop"),
    "pgd": ("robust_accuracy", "drop"),
    "missing_rate": ("missing_rate",),
    "shift": ("accuracy", "accuracy_among_mapped"),
    "shape_bias": ("shape_bias",),
    "fourier": (
        "delta_log_amplitude_last",
        "delta_log_amplitude_change_msa",
        "delta_log_amplitude_change_mlp",
        "delta_log_amplitude_change_conv",
    ),
    "variance": ("variance_last", "variance_change_msa", "variance_change_mlp", "variance_change_conv"),
    "cka": ("cka_mean", "block_structure"),
    "token_similarity": ("absolute_cosine_last", "cosine_last", "absolute_cosine_rise"),
    "sparsity": ("active", "active_first"),
    "lesion": ("accuracy_drop_msa", "accuracy_drop_mlp", "accuracy_drop_conv"),
    "attention_entropy": ("ratio", "upper_ratio", "class_ratio"),
    "attention_distance": ("distance",),
    "attention_maps": ("peak",),
    "cb_scale": ("ratio", "mean"),
    "sharpness": ("lambda_max", "trace"),
    "hessian_spectrum": ("nep", "ape"),
    "flatness": ("flatness",),
    "landscape": ("largest_loss",),
    "ntk": ("condition_number",),
    "trajectory": ("distance", "angle_max"),
    "cost": ("parameters", "flops", "images_per_second", "latency_seconds", "peak_memory_bytes"),
    "norms": ("weight_norm", "activation_norm_last"),
}
"""What the summary shows of our probes; of any other, its first six scalars."""

BETTER: dict[str, Better] = {
    "accuracy.accuracy": "higher",
    "accuracy.top5_accuracy": "higher",
    "accuracy.nll": "lower",
    "accuracy.ece": "lower",
    "corruptions.accuracy": "higher",
    "corruptions.drop": "lower",
    "frequency_noise.drop_low": "lower",
    "frequency_noise.drop_high": "lower",
    "occlusion.accuracy": "higher",
    "occlusion.drop": "lower",
    "fgsm.robust_accuracy": "higher",
    "fgsm.drop": "lower",
    "pgd.robust_accuracy": "higher",
    "pgd.drop": "lower",
    "missing_rate.missing_rate": "lower",
    "shift.accuracy": "higher",
    "shift.accuracy_among_mapped": "higher",
    "shape_bias.shape_bias": "higher",
    "token_similarity.absolute_cosine_last": "lower",
    "sharpness.lambda_max": "nearer to 0",
    "sharpness.trace": "nearer to 0",
    "hessian_spectrum.nep": "lower",
    "hessian_spectrum.ape": "lower",
    "flatness.flatness": "lower",
    "ntk.condition_number": "lower",
    "cost.parameters": "lower",
    "cost.flops": "lower",
    "cost.images_per_second": "higher",
    "cost.latency_seconds": "lower",
    "cost.peak_memory_bytes": "lower",
}
"""By PROBE.SCALAR; what is not here is neither good nor bad by itself."""


@dataclass(frozen=True)
class Cell:
    """One number of one network."""

    scalar: Scalar | None
    best: bool = False
    converged: bool = True


@dataclass(frozen=True)
class Row:
    """One number of all networks."""

    probe: str
    scalar: str
    better: Better | None
    cells: Sequence[Cell]
    alike: bool
    """Whether all networks were measured on the same images, with the same options, under the same conditions."""


def summary(examined: Sequence[Examined]) -> list[Row]:
    """The rows, in the order of the page's sections; without those that no network has."""
    return [
        _row([one.measurements.get(probe) for one in examined], probe, scalar)
        for probe in in_order(examined)
        for scalar in _shown(probe, [one.measurements.get(probe) for one in examined])
    ]


def best_of(scalars: Sequence[Scalar | None], better: Better | None) -> int | None:
    """The place of the value that is better than all others beyond their intervals, if there is one.

    Example:
        >>> best_of([Scalar(value=0.5, low=0.4, high=0.6), Scalar(value=0.7, low=0.65, high=0.75)], "higher")
        1
    """
    present = {place: scalar for place, scalar in enumerate(scalars) if scalar is not None}
    if better is None or len(present) < 2:
        return None
    spans = {place: _span(scalar, better) for place, scalar in present.items()}
    if any(math.isnan(end) for span in spans.values() for end in span):
        return None
    best = min(spans, key=lambda place: spans[place][1])
    separate = all(spans[best][1] < low for place, (low, _) in spans.items() if place != best)
    return best if separate else None


def _span(scalar: Scalar, better: Better) -> tuple[float, float]:
    """Its interval on a scale on which less is better."""
    low = scalar.value if scalar.low is None else scalar.low
    high = scalar.value if scalar.high is None else scalar.high
    if better == "higher":
        return -high, -low
    if better == "lower":
        return low, high
    return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def _shown(probe: str, measurements: Sequence[Measurement | None]) -> list[str]:
    there = dict.fromkeys(name for found in measurements if found is not None for name in found.scalars)
    return [name for name in KEY_SCALARS[probe] if name in there] if probe in KEY_SCALARS else list(there)[:6]


def _row(measurements: Sequence[Measurement | None], probe: str, scalar: str) -> Row:
    found = [None if one is None else one.scalars.get(scalar) for one in measurements]
    converged = [one is None or one.status == "ok" for one in measurements]
    alike = measured_alike(measurements)
    better = BETTER.get(f"{probe}.{scalar}")
    best = best_of(found, better) if alike and all(converged) else None
    cells = [Cell(value, place == best, well) for place, (value, well) in enumerate(zip(found, converged, strict=True))]
    return Row(probe, scalar, better, cells, alike)


def measured_alike(measurements: Sequence[Measurement | None]) -> bool:
    """Whether those that are there were made on the same images, with the same options, under the same conditions."""
    there = [found for found in measurements if found is not None and found.status in ("ok", "not_converged")]
    return all(one.terms == there[0].terms for one in there)
