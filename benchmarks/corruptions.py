"""Corruptions: images a second, batched, beside the per-image reference of the tests, on the same cores.

    python benchmarks/corruptions.py [--rounds 5] [--sizes 32 224] [--whole]

Needs the [test] extra (scikit-image). Both sides are timed in turns, all five severities each time, and the best of
the rounds counts. The reference is one process, as the published scripts are; with one for each core it would be up to
that many times faster. --whole also corrupts 10,000 images of 32 x 32 pixels in all 95 ways and says how long it took.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.data import corruption_reference as reference

from vitclinic.data import evaluation_batches, open_data
from vitclinic.data.corruptions import NINETEEN, SEVERITIES, Corruption

_DISTINCT = {32: 16, 224: 4}
_BATCH = {32: 256, 224: 16}
"""The same images again and again, since what a JPEG costs depends on the image."""


def pictures(side: int) -> torch.Tensor:
    """Shapes, enlarged where they must be."""
    images = next(evaluation_batches(open_data("shapes:10"), "test", _DISTINCT[side])).images
    if side != 32:
        images = torch.nn.functional.interpolate(images, size=side, mode="bicubic", antialias=True).clamp(0, 1)
    return images.repeat(_BATCH[side] // len(images), 1, 1, 1)


def batched_seconds(name: str, images: torch.Tensor) -> float:
    """For one image, the mean over severities."""
    started = time.perf_counter()
    for severity in SEVERITIES:
        Corruption(name, severity)(images, range(len(images)))
    return (time.perf_counter() - started) / len(SEVERITIES) / len(images)


def reference_seconds(name: str, images: torch.Tensor) -> float:
    pixels = (images * 255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()[: _DISTINCT[images.shape[-1]]]
    random = reference.Drawn()
    started = time.perf_counter()
    for severity in SEVERITIES:
        for image in pixels:
            reference.corrupted(name, severity, image.copy(), random)
    return (time.perf_counter() - started) / len(SEVERITIES) / len(pixels)


def table(sizes: list[int], rounds: int) -> None:
    ratios: list[float] = []
    print("| corruption | " + " | ".join(f"{side} px: batched | reference | ratio" for side in sizes) + " |")
    print("|---" * (1 + 3 * len(sizes)) + "|")
    costs: list[float] = []
    pools = {side: pictures(side) for side in sizes}
    for name in NINETEEN:
        cells = []
        for side, images in pools.items():
            batched_seconds(name, images[:2])  # textures and matrices are made once
            pairs = [(batched_seconds(name, images), reference_seconds(name, images)) for _ in range(rounds)]
            ours, theirs = (min(column) for column in zip(*pairs, strict=True))
            ratios.append(theirs / ours)
            costs += [ours] * (side == 32)
            cells.append(f"{1 / ours:,.0f} | {1 / theirs:,.0f} | {theirs / ours:.2f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    print(f"\nratio: median {statistics.median(ratios):.1f}, least {min(ratios):.2f}; the more, the better")
    if costs:
        minutes = sum(costs) * len(SEVERITIES) * 10_000 / 60
        print(f"10,000 images of 32 px in all 95 ways, by these rates: {minutes:.1f} minutes")


def whole() -> None:
    random = np.random.default_rng(0)
    images = torch.from_numpy(random.integers(0, 256, (10_000, 3, 32, 32), dtype=np.uint8)).float() / 255
    started = time.perf_counter()
    for name in NINETEEN:
        for severity in SEVERITIES:
            for start in range(0, len(images), 256):
                part = images[start : start + 256]
                Corruption(name, severity)(part, range(start, start + len(part)))
        print(f"{name}: after {time.perf_counter() - started:.0f} s", flush=True)
    print(f"10,000 images in all 95 ways: {(time.perf_counter() - started) / 60:.1f} minutes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 224], choices=[32, 224])
    parser.add_argument("--whole", action="store_true")
    chosen = parser.parse_args()
    print(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    table(chosen.sizes, chosen.rounds)
    if chosen.whole:
        whole()


if __name__ == "__main__":
    main()
