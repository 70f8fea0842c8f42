"""What the tests of probes share: small networks of several kinds, and images in memory."""

from __future__ import annotations

import numpy as np
import timm
import torch
import torchvision
from torch import nn

from tests.anatomy.networks import shaken
from vitclinic.data import Dataset, Split
from vitclinic.models import Normalized
from vitclinic.probes import Subject

CLASSES = 5
SIZE = 16


class InMemory:
    """Noise as images."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.pixels = np.random.default_rng(seed).integers(0, 256, (count, SIZE, SIZE, 3), dtype=np.uint8)
        self.digest = f"noise {count} {seed}"
        self.skipped: list[str] = []
        self.kept = np.arange(count)

    def read(self, indices):
        return self.pixels[indices]


def noise(count: int = 22, classes: int = CLASSES, seed: int = 0) -> Dataset:
    """A data set of noise, the same images in every split."""
    images = InMemory(count, seed)
    split = Split(images, np.arange(count), np.arange(count) % classes)
    names = tuple(f"class {number}" for number in range(classes))
    splits = {"train": split, "val": split, "test": split}
    return Dataset("noise", names, (SIZE, SIZE), 3, splits, f"{images.digest} {classes}")


class Unknown(nn.Module):
    """A network of no known family, with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def vit(**keywords) -> nn.Module:
    small = {"img_size": SIZE, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": CLASSES}
    return timm.models.VisionTransformer(**(small | keywords))


NETWORKS = {
    "vit": lambda: Normalized(vit(drop_rate=0.1), [0.5] * 3, [0.25] * 3),
    "resnet": lambda: timm.create_model("resnet18", channels=(8, 8, 16, 16), layers=(1, 1, 1, 1), num_classes=CLASSES),
    "mixer": lambda: timm.models.MlpMixer(img_size=SIZE, patch_size=4, embed_dim=16, num_blocks=2, num_classes=CLASSES),
    "torchvision vit": lambda: torchvision.models.VisionTransformer(SIZE, 4, 2, 2, 16, 32, num_classes=CLASSES),
    "unknown": Unknown,
}


def subject(network: str | nn.Module = "vit", count: int = 22, **options) -> Subject:
    """A subject with the seeded network of that name, batches of 8 of which the last is smaller."""
    if isinstance(network, str):
        torch.manual_seed(0)
        network = shaken(NETWORKS[network]())
    return Subject(network, options.pop("dataset", None) or noise(count), **{"batch_size": 8, **options})
