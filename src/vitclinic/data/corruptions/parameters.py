"""Names and published parameters of the corruptions [Hendrycks & Dietterich 2019], chosen by image size.

Images whose shorter side is below `BOUNDARY` pixels get CIFAR-10-C's, others ImageNet-C's. Lengths in pixels are
multiplied by `scale`, the shorter side over 32 or 224, so that a corruption covers the same share of an image of
another size; at 32 and 224 pixels the parameters are the published ones.

This module does not import torch, so that a mistyped name is reported at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vitclinic._core.errors import DataError, RecipeError, did_you_mean
from vitclinic.data.decoding import Size

SMALLEST = 32
"""The shorter side that an image must have."""
BOUNDARY = 85
"""Between the two sets: the geometric mean of 32 and 224."""

ParameterSet = Literal["cifar10-c", "imagenet-c"]

SEVERITIES = (1, 2, 3, 4, 5)

FIFTEEN = (
    *("gaussian_noise", "shot_noise", "impulse_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
"""The corruptions of the benchmark, in its order."""
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
"""Those that it keeps for validation."""
NINETEEN = FIFTEEN + EXTRA

# What the numbers of a row mean is said where they are used: the function of the same name.
_CIFAR: dict[str, list[Any]] = {
    "gaussian_noise": [0.04, 0.06, 0.08, 0.09, 0.10],
    "shot_noise": [500, 250, 100, 75, 50],
    "impulse_noise": [0.01, 0.02, 0.03, 0.05, 0.07],
    "speckle_noise": [0.06, 0.1, 0.12, 0.16, 0.2],
    "defocus_blur": [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)],
    "glass_blur": [(0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)],
    "motion_blur": [(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)],
    "zoom_blur": [(1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)],
    "gaussian_blur": [0.4, 0.6, 0.7, 0.8, 1],
    "snow": [
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ],
    "frost": [(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)],
    "fog": [(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)],
    "spatter": [
        (0.62, 0.1, 0.7, 0.7, 0.5, "water"),
        (0.65, 0.1, 0.8, 0.7, 0.5, "water"),
        (0.65, 0.3, 1, 0.69, 0.5, "water"),
        (0.65, 0.1, 0.7, 0.69, 0.6, "mud"),
        (0.65, 0.1, 0.5, 0.68, 0.6, "mud"),
    ],
    "brightness": [0.05, 0.1, 0.15, 0.2, 0.3],
    "contrast": [0.75, 0.5, 0.4, 0.3, 0.15],
    "saturate": [(0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)],
    "elastic_transform": [
        (0, 0, 32 * 0.08),
        (32 * 0.05, 32 * 0.2, 32 * 0.07),
        (32 * 0.08, 32 * 0.06, 32 * 0.06),
        (32 * 0.1, 32 * 0.04, 32 * 0.05),
        (32 * 0.1, 32 * 0.03, 32 * 0.03),
    ],
    "pixelate": [0.95, 0.9, 0.85, 0.75, 0.65],
    "jpeg_compression": [80, 65, 58, 50, 40],
}

_IMAGENET: dict[str, list[Any]] = {
    "gaussian_noise": [0.08, 0.12, 0.18, 0.26, 0.38],
    "shot_noise": [60, 25, 12, 5, 3],
    "impulse_noise": [0.03, 0.06, 0.09, 0.17, 0.27],
    "speckle_noise": [0.15, 0.2, 0.35, 0.45, 0.6],
    "defocus_blur": [(3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)],
    "glass_blur": [(0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)],
    "motion_blur": [(10, 3), (15, 5), (15, 8), (15, 12), (20, 15)],
    "zoom_blur": [(1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)],
    "gaussian_blur": [1, 2, 3, 4, 6],
    "snow": [
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ],
    "frost": [(1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)],
    "fog": [(1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)],
    "spatter": [
        (0.65, 0.3, 4, 0.69, 0.6, "water"),
        (0.65, 0.3, 3, 0.68, 0.6, "water"),
        (0.65, 0.3, 2, 0.68, 0.5, "water"),
        (0.65, 0.3, 1, 0.65, 1.5, "mud"),
        (0.67, 0.4, 1, 0.65, 1.5, "mud"),
    ],
    "brightness": [0.1, 0.2, 0.3, 0.4, 0.5],
    "contrast": [0.4, 0.3, 0.2, 0.1, 0.05],
    "saturate": [(0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)],
    "elastic_transform": [  # 244 is the published number
        (244 * 2, 244 * 0.7, 244 * 0.1),
        (244 * 2, 244 * 0.08, 244 * 0.2),
        (244 * 0.05, 244 * 0.01, 244 * 0.02),
        (244 * 0.07, 244 * 0.01, 244 * 0.02),
        (244 * 0.12, 244 * 0.01, 244 * 0.02),
    ],
    "pixelate": [0.6, 0.5, 0.4, 0.3, 0.25],
    "jpeg_compression": [25, 18, 15, 10, 7],
}


@dataclass(frozen=True)
class Setting:
    """Parameters of one corruption at one severity for images of one size."""

    parameters: Any
    scale: float
    """Factor for lengths in pixels."""
    parameter_set: ParameterSet


def setting(name: str, severity: int, size: Size) -> Setting:
    """Return the parameters for images of (height, width) `size`; raise a DataError if they are too small."""
    side = min(size)
    if side < SMALLEST:
        raise DataError(
            f"Corruptions need images of at least {SMALLEST} pixels per side; these are {size[0]} x {size[1]}."
        )
    if side < BOUNDARY:
        return Setting(_CIFAR[name][severity - 1], side / 32, "cifar10-c")
    return Setting(_IMAGENET[name][severity - 1], side / 224, "imagenet-c")


def check_corruption(name: str, severity: float) -> None:
    """Raise a RecipeError if there is no such corruption or severity."""
    if name not in NINETEEN:
        hint = did_you_mean(name, NINETEEN) or f" Choose from {', '.join(NINETEEN)}."
        raise RecipeError(f"There is no corruption '{name}'.{hint}")
    if severity not in SEVERITIES:
        raise RecipeError(f"The severity must be 1, 2, 3, 4 or 5 (got {severity}).")


def list_cells(corruptions: str | int | Sequence[str], severities: str | int | Sequence[int]) -> list[tuple[str, int]]:
    """Return every corruption at every severity, from what a user wrote.

    Args:
        corruptions: Names, also as one text with commas; `15` or `all`.
        severities: Numbers from 1 to 5, also as one text with commas; or `all`.

    Raises:
        RecipeError: There is no such corruption or severity.

    Example:
        >>> list_cells("fog,snow", 3)
        [('fog', 3), ('snow', 3)]
    """
    cells = [(name, severity) for name in _parse_names(corruptions) for severity in _parse_severities(severities)]
    for name, severity in cells:
        check_corruption(name, severity)
    return cells


def _parse_names(given: str | int | Sequence[str]) -> list[str]:
    if str(given) in ("all", "15", "19"):
        return list(FIFTEEN if str(given) == "15" else NINETEEN)
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else _as_list(given)
    if not names:
        raise RecipeError(f"Corruptions must be names such as fog,snow, or all or 15 (got {given!r}).")
    return list(dict.fromkeys(names))


def _parse_severities(given: str | int | Sequence[int]) -> list[int]:
    if given == "all":
        return list(SEVERITIES)
    parts = given.split(",") if isinstance(given, str) else [given] if isinstance(given, int) else _as_list(given)
    try:
        found = sorted({int(part) for part in parts})
        if not found or any(float(part) != int(part) for part in parts):
            raise ValueError
    except (TypeError, ValueError):
        raise RecipeError(f"Severities must be numbers from 1 to 5 such as 1,3, or all (got {given!r}).") from None
    return found


def _as_list(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Sequence) else []
