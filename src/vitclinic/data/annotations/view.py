"""Augmentation of annotated images: windows and colours drawn from each sample's key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitclinic.data.annotations.annotation import Annotation
from vitclinic.data.annotations.geometry import Window, choose_window
from vitclinic.data.augment import to_unit_interval
from vitclinic.data.crops import change_colours
from vitclinic.data.decoding import Images, Size, is_photo
from vitclinic.data.randomness import Keys, uniforms


@dataclass(frozen=True)
class AnnotatedView:
    """Augmentation of annotated images: random scale, place and flip, which annotations follow, and colours.

    Attributes:
        size: Height and width of the frame in pixels.
        scale: Least and largest factor on an image that just covers the frame; 1 shows all of it.
        flip: Mirror half of the images.
        colour: Strength of changes of brightness, contrast, saturation and hue; 1 is that of self-supervised crops.

    Example:
        >>> view = AnnotatedView((8, 8), scale=(0.5, 2.0), flip=True)
        >>> keys, images = np.arange(2, dtype=np.uint64), np.zeros((2, 16, 16, 3), np.uint8)
        >>> pixels, annotations = view(images, [Annotation(np.zeros((16, 16), np.uint8))] * 2, keys)
        >>> pixels.shape, annotations[0].mask.shape
        (torch.Size([2, 3, 8, 8]), (8, 8))
    """

    size: Size
    scale: tuple[float, float] = (1.0, 1.0)
    flip: bool = False
    colour: float = 0.0

    @property
    def is_heavy(self) -> bool:
        """True if it is slow enough to be worth worker processes."""
        return is_photo(self.size)

    def __call__(
        self, images: Images, annotations: Sequence[Annotation], keys: Keys
    ) -> tuple[Tensor, list[Annotation]]:
        """Return the images [B, C, h, w] in [0, 1], and their annotations."""
        pixels, moved = [], []
        for image, annotation, draw in zip(images, annotations, uniforms(keys, "window", 4), strict=True):
            window = self._draw((image.shape[0], image.shape[1]), draw)
            pixels.append(window.move_pixels(image))
            moved.append(window.move(annotation))
        x_bchw = to_unit_interval(np.stack(pixels))
        if self.colour:
            x_bchw = change_colours(x_bchw, keys, self.colour, grey=0.0)
        return x_bchw, moved

    def _draw(self, size: Size, draw: NDArray[np.float64]) -> Window:
        """Return a window; scales are uniform in their logarithm."""
        low, high = self.scale
        scale = float(np.exp(np.log(low) + draw[0] * (np.log(high) - np.log(low))))
        mirrored = bool(self.flip and draw[3] < 0.5)
        return choose_window(size, self.size, scale, (float(draw[1]), float(draw[2])), mirrored)
