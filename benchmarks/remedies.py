"""What the remedies do on real data, each in the regime of its paper's claim, at the scale of two CPU cores.

    python benchmarks/remedies.py CIFAR10 POOL [--seeds 3] [--only sam stem depth] [--threads 1]

Trains what is not yet in the pool (experiments.Pool), measures every run, writes docs/results/remedies.json and
prints the tables of docs/results/remedies.md. Three seeds are exploratory: no verdicts.

  sam    AdamW against SAM on 2,000 images without augmentation, epochs enough that AdamW fits them [chen2022]
  depth  a 12-layer ViT: plain, context_broadcasting [hyeonwoo2023], patch_diversity [gong2021]
  stem   patchify against conv_stem over a sweep of learning rates, without warm-up [wang2022]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn

from vitclinic.anatomy import Anatomy, AttentionMap, record_attention, stream
from vitclinic.data import Dataset, evaluation_batches, open_data
from vitclinic.experiments.runner import Pool
from vitclinic.training import Run, build_recipe, load_model

Numbers = dict[str, Any]
RESULTS = Path(__file__).parent.parent / "docs" / "results" / "remedies.json"
SHALLOW = {"name": "vit_tiny_fitted", "patch_size": 8, "embed_dim": 96, "depth": 6, "num_heads": 3}
DEEP = {"name": "vit_tiny_fitted", "patch_size": 8, "embed_dim": 64, "depth": 12, "num_heads": 4}
SMALL = {"name": "vit_tiny_fitted", "patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4}
RATES = (1e-3, 4e-3, 1.6e-2, 6.4e-2)


def arms(group: str, source: str) -> Iterator[tuple[str, Numbers]]:
    """(name of the arm, recipe without seed)."""
    if group == "sam":
        base = {
            "model": SHALLOW,
            "data": {"source": source, "limit": 2000, "augment": "none"},
            "epochs": 60,
            "batch_size": 100,
            "validation": "10",
            "checkpoint": "10",
            "optimizer": {"lr": 1e-3},
        }
        yield "AdamW", base
        yield "AdamW + SAM, rho 0.1", {**base, "treatments": [{"sam": {"rho": 0.1}}]}
    elif group == "depth":
        base = {
            "model": DEEP,
            "data": {"source": source, "limit": 5000},
            "epochs": 10,
            "batch_size": 100,
            "validation": "5",
            "checkpoint": "2",
            "optimizer": {"lr": 1e-3},
        }
        yield "plain", base
        yield "context_broadcasting", {**base, "treatments": ["context_broadcasting"]}
        yield "patch_diversity", {**base, "treatments": ["patch_diversity"]}
    else:
        for rate in RATES:
            base = {
                "model": SMALL,
                "data": {"source": source, "limit": 2000},
                "epochs": 5,
                "batch_size": 50,
                "validation": "5",
                "checkpoint": "5",
                "clip": None,
                "optimizer": {"lr": rate},
                "schedule": {"warmup": 0},
            }
            yield f"patchify, lr {rate:g}", base
            yield f"conv_stem, lr {rate:g}", {**base, "treatments": ["conv_stem"]}


def batches(data: Dataset, split: str, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    seen = 0
    for batch in evaluation_batches(data, split, 100):
        yield batch.images, batch.targets
        seen += len(batch)
        if seen >= limit:
            return


def mean_loss(network: nn.Module, data: Dataset) -> float:
    """Softmax cross-entropy over the training images, unaugmented, in evaluation mode."""
    with torch.no_grad():
        sums = [
            (nn.functional.cross_entropy(network(x), y, reduction="sum"), len(x))
            for x, y in batches(data, "train", 10**9)
        ]
    return float(sum(loss for loss, _ in sums)) / sum(count for _, count in sums)


def rise_along_gradient(network: nn.Module, data: Dataset, radius: float = 0.1) -> Numbers:
    """Training loss at w, and at w + radius g / |g|, g the gradient over all training images."""
    network.zero_grad()
    for x, y in batches(data, "train", 10**9):
        (nn.functional.cross_entropy(network(x), y, reduction="sum") / len(data.train)).backward()
    parameters = [p for p in network.parameters() if p.grad is not None]
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in parameters))
    at = mean_loss(network, data)
    with torch.no_grad():
        for p in parameters:
            p.add_(p.grad, alpha=radius / norm)
    above = mean_loss(network, data)
    return {"train_nll": at, "rise": above - at, "gradient_norm": norm}


def class_token_entropy(network: nn.Module, data: Dataset) -> Numbers:
    """-sum a log a of the class token's attention, mean over heads and 1,000 test images, per layer."""
    sums: dict[str, list[float]] = defaultdict(list)

    def consume(found: AttentionMap) -> None:
        a_bhk = found.weights[:, :, 0].double()
        sums[found.unit.name].append(float(-torch.xlogy(a_bhk, a_bhk).sum(-1).mean()))
        sums["maximum"].append(math.log(a_bhk.shape[-1]))

    with torch.no_grad(), record_attention(Anatomy.of(network).of_kind("msa"), consume):
        for x, _ in batches(data, "test", 1000):
            network(x)
    return {"entropy": {name: statistics.mean(values) for name, values in sums.items()}}


