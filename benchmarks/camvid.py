"""How well do small networks segment the road scenes of CamVid in the same time, beside a U-Net of smp?

    python benchmarks/camvid.py CAMVID POOL --measure [--time 15m]        # on a quiet machine, minutes
    python benchmarks/camvid.py CAMVID POOL [--seeds 3] [--only ViT ...]  # any time, any load
    python benchmarks/camvid.py CAMVID POOL --trial                       # two steps of each arm, stored nowhere

Equal time becomes equal steps first, as in cure.py: `--measure` takes turns between the arms, step by step, on two
threads, and stores how many steps of each fit into the time, validations and test included. The runs then make just so
many, so that a score does not depend on what else the machine does, and they can go on in another session: what
docs/results/camvid.json has is not trained again. Six arms of three seeds of 15 minutes are 4.5 hours of two cores.

All networks start from nothing and see whole images of 192 x 256 pixels, which are CamVid's 180 x 240 enlarged.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import segmentation_models_pytorch as smp
import torch
from scipy import stats
from torch import Tensor, nn

from vitclinic._core.distributed import Distributed
from vitclinic._core.io import write_json
from vitclinic._core.time import seconds
from vitclinic.data import ImageSpec, open_data
from vitclinic.experiments.runner import Pool
from vitclinic.models import Headed
from vitclinic.tasks import register
from vitclinic.tasks.segmentation import Segmentation
from vitclinic.training import Recipe, Run, build_recipe
from vitclinic.training.budget import image_counts, measure_costs
from vitclinic.training.overrides import overlay

Changes = dict[str, Any]
RESULTS = Path(__file__).parent.parent / "docs" / "results" / "camvid.json"

VIT = {"name": "vit_tiny_fitted", "patch_size": 16, "embed_dim": 192, "depth": 8, "num_heads": 3, "drop_path_rate": 0.1}
SWIN = {
    **{"name": "swin_tiny_patch4_window7_224", "window_size": 8, "drop_path_rate": 0.1},
    **{"embed_dim": 48, "depths": [2, 2, 4, 2], "num_heads": [2, 4, 8, 16]},
}
HYBRID = {"name": "hybrid_vit", "patch_size": 8, "embed_dim": 96, "depth": 4, "num_heads": 3}
BASE: Changes = {
    "task": {"name": "segmentation", "width": 64},
    "data": {"augment": "light"},
    "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05},
    "schedule": {"name": "linear", "warmup": "5%"},
    "batch_size": 8,
    "validation": "25%",
    "checkpoint": "5%",
}
ARMS: dict[str, Changes] = {
    "ViT": {"model": VIT},
    "ViT + CB": {"model": VIT, "treatments": [{"context_broadcasting": {"layers": "all"}}]},
    "ViT, conv stem": {"model": VIT, "treatments": ["conv_stem"]},
    "hybrid ViT, Muon": {
        "model": HYBRID,
        "task": {"width": 32},
        "optimizer": {"name": "muon", "lr": 1e-2, "weight_decay": 0.1},
    },
    "Swin": {"model": SWIN},
    "ResNet-18 U-Net (smp)": {"model": {"name": "resnet18"}, "task": {"name": "unet", "auxiliary": 0}},
}


class UNet(Headed):
    """smp's U-Net as it is, in the place of a backbone and a head of ours."""

    def __init__(self, spec: ImageSpec) -> None:
        network = smp.Unet("resnet18", encoder_weights=None, in_channels=spec.in_chans, classes=spec.num_classes)
        super().__init__(network.encoder)
        self.decoder, self.head = network.decoder, network.segmentation_head

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.decoder(self.backbone(images)))
        return scores


@register
class UNetSegmentation(Segmentation):
    """Segmentation by smp's U-Net on ResNet-18, whatever the recipe's network; data, loss and scores are ours."""

    name = "unet"
    title = "segmentation by a U-Net"

    def attach(self, backbone: nn.Module, spec: ImageSpec) -> nn.Module:
        return UNet(spec)


def make_recipe(arm: str, data: str, length: Changes, seed: int = 0) -> Recipe:
    """Return the recipe of an arm."""
    size = {"data": {"source": data}, "model": {"img_size": [192, 256]}, "seed": seed}
    return build_recipe(overlay(overlay(BASE, ARMS[arm]), {**size, **length}))


def measure_lengths(data: str, time: str, rounds: int = 5) -> dict[str, int]:
    """Return how many steps of each arm fit into a time, the median of several rounds of taking turns."""
    alone, device = Distributed(), torch.device("cpu")
    recipes = [make_recipe(arm, data, {"max_time": time}) for arm in ARMS]
    dataset = open_data(recipes[0].data, size=recipes[0].image_size)
    counts = image_counts(dataset)
    found = []
    for _ in range(rounds):
        costs = measure_costs(recipes, dataset, alone, device)
        found.append(
            [cost.steps_within(seconds(time), recipe, counts) for cost, recipe in zip(costs, recipes, strict=True)]
        )
        print(*(f"{arm}: {steps}" for arm, steps in zip(ARMS, found[-1], strict=True)), sep=", ", flush=True)
    return {arm: int(statistics.median(steps)) for arm, steps in zip(ARMS, zip(*found, strict=True), strict=True)}


def read(run: Run) -> dict[str, Any]:
    """Return what the table needs of an ended run; a diverged one scores 0."""
    finished = run.status["status"] == "finished"
    test = run.results["test"] if finished else {"miou": 0.0}
    kept = {key: test[key] for key in ("miou", "miou_low", "miou_high", "iou") if key in test}
    return {**kept, "status": run.status["status"], "steps": run.status["step"], "date": str(date.today())}


def print_table(rows: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Print the mean of each arm over seeds with its 95% t interval."""
    print("| network | steps | mIoU on test, % | seeds |\n|---|---|---|---|")
    for arm, seeds in rows.items():
        scores = [100 * row["miou"] for row in seeds.values()]
        text = f"{statistics.mean(scores):.1f}"
        if len(scores) > 1:
            half = stats.t.ppf(0.975, len(scores) - 1) * statistics.stdev(scores) / math.sqrt(len(scores))
            text += f" ± {half:.1f}"
        print(f"| {arm} | {next(iter(seeds.values()))['steps']:,} | {text} | {len(seeds)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("pool")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--time", default="15m")
    parser.add_argument("--only", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--measure", action="store_true", help="measure the arms' steps anew instead of training")
    parser.add_argument("--trial", action="store_true", help="make two steps of each arm, to see that it works")
    options = parser.parse_args()
    pool = Pool(options.pool)
    if options.trial:
        for arm in options.only:
            row = read(pool.train(make_recipe(arm, options.data, {"steps": 2, "validation": "2 steps"})))
            print(f"{arm}: {row['status']}, {row['miou']:.1%}", flush=True)
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    if options.measure:
        torch.set_num_threads(2)
        results |= {"time": options.time, "lengths": measure_lengths(options.data, options.time)}
        write_json(RESULTS, results)
        return
    if "lengths" not in results:
        parser.error("run it with --measure first: it says how many steps each arm makes")
    rows = results.setdefault("arms", {})
    for seed in range(options.seeds):
        for arm in options.only:
            if str(seed) in rows.setdefault(arm, {}):
                continue
            run = pool.train(make_recipe(arm, options.data, {"steps": results["lengths"][arm]}, seed))
            rows[arm][str(seed)] = read(run)
            write_json(RESULTS, results)
            print(f"{arm}, seed {seed}: {rows[arm][str(seed)]['miou']:.1%}", flush=True)
    print_table(rows)


if __name__ == "__main__":
    main()
