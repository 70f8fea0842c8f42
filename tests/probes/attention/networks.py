"""Small networks with every kind of attention map."""

from __future__ import annotations

import timm
import torch
import torchvision.models as tv

from tests.anatomy.networks import NETWORKS as ALL
from tests.anatomy.networks import shaken
from tests.probes.subjects import CLASSES, SIZE, vit


def swin(img_size=SIZE, **keywords):
    """timm's Swin on a grid of 8 x 8 (5 x 8 for 10 x 16), with windows of 4: the second block shifts them."""
    small = {"patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3)}
    return timm.models.SwinTransformer(img_size=img_size, num_classes=CLASSES, **(small | keywords))


def torchvision_swin(window=4):
    return tv.SwinTransformer([2, 2], 12, [2, 2], [2, 3], [window, window], num_classes=CLASSES)


GLOBAL = {
    "vit": vit,
    "vit, two prefix tokens": lambda: timm.models.deit.VisionTransformerDistilled(
        img_size=SIZE, patch_size=4, embed_dim=24, depth=2, num_heads=2, num_classes=CLASSES
    ),
    "vit, registers": lambda: vit(reg_tokens=3),
    "vit, registers, no class token": lambda: vit(reg_tokens=2, class_token=False, global_pool="avg"),
    "vit, no class token": lambda: vit(class_token=False, global_pool="avg"),
    "torchvision vit": lambda: tv.VisionTransformer(SIZE, 4, 2, 2, 16, 32, num_classes=CLASSES),
}
WINDOWED = {
    "swin": swin,
    "swin, padded": lambda: swin(window_size=3),
    "torchvision swin": torchvision_swin,
    "torchvision swin, padded": lambda: torchvision_swin(3),
}


def built(name):
    torch.manual_seed(0)
    return shaken((GLOBAL | WINDOWED)[name]())


def huggingface(kind):
    """Hugging Face's ViT or DeiT for images of SIZE, or None without transformers."""
    if f"huggingface {kind}" not in ALL:
        return None
    import transformers as hf

    config, network = {
        "vit": (hf.ViTConfig, hf.ViTForImageClassification),
        "deit": (hf.DeiTConfig, hf.DeiTForImageClassification),
    }[kind]
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return shaken(network(config(**small, image_size=SIZE, patch_size=4, num_labels=CLASSES)))
