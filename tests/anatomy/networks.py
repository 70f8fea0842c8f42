"""The networks that the anatomy tests share: small ones of every family and library."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import timm
import torch
import torchvision.models as tv
from torch import nn
from torchvision.models import convnext, resnet, swin_transformer

from vitclinic.models import alternate
from vitclinic.models.alternet import AlterNet
from vitclinic.models.preact_resnet import PreActBasicBlock, PreActBottleneck, PreActResNet

Builder = Callable[[], nn.Module]

_FOUR = {"depths": (2, 1, 1, 1), "num_heads": (2, 2, 2, 2)}
CUTS: dict[str, dict[str, Any]] = {
    "vision_transformer": {"img_size": 64, "embed_dim": 24, "depth": 2, "num_heads": 2},
    "deit": {"img_size": 64, "embed_dim": 24, "depth": 2, "num_heads": 2},
    "pit": {"img_size": 64, "base_dims": (8, 8, 8), "depth": (2, 1, 1), "heads": (2, 2, 2)},
    "swin_transformer": {"img_size": 64, "embed_dim": 12, **_FOUR},
    "swin_transformer_v2": {"img_size": 64, "window_size": 4, "embed_dim": 12, **_FOUR},
    "mlp_mixer": {"img_size": 64, "embed_dim": 24, "num_blocks": 2},
    "resnet": {"layers": (2, 1, 1, 1), "channels": (32, 32, 32, 64)},
    "convnext": {"depths": (2, 1, 1, 1), "dims": (8, 16, 24, 32)},
    "volo": {
        "img_size": 64,
        "layers": (1, 1, 1, 1),
        "embed_dims": (16, 32, 32, 32),
        "num_heads": (2, 2, 2, 2),
    },
}
"""The modules of timm that have a family, with the keywords that make their networks small."""

_REFUSING = {"mlp_mixer": "_create_mixer", "volo": "_create_volo"}
"""Modules whose entry points refuse to have these keywords overridden, and the function they call."""


def cut(module: str, name: str) -> nn.Module:
    """A network of timm's registry, cut down; pruned ones are tied to their widths and stay whole."""
    torch.manual_seed(0)
    keywords = {} if name.endswith("_pruned") else dict(CUTS[module])
    if "patch14" in name:
        keywords["img_size"] = 56
    if module not in _REFUSING:
        return timm.create_model(name, num_classes=5, **keywords)
    home = importlib.import_module(f"timm.models.{module}")
    create = getattr(home, _REFUSING[module])

    def overriding(variant: str, pretrained: bool = False, **settings: Any) -> nn.Module:
        return create(variant, pretrained=pretrained, **(settings | keywords))

    with mock.patch.object(home, _REFUSING[module], overriding):
        return timm.create_model(name, num_classes=5)


def sample(names: list[str], number: int) -> list[str]:
    """`number` names spread evenly over a list."""
    return names[:: math.ceil(len(names) / number)]


def _torchvision() -> dict[str, Builder]:
    def swin(window: int, **parts: Any) -> nn.Module:
        return tv.SwinTransformer([4, 4], 12, [2, 2], [2, 2], [window] * 2, num_classes=5, **parts)

    return {
        "vit": lambda: tv.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5),
        "swin, padded": lambda: swin(5),
        # Not padded: the keys of padding are zero in V2, and the norm of zero has no second derivative.
        "swin_v2": lambda: swin(
            4, block=swin_transformer.SwinTransformerBlockV2, downsample_layer=swin_transformer.PatchMergingV2
        ),
        "resnet": lambda: tv.ResNet(resnet.BasicBlock, [2, 1, 1, 1], num_classes=5),
        "resnext": lambda: tv.ResNet(resnet.Bottleneck, [2, 1, 1, 1], num_classes=5, groups=4, width_per_group=8),
        "convnext": lambda: tv.ConvNeXt(
            [convnext.CNBlockConfig(8, 16, 2), convnext.CNBlockConfig(16, None, 1)], num_classes=5
        ),
    }


def _huggingface() -> dict[str, Builder]:
    try:
        import transformers as hf
    except ImportError:
        return {}
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 5,
    }
    swin = {
        "image_size": 64,
        "embed_dim": 12,
        "depths": [2, 1],
        "num_heads": [2, 2],
        "window_size": 5,
        "num_labels": 5,
    }
    return {
        "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**small)),
        "vit, eager attention": lambda: hf.ViTForImageClassification(
            hf.ViTConfig(**small, attn_implementation="eager")
        ),
        "deit": lambda: hf.DeiTForImageClassification(hf.DeiTConfig(**small)),
        "swin": lambda: hf.SwinForImageClassification(hf.SwinConfig(**swin)),
        "swin_absolute": lambda: hf.SwinForImageClassification(hf.SwinConfig(**swin, use_absolute_embeddings=True)),
    }


