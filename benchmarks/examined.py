"""Trained networks under the probes: what the papers' claims look like at the scale of two CPU cores.

    python benchmarks/examined.py CIFAR10 POOL GROUP... [--seeds 3] [--threads 2] [--train-only]

A group is a set of arms (recipes, some at an early epoch), each trained once per seed in the pool
(experiments.Pool), and of probes. Writes every scalar and every unit's values to docs/results/GROUP.json; what is
stored in the pool is not measured again. Three seeds are exploratory: no verdicts.

  minima  AdamW and SAM twins on 2,000 images, trained until AdamW fits them [chen2022 Tables 1, 4]
  early   ViT and ResNet at the end of warm-up [park2022 Fig. 1, 4]; early_batch with BatchNorm by the batch
  initial ResNet, ViT and Mixer before training, in float64, heads of standard deviation 0.02 [chen2022 Table 1]
  layers  ViT, with a conv stem, ResNet, AlterNet, Mixer [park2022 Fig. 8-10; wang2022 Fig. 1; chen2022 Fig. 2]
  depth   12 layers: plain, context_broadcasting, patch_diversity [hyeonwoo2023 Fig. 4, 7; gong2021 Fig. 1, 3]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vitclinic
from remedies import arms as remedy_arms
from vitclinic._core.records import Measurement
from vitclinic.experiments.runner import Pool

Numbers = dict[str, Any]
RESULTS = Path(__file__).parent.parent / "docs" / "results"
CONV = {"stem": "cifar", "channels": [16, 32, 64, 128]}
MODELS: dict[str, Numbers] = {
    "ViT": {"name": "vit_tiny_fitted", "patch_size": 4, "embed_dim": 96, "depth": 6, "num_heads": 3},
    "ResNet": {"name": "preact_resnet18", **CONV},
    "AlterNet": {"name": "alternet18", **CONV},
    "Mixer": {"name": "mixer_s16_224", "patch_size": 4, "embed_dim": 96, "num_blocks": 6},
}
WARMUP = 3
IMAGES = 1000
"""How many test images the probes of the shared pass see."""


@dataclass(frozen=True)
class Arm:
    name: str
    recipe: Numbers
    checkpoint: str = "last"


def small(source: str, model: str, **more: Any) -> Numbers:
    """3,000 images, 10 epochs of crop and flip, the first three of them warm-up."""
    return {
        "model": MODELS[model],
        "data": {"source": source, "limit": 3000, "augment": "light"},
        "epochs": 10,
        "batch_size": 100,
        "validation": "5",
        "checkpoint": {"every": "2", "keep_epochs": [0, WARMUP]},
        "schedule": {"warmup": WARMUP},
        "optimizer": {"lr": 1e-3},
        **more,
    }


def arms(group: str, source: str) -> Iterator[Arm]:
    if group == "early":
        yield from (Arm(name, small(source, name), f"epoch-{WARMUP}") for name in ("ViT", "ResNet"))
    elif group == "early_batch":
        yield Arm("ResNet", small(source, "ResNet"), f"epoch-{WARMUP}")
    elif group == "layers":
        yield Arm("ViT", small(source, "ViT"))
        yield Arm("ViT + conv_stem", small(source, "ViT", treatments=["conv_stem"]))
        yield from (Arm(name, small(source, name)) for name in ("ResNet", "AlterNet", "Mixer"))
    else:
        yield from (Arm(*arm) for arm in remedy_arms({"minima": "sam"}.get(group, group), source))


def untrained(model: str, seed: int) -> nn.Module:
    """A network as training would start from it, but for its head: timm starts Mixer's at 0."""
    torch.manual_seed(seed)
    keywords = dict(MODELS[model])
    network = vitclinic.create_model(keywords.pop("name"), img_size=32, num_classes=10, **keywords)
    for module in network.modules():
        if isinstance(module, nn.Linear) and module.out_features == 10:
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
    return network.double().eval()


def subjects(group: str, options: argparse.Namespace, seed: int) -> Iterator[tuple[str, Numbers, Any, Numbers]]:
    """(arm, what to note of it, target, options of `examine`)."""
    if group == "initial":
        for name in ("ResNet", "ViT", "Mixer"):
            yield name, {}, untrained(name, seed), {"data": options.data, "out": options.pool / "initial"}
        return
    for arm in arms(group, options.data):
        run = Pool(options.pool).train(vitclinic.build_recipe({**arm.recipe, "seed": seed}))
        yield arm.name, {"digest": run.path.name, "test": run.results["test"]}, run.at(arm.checkpoint), {}


STATES = ["fourier", "variance", "cka", "token_similarity", "sparsity"]
ATTENTION = ["attention_entropy", "attention_distance"]
EXAMS: dict[str, list[list[Any]]] = {
    "initial": [["ntk"]],
    "minima": [[{"sharpness": {"images": 128, "density_draws": 0}}, {"flatness": {"images": 256}}]],
    "early": [[{"hessian_spectrum": {"batches": 16}}]],
    "early_batch": [[{"hessian_spectrum": {"batches": 16, "batch_norm": "train"}}]],
    "layers": [[*STATES, *ATTENTION, {"lesion": {"images": 500}}]],
    "depth": [[*STATES, *ATTENTION]],
}


def plain(measurement: Measurement) -> Numbers:
    """Scalars with their intervals, and each unit's values."""
    return {
        "status": measurement.status,
        **({"reason": measurement.reason} if measurement.reason else {}),
        "scalars": {name: scalar.model_dump(exclude_none=True) for name, scalar in measurement.scalars.items()},
        "units": [
            {"name": row.name, "kind": row.kind, "stage": row.stage, **{k: v.value for k, v in row.values.items()}}
            for row in measurement.units
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("pool", type=Path)
    parser.add_argument("groups", nargs="+", choices=list(EXAMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--train-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for group in options.groups:
        results: dict[str, list[Numbers]] = {}
        for seed in range(options.seeds):
            for arm, facts, target, keywords in subjects(group, options, seed):
                if options.train_only:
                    continue
                started = time.perf_counter()
                found: Numbers = {"seed": seed, **facts}
                for probes in EXAMS[group]:
                    exam = vitclinic.examine(target, probes=probes, limit=IMAGES, **keywords)
                    for name, measurement in exam.items():
                        found.setdefault(name, []).append({"config": measurement.config, **plain(measurement)})
                results.setdefault(arm, []).append(found)
                print(group, arm, seed, f"{time.perf_counter() - started:.0f} s", flush=True)
        if results:
            (RESULTS / f"{group}.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
