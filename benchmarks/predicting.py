"""Throughput of `predict` beside a bare batched forward pass of the same network on pixels that are already in memory.

    python benchmarks/predicting.py [--model vit_tiny_patch16_224] [--images 256] [--size 224] [--repeats 9]

The images are JPEG files of coarse noise, 1.5 times the network's size, decoded by one worker per spare core while
the network runs on one thread. Both sides take short turns, the first of each unseen; medians are compared, and the
middle half of the turns' own ratios says how much they scatter. Wants: `predict` within 5% of the bare pass. Wall time
needs a quiet machine with a core to spare, so the load is printed; CPU time of the process that runs the network,
without its workers, hardly does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitclinic.deployment import Predictor
from vitclinic.deployment.predictor import ImageStream
from vitclinic.models import create_model

Times = tuple[float, float]
"""Wall time and CPU time of this process, in seconds."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        files = _write_images(Path(folder), given.images, given.size * 3 // 2)
        predictor = Predictor(create_model(given.model), size=given.size)
        everything = ImageStream(files, predictor.preprocessing)[range(len(files))].images
        turns: list[tuple[Times, Times]] = []
        print(f"load before {_load()}", flush=True)
        for _ in range(given.repeats + 1):  # in turn, so that a slow minute hits both
            bare = _time(lambda: _forward(predictor, everything, given.batch_size))
            turns.append((bare, _time(lambda: list(predictor.stream(files, given.batch_size)))))
    print(f"load after  {_load()}\n{given.model}, {given.images} JPEG files at {given.size}, batch {given.batch_size}")
    for place, what in enumerate(("wall", "CPU")):
        _show(what, [(bare[place], whole[place]) for bare, whole in turns[1:]], given.images)


def _show(what: str, turns: list[tuple[float, float]], images: int) -> None:
    bare, whole = (statistics.median(times) for times in zip(*turns, strict=True))
    low, _, high = statistics.quantiles([second / first - 1 for first, second in turns], n=4)
    rates = f"bare {images / bare:6.1f} images/s, predict {images / whole:6.1f} images/s"
    print(f"{what:4}  {rates}: {whole / bare - 1:+.1%} time (middle half {low:+.1%} to {high:+.1%})")


def _load() -> str:
    return " ".join(f"{load:.1f}" for load in os.getloadavg())


def _write_images(folder: Path, count: int, side: int) -> list[str]:
    random = np.random.default_rng(0)
    for number in range(count):
        coarse = random.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((side, side)).save(folder / f"{number:05}.jpg", quality=90)
    return sorted(map(str, folder.iterdir()))


@torch.inference_mode()
def _forward(predictor: Predictor, images: torch.Tensor, batch_size: int) -> None:
    for batch in images.split(batch_size):
        predictor.network(batch)


def _time(work: Callable[[], object]) -> Times:
    started = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started[0], time.process_time() - started[1]


if __name__ == "__main__":
    main()