class Normalized(nn.Module):
    """A network that carries its own normalisation, as vitclinic's do."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.register_buffer("mean", torch.full((3, 1, 1), 0.5))
        self.register_buffer("std", torch.full((3, 1, 1), 0.25))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.backbone((images - self.mean) / self.std)


def tiny_vit(**keywords: Any) -> nn.Module:
    """timm's ViT, small, on a grid of 4 x 6."""
    small = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
    return timm.models.VisionTransformer(num_classes=5, **(small | keywords))


_SPECIAL: dict[str, Builder] = {
    "vit, not square, registers": lambda: tiny_vit(reg_tokens=2, no_embed_class=True),
    "vit, dynamic size": lambda: tiny_vit(dynamic_img_size=True),
    "vit, no class token": lambda: tiny_vit(class_token=False, global_pool="avg"),
    "vit, no position": lambda: tiny_vit(pos_embed="none"),
    "vit, post-norm": lambda: tiny_vit(block_fn=timm.models.vision_transformer.ResPostBlock),
    "vit, layer scale and drop path": lambda: tiny_vit(init_values=1e-5, drop_path_rate=0.2),
    "vit, normalised": lambda: Normalized(tiny_vit()),
    "swin, not square, padded": lambda: timm.models.SwinTransformer(
        img_size=(72, 104),
        window_size=4,
        embed_dim=12,
        depths=(2, 2),
        num_heads=(2, 2),
        num_classes=5,
    ),
}


def alternet(stem: str, **keywords: Any) -> nn.Module:
    """A small AlterNet with an MSA in each of the last stages, two in the last."""
    small = {"layers": (1, 2, 2, 4), "channels": (8, 8, 8, 16), "heads": (1, 1, 2, 2), "head_width": 4}
    return AlterNet(PreActBottleneck, stem=stem, num_classes=5, **(small | keywords))


_OURS: dict[str, Builder] = {
    "preact_resnet": lambda: PreActResNet(PreActBottleneck, (2, 1, 1, 1), channels=(8, 8, 8, 16), num_classes=5),
    "preact_resnet, basic, cifar": lambda: PreActResNet(
        PreActBasicBlock, (2, 1, 1, 1), stem="cifar", channels=(8, 8, 8, 16), num_classes=5, drop_path_rate=0.2
    ),
    "alternet, padded": lambda: alternet("imagenet", window=3, shared_bias=True, msa_act="gelu"),
    "alternet, cifar": lambda: alternet("cifar", drop_path_rate=0.2),
    "timm resnet with MSAs": lambda: alternate(
        timm.models.ResNet(timm.models.resnet.Bottleneck, (1, 1, 2, 2), channels=(8, 8, 8, 16), num_classes=5),
        msas=(0, 0, 1, 1),
        heads=(1, 1, 2, 2),
        head_width=4,
        window=3,
    ),
}

_SAMPLES = {"vision_transformer": 9, "resnet": 6, "mlp_mixer": 4, "convnext": 3, "deit": 3}
NETWORKS: dict[str, Builder] = {
    **{
        f"timm {name}": (lambda module=module, name=name: cut(module, name))
        for module in CUTS
        for name in sample(timm.list_models(module=module), _SAMPLES.get(module, 2))
        if not name.endswith("_pruned")
    },
    **{f"torchvision {name}": build for name, build in _torchvision().items()},
    **{f"huggingface {name}": build for name, build in _huggingface().items()},
    **{f"vitclinic {name}": build for name, build in _OURS.items()},
    **_SPECIAL,
}
"""Every family and library, small."""

_FIRST = {f"timm {sample(timm.list_models(module=module), _SAMPLES.get(module, 2))[0]}" for module in CUTS}
NETWORK_PARAMS = [
    pytest.param(name, marks=[] if name in _FIRST or not name.startswith("timm ") else [pytest.mark.slow], id=name)
    for name in NETWORKS
]
"""Their names as parameters of a test: of timm's registry, the first of each kind; further ones are slow tests."""


def shaken(network: nn.Module) -> nn.Module:
    """The network at ordinary values: libraries start branches, scales, embeddings and heads near zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.squeeze().ndim <= 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
            else:
                fan_in = 4 if parameter.shape[0] == 1 else parameter[0].numel()
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan_in**0.5)
    return network
