"""Networks that have learnt something, in a second: handwritten digits."""

from __future__ import annotations

from functools import cache

import timm
import torch
import torch.nn.functional as F
from torch import nn

from vitclinic.data import evaluation_batches, open_data
from vitclinic.models import Normalized
from vitclinic.probes import Subject


def vit() -> nn.Module:
    return timm.models.VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=24, depth=2, num_heads=2
    )


def cnn() -> nn.Module:
    body = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2), nn.ReLU()]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(16 * 9, 10))


@cache
def digits():
    return open_data("digits")


@cache
def trained(build, epochs: int = 6) -> nn.Module:
    """A network that recognises digits; left as it is by all tests."""
    torch.manual_seed(0)
    network = Normalized(build(), [0.3], [0.4]).train()
    (batch,) = evaluation_batches(digits(), "train", 10_000)
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(batch)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(network(batch.images[rows]), batch.targets[rows]).backward()
            optimizer.step()
    optimizer.zero_grad()
    return network.eval()


def subject(build, **options) -> Subject:
    return Subject(trained(build), digits(), **{"batch_size": 32, **options})
