"""Pre-activation ResNet [He et al. 2016b], the baseline of AlterNet [park2022 Sec. 4.1], with timm's conventions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import DropPath, create_classifier
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.nn import functional as F

Stem = Literal["imagenet", "cifar"]


class PreActBasicBlock(nn.Module):
    """Pre-activation basic block: skip + conv(act(BN(conv(act(BN(x)))))), both convs 3 x 3."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int = 1, drop_path: float = 0.0) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.act1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.act2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.downsample = _downsample(in_channels, width, stride)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x_bchw: Tensor) -> Tensor:
        activated = self.act1(self.bn1(x_bchw))
        skip = x_bchw if self.downsample is None else self.downsample(activated)
        out: Tensor = skip + self.drop_path(self.conv2(self.act2(self.bn2(self.conv1(activated)))))
        return out


class PreActBottleneck(nn.Module):
    """Pre-activation bottleneck: skip + three times conv(act(BN(.))), with convs 1 x 1, 3 x 3 (strided) and 1 x 1."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int = 1, drop_path: float = 0.0) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.act1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.act2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.act3 = nn.ReLU(inplace=True)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.downsample = _downsample(in_channels, width * self.expansion, stride)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x_bchw: Tensor) -> Tensor:
        activated = self.act1(self.bn1(x_bchw))
        skip = x_bchw if self.downsample is None else self.downsample(activated)
        branch = self.conv2(self.act2(self.bn2(self.conv1(activated))))
        out: Tensor = skip + self.drop_path(self.conv3(self.act3(self.bn3(branch))))
        return out


def _downsample(in_channels: int, out_channels: int, stride: int) -> nn.Conv2d | None:
    """Build the skip's projection if a block changes the shape; its input is the activated state."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)


class PreActResNet(nn.Module):
    """Pre-activation ResNet [He et al. 2016b]: stem, four stages, BN and ReLU, average pooling, classifier.

    Args:
        block: The block: `PreActBasicBlock` or `PreActBottleneck`.
        layers: Number of blocks in each of the four stages.
        num_classes: Number of classes; 0 for pooled features.
        in_chans: Image channels.
        stem: `imagenet` is a 7 x 7 conv and a max-pooling, both of stride 2; `cifar` is a 3 x 3 conv, so that the last
            stage has 1/8 of the image's side instead of 1/32.
        channels: Widths of the stages; the first is also the stem's.
        global_pool: timm's name of the pooling.
        drop_rate: Dropout before the classifier.
        drop_path_rate: Stochastic depth of the last block; it rises linearly from 0.

    Raises:
        ValueError: `layers` or `channels` does not have four entries, or the stem is unknown.

    Example:
        >>> import torch
        >>> network = PreActResNet(PreActBasicBlock, (1, 1, 1, 1), stem="cifar", channels=(8, 8, 8, 8), num_classes=10)
        >>> network(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        block: type[PreActBasicBlock] | type[PreActBottleneck],
        layers: Sequence[int],
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        stem: Stem = "imagenet",
        channels: Sequence[int] = (64, 128, 256, 512),
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if len(layers) != 4 or len(channels) != 4 or min(layers) < 1:
            raise ValueError("layers and channels must have one number per stage, four each.")
        if stem not in ("imagenet", "cifar"):
            raise ValueError(f"stem is {stem!r}; write 'imagenet' or 'cifar'.")
        self.num_classes = num_classes
        self.drop_rate = drop_rate
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(in_chans, channels[0], 7, stride=2, padding=3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = nn.Conv2d(in_chans, channels[0], 3, padding=1, bias=False)
            self.maxpool = nn.Identity()

        drop_paths = (drop_path_rate * place / max(1, sum(layers) - 1) for place in range(sum(layers)))
        reduction, width = (4 if stem == "imagenet" else 1), channels[0]
        self.feature_info = []
        for stage, depth in enumerate(layers):
            blocks = nn.Sequential()
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(block(width, channels[stage], stride, next(drop_paths)))
                width = channels[stage] * block.expansion
            name = f"layer{stage + 1}"
            self.add_module(name, blocks)
            self.feature_info.append({"num_chs": width, "reduction": reduction * 2**stage, "module": name})

        self.num_features = self.head_hidden_size = width
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)
        self.global_pool, self.fc = create_classifier(width, num_classes, pool_type=global_pool)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def stage(self, number: int) -> nn.Sequential:
        """Return the blocks of a stage, counted from 0; in the state dict they are layer1 to layer4, as in timm."""
        blocks = self.get_submodule(f"layer{number + 1}")
        assert isinstance(blocks, nn.Sequential)
        return blocks

    def get_classifier(self) -> nn.Module:
        """Return the classifier."""
        return self.get_submodule("fc")

    def reset_classifier(self, num_classes: int, global_pool: str = "avg") -> None:
        """Replace the classifier; with 0 classes the network returns pooled features."""
        self.num_classes = num_classes
        like = self.norm.weight
        self.global_pool, self.fc = create_classifier(
            self.num_features, num_classes, pool_type=global_pool, device=like.device, dtype=like.dtype
        )

    def forward_features(self, x_bchw: Tensor) -> Tensor:
        """Return the features of the last stage, after the final norm and activation."""
        x_bchw = self.maxpool(self.conv1(x_bchw))
        for stage in range(4):
            x_bchw = self.stage(stage)(x_bchw)
        features: Tensor = self.act(self.norm(x_bchw))
        return features

    def forward_head(self, x_bchw: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits of features, or with `pre_logits` the pooled features."""
        x_bc: Tensor = self.global_pool(x_bchw)
        if self.drop_rate > 0:
            x_bc = F.dropout(x_bc, p=self.drop_rate, training=self.training)
        return x_bc if pre_logits else self.fc(x_bc)

    def forward(self, x_bchw: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x_bchw))


