"""Where should the scales of CB_S start? Test accuracy of a small ViT for several initial values, equal in all else.

    python benchmarks/cb_scale.py [--seeds 3] [--steps 200]

The embedded handwritten digits; a ViT of width 48, depth 4, patch 2; AdamW 3e-3 with a cosine, weight decay 0.05 on
matrices, batch 64. A seed has the same first weights and the same batches for every value. `none` is the network
without the treatment. Prints a table in Markdown; differences are paired by seed, to the default 0.
"""

from __future__ import annotations

import argparse
import math
import statistics

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from vitclinic import build_recipe, create_model, open_data, treat
from vitclinic.data import Dataset

VALUES = (0.0, 0.01, 0.1, 0.5, None)


def tensors(data: Dataset, split: str) -> tuple[Tensor, Tensor]:
    images = np.asarray(data.splits[split].read(np.arange(len(data.splits[split]))))
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255, torch.from_numpy(data.splits[split].labels)


def accuracy(data: Dataset, value: float | None, seed: int, steps: int) -> float:
    train_x, train_y = tensors(data, "train")
    test_x, test_y = tensors(data, "test")
    torch.manual_seed(seed)
    network = create_model(
        "vit_tiny_fitted", img_size=8, in_chans=1, num_classes=10, patch_size=2, embed_dim=48, depth=4, num_heads=4
    )
    if value is not None:
        treat(network, {"context_broadcasting": {"scaled": True, "initial_scale": value}})
    vectors = [p for p in network.parameters() if p.ndim == 1]
    matrices = [p for p in network.parameters() if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    draw = torch.Generator().manual_seed(seed)
    network.train()
    for _ in range(steps):
        rows = torch.randint(len(train_x), (64,), generator=draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(train_x[rows]), train_y[rows]).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float((network.eval()(test_x).argmax(1) == test_y).float().mean())


def interval(values: list[float]) -> str:
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{100 * statistics.mean(values):.2f} ± {100 * half:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    data = open_data(build_recipe("digits").data)
    found: dict[float | None, list[float]] = {value: [] for value in VALUES}
    for seed in range(options.seeds):
        for value in VALUES:
            found[value].append(accuracy(data, value, seed, options.steps))
            print(f"seed {seed}, initial scale {value}: {found[value][-1]:.4f}", flush=True)
    print(f"\n{len(data.splits['train'])} training images, {len(data.splits['test'])} test images\n")
    print("| initial scale | test accuracy, % | mean, 95% t interval | difference to 0 |\n|---|---|---|---|")
    for value, accuracies in found.items():
        listed = ", ".join(f"{100 * a:.2f}" for a in accuracies)
        beside = "" if value == 0 else interval([a - b for a, b in zip(accuracies, found[0.0], strict=True)])
        print(f"| {'none' if value is None else f'{value:g}'} | {listed} | {interval(accuracies)} | {beside} |")


if __name__ == "__main__":
    main()
