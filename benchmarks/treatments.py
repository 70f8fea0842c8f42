"""What each treatment costs: the time of a training step beside the plain step of the same network.

    python benchmarks/treatments.py CIFAR10 [--rounds 15] [--only sam ...]
    python benchmarks/treatments.py CIFAR10 --sizes     # a step at smaller images beside one at full size

The ViT of width 96, depth 6, patch 4 at 32 x 32, batch 128, AdamW, clipping at 1, crop and flip; local attention on
patch 2, a grid of 16 x 16, batch 32. Treated and plain steps alternate in one process; printed is the median of their
ratios with quartiles. LookSAM's ratio is that of the sum of five steps, its period. Time is the processor time of this
process, so that other work on the machine matters little; use one thread (OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from vitclinic._core.distributed import ALONE
from vitclinic.data import open_data
from vitclinic.training import build_recipe
from vitclinic.training.resizing import ImageSizes
from vitclinic.training.trainer import Trainer

MODEL = {"name": "vit_tiny_fitted", "patch_size": 4, "embed_dim": 96, "depth": 6, "num_heads": 3}
FINE = {**MODEL, "patch_size": 2}
GOALS: dict[str, tuple[list[Any], dict[str, Any], int, float]] = {
    "context_broadcasting": (["context_broadcasting"], MODEL, 1, 1.02),
    "context_broadcasting, scaled": ([{"context_broadcasting": {"scaled": True}}], MODEL, 1, 1.02),
    "sam": (["sam"], MODEL, 1, 2.05),
    "sam, every 5 (LookSAM)": ([{"sam": {"every": 5}}], MODEL, 5, 1.35),
    "patch_diversity": (["patch_diversity"], MODEL, 1, 1.15),
    "patch_dropout, 0.25": ([{"patch_dropout": {"rate": 0.25}}], MODEL, 1, 0.8),
    "patch_dropout, 0.5": ([{"patch_dropout": {"rate": 0.5}}], MODEL, 1, 0.55),
    "patch_dropout, 0.75": ([{"patch_dropout": {"rate": 0.75}}], MODEL, 1, 0.35),
    "local_attention, 3 x 3 of 16 x 16": ([{"local_attention": {"kernel": 3}}], FINE, 1, 1.05),
}
"""Treatments, network, steps a measurement, and the ratio that is wanted."""


NETWORKS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "ViT": (MODEL, []),
    "ViT with conv_stem": (MODEL, ["conv_stem"]),
    "ViT with patch_dropout 0.5": (MODEL, ["patch_dropout"]),
    "pre-activation ResNet-18, a quarter as wide": (
        {"name": "preact_resnet18", "stem": "cifar", "channels": [16, 32, 64, 128]},
        [],
    ),
}
"""Networks and treatments to make steps at smaller images with."""


def trainer(source: str, model: dict[str, Any], treatments: list[Any], **changes: Any) -> Trainer:
    batch_size = 32 if model is FINE else 128
    recipe = build_recipe(
        {"model": model, "data": source, "batch_size": batch_size, "steps": 10**6, "treatments": treatments, **changes}
    )
    return Trainer(recipe, open_data(recipe.data), 10**6, ALONE, torch.device("cpu"))


def seconds(of: Trainer, steps: int) -> float:
    started = time.process_time()
    for _ in range(steps):
        of.advance()
    return time.process_time() - started


def compare_sizes(source: str, rounds: int) -> None:
    """Print the time of a step at each of four smaller sizes, relative to one at full size."""
    for name, (model, treatments) in NETWORKS.items():
        made = trainer(source, model, treatments, progressive_resizing={"start": 0.5, "stages": 4})
        sizes, full = made.sizes.sizes, made.sizes.full
        times: dict[Any, list[float]] = {size: [] for size in sizes}
        for _ in range(rounds + 1):
            for size in sizes:
                made.sizes = ImageSizes([size, full], ends=[10**9])
                times[size].append(seconds(made, 1))
        parts = []
        for size, taken in times.items():
            ratios = [a / b for a, b in zip(taken[1:], times[full][1:], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            parts.append(f"{size[0]}: {middle:.3f} ({low:.3f} to {high:.3f})")
        step = 1000 * statistics.median(times[full][1:])
        print(f"{name:44s} {step:6.0f} ms at {full[0]}; {', '.join(parts)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", help="treatments whose name starts like one of these")
    parser.add_argument("--sizes", action="store_true", help="compare image sizes instead")
    options = parser.parse_args()
    if options.sizes:
        return compare_sizes(options.data, options.rounds)
    print(f"{'treatment':36s} plain step   ratio (quartiles), wanted at most")
    for name, (treatments, model, steps, wanted) in GOALS.items():
        if options.only and not name.startswith(tuple(options.only)):
            continue
        plain, treated = trainer(options.data, model, []), trainer(options.data, model, treatments)
        seconds(plain, 2)
        seconds(treated, 2 * steps)
        rounds = max(3, options.rounds // steps)
        pairs = [(seconds(treated, steps), seconds(plain, steps)) for _ in range(rounds)]
        low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        step = 1000 * statistics.median(b for _, b in pairs) / steps
        print(f"{name:36s} {step:7.0f} ms   {middle:.3f} ({low:.3f} to {high:.3f}), {wanted}", flush=True)


if __name__ == "__main__":
    main()
