"""Images per second of `vitclinic train`, beside a bare PyTorch loop and timm's training-script pattern.

    python benchmarks/training.py CIFAR10 [--steps 60] [--rounds 12]

CIFAR10 is anything `data=` takes (a folder of parquet files, torchvision:CIFAR10@ROOT). The network is the ViT
of width 96, depth 6, patch 4 at 32 x 32, the batch 128, AdamW, clipping at 1. Everything runs in one process. Arms
without workers alternate step by step, `--steps` steps each. Arms with workers then take turns with the bare loop,
`--rounds` times: two steps unmeasured (they use up what a worker read ahead while others ran), then five, of which the
median counts. Printed is the median of each arm's ratios to its reference in the same round, with quartiles: the
machine's moods cancel.
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

from vitclinic._core.distributed import ALONE
from vitclinic.data import open_data
from vitclinic.data.augment import keep_a_bit
from vitclinic.models import create_model
from vitclinic.training import build_recipe
from vitclinic.training.trainer import Trainer

BATCH = 128
WARM_UP, TURN = 2, 5
MODEL = {"name": "vit_tiny_fitted", "patch_size": 4, "embed_dim": 96, "depth": 6, "num_heads": 3}
Step = Callable[[], object]


def bare_step(network: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, targets: Tensor) -> None:
    loss = nn.functional.cross_entropy(network(images), targets)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    loss.item()


def seconds(step: Step) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def one_turn(step: Step) -> float:
    for _ in range(WARM_UP):
        step()
    return statistics.median(seconds(step) for _ in range(TURN))


def compared(arms: dict[str, Step], rounds: int, measure: Callable[[Step], float], wanted: dict[str, float]) -> None:
    """Print each arm's speed, and its ratio to the first arm's."""
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, step in arms.items():
            rates[name].append(BATCH / measure(step))
    reference, *others = arms
    print(f"{reference:44s}{statistics.median(rates[reference]):6.0f} images/s")
    for name in others:
        ratios = [a / b for a, b in zip(rates[name], rates[reference], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        goal = f", wanted {wanted[name]}" if name in wanted else ""
        speed = statistics.median(rates[name])
        print(f"{name:44s}{speed:6.0f} images/s  ratio {middle:.3f} ({low:.3f} to {high:.3f}){goal}", flush=True)


def reference_network() -> tuple[nn.Module, torch.optim.Optimizer]:
    keywords = {key: value for key, value in MODEL.items() if key != "name"}
    network = create_model(str(MODEL["name"]), img_size=32, num_classes=10, **keywords).train()
    return network, torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.05)


def bare_arm() -> Step:
    """The same network on one ready batch of tensors."""
    network, optimizer = reference_network()
    images, targets = torch.rand(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    return lambda: bare_step(network, optimizer, images, targets)


def our_arm(source: str, augment: str) -> Step:
    recipe = build_recipe(
        {"model": MODEL, "data": {"source": source, "augment": augment}, "batch_size": BATCH, "steps": 10**6}
    )
    trainer = Trainer(recipe, open_data(recipe.data), 10**6, ALONE, torch.device("cpu"))
    return trainer.advance


class InMemory(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Decoded images behind a timm transform: what timm's training script reads from."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, transform: Callable[[Image.Image], Tensor]) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), int(self.labels[index])


def timm_arm(source: str, level: str, workers: int) -> Step:
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

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    bare, light, deit = bare_arm(), our_arm(options.data, "light"), our_arm(options.data, "deit")
    print("step by step, no workers")
    plain = {
        "bare loop, ready tensors": bare,
        "vitclinic none": our_arm(options.data, "none"),
        "vitclinic light": light,
    }
    for step in plain.values():
        one_turn(step)
    compared(plain, options.steps, seconds, {"vitclinic none": 0.97, "vitclinic light": 0.95})
    print("\nin turns")
    in_turns = {"bare loop, ready tensors": bare, "vitclinic deit, 1 worker": deit}
    compared(in_turns, options.rounds, one_turn, {"vitclinic deit, 1 worker": 0.85})
    for level, ours in {"light": light, "deit": deit}.items():
        peer = timm_arm(options.data, level, workers=1)
        name = f"vitclinic {level}"
        compared({f"timm {level}, 1 worker": peer, name: ours}, options.rounds, one_turn, {name: 0.97})


if __name__ == "__main__":
    main()
