"""Does anything in the pipeline cost learning? `vitclinic train` against a bare loop with the same settings.

    python benchmarks/accuracy.py CIFAR10 [--seeds 3] [--out runs/accuracy]

5,000 training images of CIFAR-10, the ViT of width 96, depth 6, patch 4; crop and flip; AdamW 1e-3, weight decay
0.05, clipping at 1, 5% warm-up and cosine, 12 epochs, batch 128. The bare loop shares the network's class and the
choice of images with vitclinic, and nothing else: order, augmentation, normalisation, optimizer and schedule are
plain PyTorch, written out below. Finished runs in `--out` are not repeated. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from vitclinic.data import Dataset, open_data
from vitclinic.models import create_model
from vitclinic.training import Run, build_recipe, resume, train

EPOCHS, BATCH, RATE, DECAY = 12, 128, 1e-3, 0.05
WIDTH = {"patch_size": 4, "embed_dim": 96, "depth": 6, "num_heads": 3}


def tensors(data: Dataset, split: str) -> tuple[Tensor, Tensor]:
    images = np.asarray(data.splits[split].read(np.arange(len(data.splits[split]))))
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    return pixels, torch.from_numpy(data.splits[split].labels)


def crop_and_flip(images: Tensor) -> Tensor:
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    result = torch.empty_like(images)
    for row in range(len(images)):
        y, x = torch.randint(0, 9, (2,)).tolist()
        view = padded[row, :, y : y + 32, x : x + 32]
        result[row] = view.flip(-1) if torch.rand(()) < 0.5 else view
    return result


def bare_loop(data: Dataset, seed: int) -> float:
    """Test accuracy after the last epoch."""
    torch.manual_seed(seed)
    train_x, train_y = tensors(data, "train")
    mean, std = train_x.mean((0, 2, 3)).tolist(), train_x.std((0, 2, 3)).tolist()
    network = create_model("vit_tiny_patch16_224", img_size=32, num_classes=10, mean=mean, std=std, **WIDTH)
    plain = [p for n, p in network.named_parameters() if p.ndim == 1 or n.endswith(("cls_token", "pos_embed"))]
    exempt = {id(p) for p in plain}
    matrices = [p for p in network.parameters() if id(p) not in exempt]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}])
    total = math.ceil(EPOCHS * len(train_x) / BATCH)
    step = 0
    while step < total:
        for rows in torch.randperm(len(train_x)).split(BATCH):
            if step == total:
                break
            warm = total * 0.05
            factor = (step + 1) / warm if step < warm else (1 + math.cos(math.pi * (step - warm) / (total - warm))) / 2
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, factor)
            loss = nn.functional.cross_entropy(network(crop_and_flip(train_x[rows])), train_y[rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            step += 1
    network.eval()
    test_x, test_y = tensors(data, "test")
    with torch.no_grad():
        correct = sum(
            (network(x).argmax(1) == y).sum() for x, y in zip(test_x.split(500), test_y.split(500), strict=True)
        )
    return float(correct) / len(test_y)


def ours(source: str, seed: int, out: Path) -> float:
    """Test accuracy that the run reports (its best checkpoint on val)."""
    recipe = build_recipe("cifar10", {"data": source, "seed": seed, "validation.every": 4, "out": out})
    if not (out / "recipe.yaml").exists():
        train(recipe)
    elif Run.open(out).status["status"] != "finished":
        resume(out)
    return float(Run.open(out).results["test"]["accuracy"])


def interval(values: list[float]) -> str:
    mean = statistics.mean(values)
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{100 * mean:.2f} ± {100 * half:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/accuracy"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    data = open_data(build_recipe("cifar10", {"data": options.data}).data)
    stored = options.out / "bare.json"
    bare: dict[str, float] = json.loads(stored.read_text()) if stored.exists() else {}
    pairs = []
    for seed in range(options.seeds):
        started = time.perf_counter()
        mine = ours(options.data, seed, options.out / f"seed-{seed}")
        if str(seed) not in bare:
            bare[str(seed)] = bare_loop(data, seed)
            stored.write_text(json.dumps(bare))
        pairs.append((mine, bare[str(seed)]))
        print(f"seed {seed}: {mine:.4f} {bare[str(seed)]:.4f} ({time.perf_counter() - started:.0f} s)", flush=True)
    mine, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    print("\n| | test accuracy, % | mean, 95% t interval |\n|---|---|---|")
    for name, values in [("vitclinic train", mine), ("bare loop", theirs)]:
        print(f"| {name} | {', '.join(f'{100 * v:.2f}' for v in values)} | {interval(values)} |")
    print(f"| difference | | {interval([a - b for a, b in pairs])} |")


if __name__ == "__main__":
    main()
