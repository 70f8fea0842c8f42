"""How much of a landscape's time is forward passes, and how long a point takes.

    PYTHONPATH=src python benchmarks/landscape.py [--images 256] [--points 21] [--rounds 3]

The ViT of width 96, depth 6, patch 4 at 32 x 32, random weights, random images, batches of 64, one thread. The whole
probe is timed: reading the images, the check of determinism, directions, displacements, saved points. A forward pass is
all that happens between a batch of images and its loss. Expected: at least 95% inside.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from vitclinic.data import Batch, open_data
from vitclinic.probes import Landscape, Subject
from vitclinic.probes.curvature.loss_surface import LossSurface


@contextmanager
def timed_passes() -> Iterator[list[float]]:
    """The seconds of each forward pass made inside."""
    inside: list[float] = []
    original = LossSurface.total_loss

    def timed(self: LossSurface, batch: Batch) -> Tensor:
        start = time.perf_counter()
        try:
            return original(self, batch)
        finally:
            inside.append(time.perf_counter() - start)

    setattr(LossSurface, "total_loss", timed)  # noqa: B010
    try:
        yield inside
    finally:
        setattr(LossSurface, "total_loss", original)  # noqa: B010


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--points", type=int, default=21)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    small: dict[str, Any] = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 6, "num_heads": 3}
    network = timm.models.VisionTransformer(num_classes=10, **small).eval()
    dataset = open_data(f"shapes:{2 * arguments.images}", size=(32, 32))
    probe = Landscape(points=arguments.points, images=arguments.images)
    shares, points = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            scratch = {"landscape": Path(folder) / f"{number}.partial"}
            subject = probe.view(Subject(network, dataset, scratch=scratch))
            with timed_passes() as inside:
                start = time.perf_counter()
                probe.measure(subject)
                whole = time.perf_counter() - start
            shares.append(sum(inside) / whole)
            points.append(whole / arguments.points**2)
    count = sum(p.numel() for p in network.parameters())
    print(f"{count / 1e6:.2f} M parameters, {len(subject)} images, {arguments.points} x {arguments.points} points")
    print(f"inside forward passes: {statistics.median(shares):.2%} (rounds: {', '.join(f'{s:.2%}' for s in shares)})")
    print(f"per point: {statistics.median(points) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
