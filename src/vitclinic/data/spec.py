"""The shape of the images that a network takes, and the number of classes that it tells apart."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ImageSpec:
    """Input shape and number of classes that a network must have, named as in timm's `create_model`.

    Example:
        >>> spec = ImageSpec(num_classes=10, in_chans=3, img_size=(32, 32))
        >>> spec.img_size
        (32, 32)
    """

    num_classes: int
    in_chans: int
    """Channels of an image: 1 (grey) or 3."""
    img_size: tuple[int, int]
    """Height and width in pixels."""
