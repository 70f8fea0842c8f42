"""Images per second of `vitclinic train`, beside a bare PyTorch loop and timm's training-script pattern.

    python benchmarks/training.py CIFAR10 [--rounds 8] [--steps 12]

CIFAR10 is anything `data=` takes (a folder of parquet files, torchvision:CIFAR10@ROOT). The network is the ViT
of width 96, depth 6, patch 4 at 32 x 32, the batch 128, AdamW, clipping at 1. All arms run in one process, one
after the other, again and again: each turn builds its loader, makes two steps unmeasured, then `--steps` measured
ones, and shuts its workers down. Printed are the medians over turns, and the median over rounds of each arm's
ratio to its reference in the same round: the machine's moods cancel.
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
"""Makes a number of steps after the warm-up, and returns the seconds that they took."""


def bare_step(network: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, targets: Tensor) -> None:
    loss = nn.functional.cross_entropy(network(images), targets)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    loss.item()


def timed(steps: int, step: Callable[[], None]) -> float:
    for _ in range(WARM_UP):
        step()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - started


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

    def turn(steps: int) -> float:
        seconds = timed(steps, lambda: trainer.advance())
        trainer.close()
        return seconds

    return turn


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

    def turn(steps: int) -> float:
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

        return timed(steps, step)

    return turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
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
            rates[name].append(options.steps * BATCH / turn(options.steps))
        print(f"round {number + 1}/{options.rounds}", {name: round(r[-1]) for name, r in rates.items()}, flush=True)

    def ratio(name: str, reference: str) -> float:
        return statistics.median(a / b for a, b in zip(rates[name], rates[reference], strict=True))

    print(f"\n{'arm':28s}{'images/s':>10s}{'ratio':>8s}{'wanted':>8s}")
    for name, (_, reference, wanted) in arms.items():
        shown = f"{ratio(name, reference):8.3f}" if reference else f"{'1':>8s}"
        print(f"{name:28s}{statistics.median(rates[name]):10.0f}{shown}{wanted or '':>8}")
    for ours, theirs in [
        ("vitclinic light", "timm light, 1 worker"),
        ("vitclinic deit", "timm deit, 1 worker"),
        ("vitclinic deit", "timm deit, in process"),
    ]:
        print(f"{ours} / {theirs}: {ratio(ours, theirs):.3f} (wanted 0.97)")


if __name__ == "__main__":
    main()
