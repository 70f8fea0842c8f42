"""Draws docs/corruptions.jpg: every corruption at every severity, at 224 and at 32 pixels.

    python docs/make_corruptions.py LARGE SMALL [--index N]

LARGE and SMALL are data sources whose test image N is shown; without them the embedded shapes are, enlarged.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

from vitclinic.data import evaluation_batches, open_data
from vitclinic.data.corruptions import NINETEEN, SEVERITIES, corrupt

_CELL, _LABEL, _GAP = 96, 130, 2


def picture(source: str | None, index: int, size: int) -> Tensor:
    """[1, C, size, size]."""
    if source is None:
        image = next(evaluation_batches(open_data("shapes:10"), "test", index + 1)).images[index:]
        return F.interpolate(image, size=size, mode="bicubic", antialias=True).clamp(0, 1)
    dataset = open_data(source, size=size)
    return next(evaluation_batches(dataset, "test", index + 1)).images[index:]


def tile(image: Tensor) -> Image.Image:
    small = image.shape[-1] < _CELL
    how = Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
    pixels = (image[0] * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(pixels).resize((_CELL, _CELL), how)


def sheet(images: list[Tensor]) -> Image.Image:
    step = _CELL + _GAP
    width = _LABEL + len(images) * len(SEVERITIES) * step + (len(images) - 1) * 8
    page = Image.new("RGB", (width, 16 + len(NINETEEN) * step), "white")
    draw = ImageDraw.Draw(page)
    for line, name in enumerate(NINETEEN):
        top = 16 + line * step
        draw.text((4, top + _CELL // 2 - 5), name, fill="black")
        for number, image in enumerate(images):
            for column, severity in enumerate(SEVERITIES):
                left = _LABEL + (number * len(SEVERITIES) + column) * step + number * 8
                if line == 0:
                    draw.text((left + 2, 2), f"{image.shape[-1]} px, {severity}", fill="black")
                page.paste(tile(corrupt(image, name, severity)), (left, top))
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("large", nargs="?")
    parser.add_argument("small", nargs="?")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("corruptions.jpg"))
    chosen = parser.parse_args()
    images = [picture(chosen.large, chosen.index, 224), picture(chosen.small, chosen.index, 32)]
    sheet(images).save(chosen.out, quality=80)


if __name__ == "__main__":
    main()
