"""Images per second of `vitclinic train`, beside a bare PyTorch loop and timm's training-script pattern.

    python benchmarks/training.py CIFAR10 [--rounds 12] [--steps 6]

CIFAR10 is anything `data=` takes (a folder of parquet files, torchvision:CIFAR10@ROOT). The network is the ViT
of width 96, depth 6, patch 4 at 32 x 32, the batch 128, AdamW, clipping at 1. All arms take turns in one process:
two steps unmeasured (they use up what a worker read ahead while others ran), then `--steps` measured ones, of which
the median counts. Printed is the median over rounds of each arm's ratio to its reference in the same round, with
quartiles: the machine's moods cancel.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitclinic.data import open_data
from vitclinic.data.augment import keep_a_bit
from vitclinic.models import create_model
from vitclinic.training import build_recipe
from vitclinic.training.distributed import World
from vitclinic.training.loop import Trainer

BATCH = 128
WARM_UP = 2
MODEL = {"name": "vit_tiny_fitted", "patch_size": 4, "embed_dim": 96, "depth": 6, "num_heads": 3}
Turn = Callable[[int], float]
"""Makes a number of steps after the warm-up, and returns the median seconds of one."""


def bare_step(network: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, targets: Tensor) -> None:
    loss = nn.functional.cross_entropy(network(images), targets)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    loss.item()


def timed(steps: int, step: Callable[[], None]) -> float:
    times = []
    for _ in range(WARM_UP + steps):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:])


def reference_network() -> tuple[nn.Module, torch.optim.Optimizer]:
    keywords = {key: value for key, value in MODEL.items() if key != "name"}
    network = create_model(str(MODEL["name"]), img_size=32, num_classes=10, **keywords).train()
    return network, torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.05)


def bare_turn() -> Turn:
    """The same network on one ready batch of tensors."""
    network, optimizer = reference_network()
    images, targets = torch.rand(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    return lambda steps: timed(steps, lambda: bare_step(network, optimizer, images, targets))


def our_turn(source: str, augment: str) -> Turn:
    recipe = build_recipe(
        {"model": MODEL, "data": {"source": source, "augment": augment}, "batch_size": BATCH, "steps": 10**6}
    )
    trainer = Trainer(recipe, open_data(recipe.data), 10**6, World(), torch.device("cpu"))
    return lambda steps: timed(steps, lambda: trainer.advance())


class InMemory(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Decoded images behind a timm transform: what timm's training script reads from."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, transform: Callable[[Image.Image], Tensor]) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), int(self.labels[index])


def timm_turn(source: str, level: str, workers: int) -> Turn:
    """timm's train.py: its transform, its Mixup, a DataLoader, its optimizer factory, its meters."""
    from timm.data import Mixup, create_transform
    from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.utils import AverageMeter, dispatch_clip_grad

    data = open_data(source)
    strong = level == "deit"
    policy = {"auto_augment": "rand-m9-n2-mstd0.5-inc1", "re_prob": 0.25, "re_mode": "pixel"} if strong else {}
    transform = create_transform(32, is_training=True, color_jitter=0.0, scale=(0.6, 1.0), **policy)
    if strong:
        keep_a_bit(next(part for part in transform.transforms if hasattr(part, "ops")))
    images = np.asarray(data.train.read(np.arange(len(data.train))))
    loader = torch.utils.data.DataLoader(
        InMemory(images, data.train.labels, transform), BATCH, shuffle=True, num_workers=workers, drop_last=True
    )
    mix = Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=10) if strong else None
    criterion = SoftTargetCrossEntropy() if strong else LabelSmoothingCrossEntropy(0.0)
    network = reference_network()[0].backbone
    optimizer = create_optimizer_v2(network, "adamw", lr=1e-3, weight_decay=0.05)
    meter = AverageMeter()
    batches: Iterator[tuple[Tensor, Tensor]] = iter(loader)

    def step() -> None:
        x, y = next(batches)
        if mix is not None:
            x, y = mix(x, y)
        optimizer.zero_grad()
        loss = criterion(network(x), y)
        loss.backward()
        dispatch_clip_grad(network.parameters(), 1.0)
        optimizer.step()
        meter.update(loss.item(), len(x))

    return lambda steps: timed(steps, step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    arms: dict[str, tuple[Turn, str | None, float]] = {
        "bare loop, ready tensors": (bare_turn(), None, 0),
        "vitclinic none": (our_turn(options.data, "none"), "bare loop, ready tensors", 0.97),
        "vitclinic light": (our_turn(options.data, "light"), "bare loop, ready tensors", 0.95),
        "vitclinic deit": (our_turn(options.data, "deit"), "bare loop, ready tensors", 0.85),
        "timm light, 1 worker": (timm_turn(options.data, "light", 1), "bare loop, ready tensors", 0),
        "timm deit, 1 worker": (timm_turn(options.data, "deit", 1), "bare loop, ready tensors", 0),
        "timm deit, in process": (timm_turn(options.data, "deit", 0), "bare loop, ready tensors", 0),
    }
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(options.rounds):
        for name, (turn, _, _) in arms.items():
            rates[name].append(BATCH / turn(options.steps))
        print(f"round {number + 1}/{options.rounds}", {name: round(r[-1]) for name, r in rates.items()}, flush=True)

    def ratio(name: str, reference: str) -> str:
        ratios = [a / b for a, b in zip(rates[name], rates[reference], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        return f"{middle:6.3f} ({low:.3f} to {high:.3f})"

    print(f"\n{'arm':26s}{'images/s':>9s}   ratio to the bare loop    wanted")
    for name, (_, reference, wanted) in arms.items():
        shown = ratio(name, reference) if reference else ""
        print(f"{name:26s}{statistics.median(rates[name]):9.0f}   {shown:26s}{wanted or ''}")
    for level, workers in [("light", "1 worker"), ("deit", "1 worker"), ("deit", "in process")]:
        peer = f"timm {level}, {workers}"
        print(f"vitclinic {level} / {peer}: {ratio(f'vitclinic {level}', peer)}, wanted 0.97")


if __name__ == "__main__":
    main()