PUBLISHED: dict[str, Any] = {
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "pool_size": (7, 7),
    "mean": IMAGENET_DEFAULT_MEAN,
    "std": IMAGENET_DEFAULT_STD,
    "first_conv": "conv1",
    "classifier": "fc",
}
"""The configuration timm expects; there are no published weights."""

default_cfgs = generate_default_cfgs({f"preact_resnet{depth}.untrained": PUBLISHED for depth in (18, 34, 50, 101)})


def build(variant: str, network: type[PreActResNet], pretrained: bool, **keywords: Any) -> PreActResNet:
    """Build `network(**keywords)` the way timm's registry does, with support for `features_only=True`."""
    feature_cfg = {"out_indices": (0, 1, 2, 3), "flatten_sequential": False}
    built: PreActResNet = build_model_with_cfg(network, variant, pretrained, feature_cfg=feature_cfg, **keywords)
    return built


Variant = tuple[type[PreActBasicBlock] | type[PreActBottleneck], tuple[int, int, int, int]]
"""The block of a network, and the number of blocks in each stage."""


def register_variants(module: str, network: type[PreActResNet], variants: Mapping[str, Variant]) -> None:
    """Put an entry point for each variant of a network into timm's registry, and into the module that defines it.

    Args:
        module: The `__name__` of the module, where timm looks for the variants' `default_cfgs`.
        network: The network to build.
        variants: The block and the number of blocks in each stage, by the name in timm's registry.
    """
    for name, (block, layers) in variants.items():
        setattr(sys.modules[module], name, register_model(_entry_point(module, name, network, block, layers)))


def _entry_point(
    module: str,
    name: str,
    network: type[PreActResNet],
    block: type[PreActBasicBlock] | type[PreActBottleneck],
    layers: tuple[int, int, int, int],
) -> Callable[..., PreActResNet]:
    construct = partial(build, name, network)  # bound here: the factory runs entry points in another namespace

    def entry_point(pretrained: bool = False, **keywords: Any) -> PreActResNet:
        return construct(pretrained, **{"block": block, "layers": layers, **keywords})

    entry_point.__module__ = module
    entry_point.__name__ = entry_point.__qualname__ = name
    return entry_point


register_variants(
    __name__,
    PreActResNet,
    {
        "preact_resnet18": (PreActBasicBlock, (2, 2, 2, 2)),
        "preact_resnet34": (PreActBasicBlock, (3, 4, 6, 3)),
        "preact_resnet50": (PreActBottleneck, (3, 4, 6, 3)),
        "preact_resnet101": (PreActBottleneck, (3, 4, 23, 3)),
    },
)