def patch_similarity(network: nn.Module, data: Dataset) -> Numbers:
    """Mean |cosine| over pairs of patches, on 1,000 training images [gong2021], per unit output and after the norm."""
    anatomy = Anatomy.of(network)
    sites = {unit.name: unit.output for unit in anatomy.units if unit.kind in ("stem", "position", "msa", "mlp")}
    sums: dict[str, list[float]] = defaultdict(list)

    def add(name: str, h_bnd: Tensor) -> None:
        unit = nn.functional.normalize(h_bnd.double(), dim=-1)
        gram = (unit @ unit.transpose(1, 2)).abs()
        n = gram.shape[-1]
        sums[name].append(float((gram.sum((1, 2)) - gram.diagonal(dim1=1, dim2=2).sum(1)).mean() / (n * (n - 1))))

    def consume(name: str, activation: Tensor) -> None:
        grid = anatomy.grid(sites[name], activation)
        add(name, grid.flatten(2).transpose(1, 2))
        if name == anatomy.units[-2].name:
            h_bcn = anatomy.network.norm(grid.flatten(2).transpose(1, 2))
            add("final norm", h_bcn)

    with torch.no_grad(), stream(sites, consume):
        for x, _ in batches(data, "train", 1000):
            network(x)
    return {"similarity": {name: statistics.mean(values) for name, values in sums.items()}}


MEASURES: dict[str, list[Callable[[nn.Module, Dataset], Numbers]]] = {
    "sam": [rise_along_gradient],
    "depth": [class_token_entropy, patch_similarity],
    "stem": [],
}


def measured(run: Run, group: str, data: Dataset) -> Numbers:
    """How a run ended, the test accuracy of its best checkpoint, and the group's measures on its last."""
    numbers: Numbers = {"status": run.status["status"], "digest": run.path.name}
    if run.status["status"] == "diverged":
        return {**numbers, "step": run.status["step"]}
    numbers["test_accuracy"] = run.results["test"]["accuracy"]
    for measure in MEASURES[group]:
        numbers |= measure(load_model(run.path, "last"), data)
    return numbers


def interval(values: list[float], digits: int = 3) -> str:
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)) if values[1:] else 0
    return f"{statistics.mean(values):.{digits}f} ± {half:.{digits}f}"


def table(group: str, rows: dict[str, list[Numbers]]) -> None:
    """Every arm with its measures, mean and 95% t interval over seeds."""
    print(f"\n### {group}\n")
    for name, seeds in rows.items():
        done = [row for row in seeds if row["status"] == "finished"]
        cells = [f"{len(done)} of {len(seeds)} finished"]
        for key in ("test_accuracy", "train_nll", "rise"):
            if done and key in done[0]:
                cells.append(f"{key} {interval([row[key] for row in done])}")
        for key, unit in (("entropy", None), ("similarity", "final norm")):
            if done and key in done[0]:
                shown = [unit] if unit else list(done[0][key])
                cells += [f"{key} {at}: {interval([row[key][at] for row in done])}" for at in shown]
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("pool", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(MEASURES), choices=list(MEASURES))
    parser.add_argument("--arms", help="only arms with a name like 'patchify*'; nothing is written then")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pool = Pool(options.pool)
    results: Numbers = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for group in options.only:
        rows: dict[str, list[Numbers]] = {}
        for name, recipe in arms(group, options.data):
            if not fnmatch(name, options.arms or "*"):
                continue
            data = open_data(build_recipe(recipe).data)
            runs = [pool.train(build_recipe({**recipe, "seed": seed})) for seed in range(options.seeds)]
            rows[name] = [measured(run, group, data) for run in runs]
        table(group, rows)
        if options.arms is None:
            results[group] = rows
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
