"""torchvision's classifiers, every family of it, from its own builders or, cut down, from its classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torchvision.models as tv
from torch import nn
from torchvision.models import convnext, resnet, swin_transformer

from tests.anatomy.zoo.entry import Entry


def _entry(construct: Callable[[], nn.Module], size: int, attention: bool = False, notes: str = "") -> Entry:
    return Entry(construct, (3, size, size), "torchvision", attention, notes)


def _named(name: str, size: int = 64, notes: str = "", **keywords: Any) -> tuple[str, Entry]:
    return name, _entry(lambda: tv.get_model(name, num_classes=10, **keywords), size, notes=notes)


def _swin(**parts: Any) -> nn.Module:
    return tv.SwinTransformer([4, 4], 12, [2, 2], [2, 2], [4, 4], num_classes=10, **parts)


TORCHVISION: dict[str, Entry] = {
    "vit": _entry(lambda: tv.VisionTransformer(32, 8, 2, 3, 48, 96, num_classes=10), 32, True),
    "swin": _entry(_swin, 64, True, "windows"),
    "swin_v2": _entry(
        lambda: _swin(block=swin_transformer.SwinTransformerBlockV2, downsample_layer=swin_transformer.PatchMergingV2),
        64,
        True,
        "windows, cosine attention, norms behind",
    ),
    "maxvit": _entry(
        lambda: tv.MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 8, 0.0, num_classes=10),
        64,
        True,
        "convolution, windows, grid",
    ),
    "resnet": _entry(lambda: tv.ResNet(resnet.BasicBlock, [2, 1, 1, 1], num_classes=10), 64),
    "resnext": _entry(
        lambda: tv.ResNet(resnet.Bottleneck, [2, 1, 1, 1], num_classes=10, groups=4, width_per_group=8), 64
    ),
    "wide_resnet": _entry(lambda: tv.ResNet(resnet.Bottleneck, [2, 1, 1, 1], num_classes=10, width_per_group=128), 64),
    "convnext": _entry(
        lambda: tv.ConvNeXt([convnext.CNBlockConfig(16, 32, 2), convnext.CNBlockConfig(32, None, 1)], num_classes=10),
        64,
        notes="layer scale",
    ),
    "densenet": _entry(lambda: tv.DenseNet(8, (2, 2, 2, 2), 16, num_classes=10), 64, notes="no residuals"),
    **dict(
        (
            _named("googlenet", 64, "no residuals", aux_logits=False, init_weights=False),
            _named("inception_v3", 160, "no residuals", aux_logits=False, init_weights=False),
            _named("alexnet", 64, "no residuals"),
            _named("squeezenet1_1", 64, "no residuals; convolutional head"),
            _named("mobilenet_v2", width_mult=0.35),
            _named("mobilenet_v3_small", notes="squeeze and excitation, hard swish"),
            _named("mobilenet_v3_large", notes="squeeze and excitation, hard swish"),
            _named("shufflenet_v2_x0_5", notes="no residuals; channels split and shuffled"),
            _named("mnasnet0_5"),
            _named("efficientnet_b0"),
            _named("efficientnet_v2_s"),
            _named("regnet_x_400mf"),
            _named("regnet_y_400mf", notes="squeeze and excitation"),
            _named("vgg11", 32, "no residuals", init_weights=False),
            _named("resnet18"),
            _named("resnet50"),
        )
    ),
}
