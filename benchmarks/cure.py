"""Does the recipe `small` work better than a plain ViT in the same time, and which of its ingredients pay?

    python benchmarks/cure.py DATA POOL GROUP --measure                         # on a quiet machine, seconds
    python benchmarks/cure.py DATA POOL GROUP [--seeds 5] [--only small plain]  # any time, any load

Equal time becomes equal steps first: `--measure` takes turns between the arms of a group, step by step, on two threads,
and stores how many steps of each fit into the group's time, validations and test included. The runs then make
just so many, so that their accuracy does not depend on what else the machine does, and they can go on in another
session: what docs/results/cure.json has is not trained again. Prints the tables of docs/results/cure.md. Groups:

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

from vitclinic._core.distributed import Distributed
from vitclinic._core.io import write_json
from vitclinic._core.statistics import paired_difference
from vitclinic._core.time import seconds
from vitclinic.data import open_data
from vitclinic.experiments.runner import Pool
from vitclinic.training import Recipe, Run, build_recipe
from vitclinic.training.budget import fit_size, image_counts, measure_costs
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


def make_recipe(base: str, changes: Changes, data: str, limit: int | None, length: Changes, seed: int) -> Recipe:
    """Return a shipped recipe with changes; all arms are validated, and so selected, at the same four times."""
    common = {"data": {"source": data, "limit": limit}, "seed": seed, "validation": "25%", "checkpoint": "50%"}
    return build_recipe(overlay(overlay(build_recipe(base).plain(), changes), {**common, **length}))


def measure_lengths(data: str, limit: int | None, time: str, arms: Arms, rounds: int = 9) -> dict[str, Changes]:
    """Return the recipe keys that make each arm take `time`: steps, and the size that `auto` chooses there."""
    alone, device = Distributed(), torch.device("cpu")
    recipes = [make_recipe(base, changes, data, limit, {"max_time": time}, 0) for base, changes in arms.values()]
    dataset = open_data(recipes[0].data)
    fitted = [fit_size(recipe, dataset, alone, device)[0] for recipe in recipes]
    counts = image_counts(dataset)
    found: list[list[int]] = []
    for _ in range(rounds):
        costs = measure_costs(fitted, dataset, alone, device)
        found.append(
            [cost.steps_within(seconds(time), recipe, counts) for cost, recipe in zip(costs, fitted, strict=True)]
        )
        print(*(f"{name}: {steps}" for name, steps in zip(arms, found[-1], strict=True)), sep=", ", flush=True)
    lengths: dict[str, Changes] = {}
    for name, recipe, steps in zip(arms, fitted, zip(*found, strict=True), strict=True):
        size = recipe.model.keywords.get("size")
        lengths[name] = {"steps": int(statistics.median(steps))} | ({"model": {"size": size}} if size else {})
    return lengths


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


def load() -> dict[str, Any]:
    """Return what is known so far, of all groups."""
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


def store(group: str, found: dict[str, Any], under: list[str]) -> None:
    """Add what was found to a group of the results, which another process may have written to meanwhile."""
    results = load()
    place = results.setdefault(group, {})
    for key in under:
        place = place.setdefault(key, {})
    place |= found
    write_json(RESULTS, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("pool")
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--measure", action="store_true", help="measure the arms' steps anew instead of training")
    options = parser.parse_args()
    limit, time, arms = GROUPS[options.group]
    if options.measure:
        torch.set_num_threads(2)
        store(options.group, {"images": limit, "time": time, "measured": str(date.today())}, [])
        store(options.group, measure_lengths(options.data, limit, time, arms), ["lengths"])
        return
    pool = Pool(options.pool)
    for seed in range(options.seeds):
        for name, (base, changes) in arms.items():
            group = load().get(options.group, {})
            done = str(seed) in group.get("arms", {}).get(name, {})
            if done or (options.only is not None and name not in options.only):
                continue
            run = pool.train(make_recipe(base, changes, options.data, limit, group["lengths"][name], seed))
            found = read(run) | {"date": str(date.today())}
            store(options.group, {str(seed): found}, ["arms", name])
            print(f"{name}, seed {seed}: {found['accuracy']:.1%}, {found['epochs']:.1f} epochs", flush=True)
    print_table(load()[options.group]["arms"])


if __name__ == "__main__":
    main()
