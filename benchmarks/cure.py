"""Does the recipe `small` work better than a plain ViT in the same time, and which of its ingredients pay?

    python benchmarks/cure.py DATA POOL GROUP [--seeds 5] [--only small plain] [--threads 2]

Trains what is not yet in the pool (experiments.Pool), seed by seed and arm by arm, so that the machine's moods hit all
arms alike; adds to docs/results/cure.json and prints the tables of docs/results/cure.md. Groups:

  few         5,000 images, 150 s: small, plain, a CNN of small's size with either recipe
  ablation    the same length: small with each ingredient taken out
  all         all images, 30 min: small, plain, a thin ResNet-18, a compact convolutional transformer as published
  500, 2000, 20000   so many images, 60, 100 and 300 s: small and plain
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import torch
from scipy import stats

from vitclinic._core.io import write_json
from vitclinic._core.statistics import paired_difference
from vitclinic.experiments.runner import Pool
from vitclinic.training import Recipe, Run, build_recipe
from vitclinic.training.overrides import overlay

Changes = dict[str, Any]
RESULTS = Path(__file__).parent.parent / "docs" / "results" / "cure.json"

CNN = {"model": {"name": "preact_resnet18", "stem": "cifar", "channels": [12, 24, 48, 96]}}
"""A thin pre-activation ResNet-18 of 0.39 M parameters, somewhat more than the hybrid ViT has."""
THIN_RESNET = {"model": {"name": "preact_resnet18", "stem": "cifar", "channels": [32, 64, 128, 256]}}
CCT = {
    "model": {"name": "vit_tiny_fitted", "patch_size": 4, "embed_dim": 256, "depth": 7, "num_heads": 4, "mlp_ratio": 2},
    "treatments": [{"conv_stem": {"preset": "small"}}, "sequence_pooling"],
    "optimizer": {"lr": 6e-4, "weight_decay": 0.06},
}
"""CCT-7/3x2 from its description [Hassani et al. 2021], with the plain recipe's augmentation."""
PATCHES = {"name": "vit_tiny_fitted", "class_token": False, "global_pool": "avg", "mlp_ratio": 2.0}

Arms = dict[str, tuple[str, Changes]]
"""By name: a shipped recipe and the changes to it."""
BOTH: Arms = {"small": ("small", {}), "plain": ("plain", {})}
GROUPS: dict[str, tuple[int | None, str, Arms]] = {
    "few": (5000, "150s", {**BOTH, "CNN, recipe plain": ("plain", CNN), "CNN, recipe small": ("small", CNN)}),
    "ablation": (
        5000,
        "150s",
        {
            "small": ("small", {}),
            "convolutions (patches of 4 instead)": (
                "small",
                {"model": {**PATCHES, "embed_dim": 96, "depth": 1, "num_heads": 3}},
            ),
            "attention (no transformer block)": ("small", {"model": {"size": "tiny", "depth": 0}}),
            "Muon (AdamW instead)": ("small", {"optimizer": {"name": "adamw"}}),
            "label smoothing": ("small", {"data": {"augment": {"smoothing": 0.0}}}),
            "linear decay (cosine instead)": ("small", {"schedule": {"name": "cosine"}}),
            "small batches (128 instead of 64)": ("small", {"batch_size": 128}),
            "crop and flip": ("small", {"data": {"augment": {"level": "none"}}}),
        },
    ),
    "all": (None, "30m", {**BOTH, "thin ResNet-18": ("plain", THIN_RESNET), "CCT-7/3x2": ("plain", CCT)}),
    "500": (500, "60s", BOTH),
    "2000": (2000, "100s", BOTH),
    "20000": (20_000, "300s", BOTH),
}


def make_recipe(base: str, changes: Changes, data: str, limit: int | None, time: str, seed: int) -> Recipe:
    """Return a shipped recipe with changes; all arms are validated, and so selected, at the same four times."""
    length = {"data": {"source": data, "limit": limit}, "max_time": time, "seed": seed}
    often = {"validation": "25%", "checkpoint": "50%"}
    return build_recipe(overlay(overlay(build_recipe(base).plain(), changes), {**length, **often}))


def read(run: Run) -> dict[str, Any]:
    """Return what the table needs of an ended run; a diverged one counts as guessing."""
    finished = run.status["status"] == "finished"
    accuracy = run.results["test"]["accuracy"] if finished else 1 / run.spec.num_classes
    images = run.status["step"] * run.recipe.batch_size
    return {"accuracy": accuracy, "status": run.status["status"], "epochs": images / run.data_facts["counts"]["train"]}


def summarize(accuracies: list[float]) -> str:
    """Return mean and 95% t interval over seeds, in percent."""
    mean = 100 * statistics.mean(accuracies)
    if len(accuracies) < 2:
        return f"{mean:.1f}"
    half = stats.t.ppf(0.975, len(accuracies) - 1) * statistics.stdev(accuracies) / math.sqrt(len(accuracies))
    return f"{mean:.1f} ± {100 * half:.1f}"


def print_table(rows: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Print the arms of a group: accuracy, and small's minus theirs, paired by seed."""
    print("| | test accuracy, % | small minus it | epochs | seeds |\n|---|---|---|---|---|")
    for name, seeds in rows.items():
        accuracies = [row["accuracy"] for row in seeds.values()]
        shared = [seed for seed in seeds if seed in rows.get("small", {})]
        difference = ""
        if name != "small" and len(shared) > 1:
            found = paired_difference(
                [seeds[seed]["accuracy"] for seed in shared], [rows["small"][seed]["accuracy"] for seed in shared]
            )
            difference = f"{100 * found.mean:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"
        epochs = statistics.mean(row["epochs"] for row in seeds.values())
        print(f"| {name} | {summarize(accuracies)} | {difference} | {epochs:.0f} | {len(seeds)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("pool")
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    limit, time, arms = GROUPS[options.group]
    pool = Pool(options.pool)
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    rows = results.setdefault(options.group, {}).setdefault("arms", {})
    results[options.group] |= {"images": limit, "time": time, "threads": options.threads, "date": str(date.today())}
    for seed in range(options.seeds):
        for name, (base, changes) in arms.items():
            if options.only is not None and name not in options.only:
                continue
            run = pool.train(make_recipe(base, changes, options.data, limit, time, seed))
            rows.setdefault(name, {})[str(seed)] = found = read(run)
            print(f"{name}, seed {seed}: {found['accuracy']:.1%}, {found['epochs']:.1f} epochs", flush=True)
            write_json(RESULTS, results)
    print_table(rows)


if __name__ == "__main__":
    main()
