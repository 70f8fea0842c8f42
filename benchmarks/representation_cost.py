"""What a step of `dino` and of `contrastive` costs beside the sum of its passes through the network and its update.

    python benchmarks/representation_cost.py CIFAR10 [--rounds 15]

The ViT of width 96, depth 6, patch 4 at 32 x 32, 64 images, AdamW, clipping at 1. The step is the trainer's, on images
that were drawn before. The passes are the same network and heads on the same crops: student forward and backward (two
global, four local crops, or two views), the teacher forward, each with the mean of its outputs in place of the loss;
then clipping and the optimizer. So what is above 1 is losses, centring, moving averages and bookkeeping. Steps and
passes take turns in one process; printed is the median of their ratios with quartiles. Time is the processor time of
this process, so that other work on the machine matters little; use one thread (OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from vitclinic._core.distributed import ALONE
from vitclinic.data import Batch, open_data
from vitclinic.tasks.dino_criterion import DinoCriterion
from vitclinic.tasks.pairwise_losses import ContrastiveCriterion
from vitclinic.training import build_recipe
from vitclinic.training.trainer import Trainer

MODEL = {"name": "vit_tiny_fitted", "patch_size": 4, "embed_dim": 96, "depth": 6, "num_heads": 3}
TASKS = {
    "dino": {"name": "dino"},
    "dino, Sinkhorn": {"name": "dino", "centring": "sinkhorn", "outputs": 128},
    "contrastive": {"name": "contrastive"},
}
WANTED = 1.05
GLOBAL = 2


def make_trainer(source: str, task: dict[str, object]) -> tuple[Trainer, Batch]:
    """Return a trainer that sees the same images at every step, and these."""
    recipe = build_recipe(
        {"model": MODEL, "task": task, "data": source, "batch_size": 64, "steps": 10**6, "clip": 1.0, "workers": 0}
    )
    trainer = Trainer(recipe, open_data(recipe.data), 10**6, ALONE, torch.device("cpu"))
    trainer.advance()  # it makes the optimizer's state, and reads
    [batch] = trainer._next_batches()
    trainer._batches = itertools.repeat(batch)
    return trainer, batch


def make_passes(trainer: Trainer, batch: Batch) -> Callable[[], None]:
    """Return a function that makes the passes of a step, clips and updates."""
    criterion, views = trainer.criterion, [batch.images, *batch.crops]
    optimizer, parameters = trainer.optimizer, trainer.parameters

    def differentiate(crops: list[torch.Tensor], head: nn.Module) -> None:
        head(trainer.network(torch.cat(crops))).mean().backward()

    def passes() -> None:
        if isinstance(criterion, DinoCriterion):
            with torch.no_grad():
                criterion.teacher_head(criterion.teacher(torch.cat(views[:GLOBAL])))
            differentiate(views[:GLOBAL], criterion.head)
            differentiate(views[GLOBAL:], criterion.head)
        else:
            assert isinstance(criterion, ContrastiveCriterion)
            differentiate(views, criterion.head)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return passes


def seconds(act: Callable[[], object]) -> float:
    started = time.process_time()
    act()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print("| task | ratio, quartiles | step, ms | wanted |\n|---|---|---|---|")
    for name, task in TASKS.items():
        trainer, batch = make_trainer(options.data, task)
        passes = make_passes(trainer, batch)
        passes()
        times = [(seconds(trainer.advance), seconds(passes)) for _ in range(options.rounds)]
        low, middle, high = statistics.quantiles((step / parts for step, parts in times), n=4)
        step = 1000 * statistics.median(step for step, _ in times)
        print(f"| {name} | {middle:.3f} ({low:.3f} to {high:.3f}) | {step:.0f} | {WANTED} |", flush=True)


if __name__ == "__main__":
    main()
