"""Classifiers of torchvision and Hugging Face to train: sized for the data, with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from vitclinic._core.errors import ModelError, did_you_mean
from vitclinic.models.factory import IMAGENET_MEAN, IMAGENET_STD, Normalized
from vitclinic.models.libraries import catch_keywords, check_torchvision, import_transformers


def create_library_network(
    name: str,
    *,
    num_classes: int,
    in_chans: int,
    img_size: int | tuple[int, int],
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **keywords: Any,
) -> Normalized:
    """Create a classifier of torchvision or Hugging Face with random weights, which returns class scores.

    Args:
        name: `torchvision:NAME`, or `hf:TYPE` with a type of transformers' such as `vit`.
        num_classes: Number of outputs.
        in_chans: Channels of the images.
        img_size: Pixels a side, or height and width, for networks that are built for one size.
        mean: Mean of each channel to normalize with; that of ImageNet unless given.
        std: Standard deviation of each channel.
        **keywords: The network's own, of Hugging Face those of its config.

    Raises:
        ModelError: There is no such network, or it does not take a keyword or such images.

    Example:
        >>> import torch
        >>> network = create_library_network("torchvision:resnet18", num_classes=10, in_chans=3, img_size=32)
        >>> network(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    library, _, kind = name.partition(":")
    create = _create_torchvision if library == "torchvision" else _create_hugging_face
    backbone = create(kind, num_classes, in_chans, img_size, keywords)
    network = Normalized(backbone, (mean or IMAGENET_MEAN)[:in_chans], (std or IMAGENET_STD)[:in_chans])
    network.output = "logits" if library == "hf" else None
    return network


def _create_torchvision(
    name: str, num_classes: int, in_chans: int, img_size: int | tuple[int, int], keywords: dict[str, Any]
) -> nn.Module:
    from torchvision import models

    check_torchvision(name)
    if in_chans != 3:
        raise ModelError(f"torchvision:{name} takes images of 3 channels; set model.in_chans=3.")
    sized = {}
    if name.startswith("vit_"):  # its other networks take any size
        if not isinstance(img_size, int):
            raise ModelError(f"torchvision:{name} takes square images; set model.img_size=... to one number.")
        sized = {"image_size": img_size}
    network: nn.Module = catch_keywords(
        f"torchvision:{name}", lambda: models.get_model(name, num_classes=num_classes, **{**sized, **keywords})
    )
    return network


def _create_hugging_face(
    kind: str, num_classes: int, in_chans: int, img_size: int | tuple[int, int], keywords: dict[str, Any]
) -> nn.Module:
    transformers = import_transformers(f"hf:{kind}")
    if kind not in transformers.CONFIG_MAPPING:
        raise ModelError(f"transformers has no model type '{kind}'.{did_you_mean(kind, transformers.CONFIG_MAPPING)}")
    config: Any = transformers.AutoConfig.for_model(kind, num_labels=num_classes)
    if type(config) not in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        raise ModelError(f"transformers has no image classifier of type '{kind}', so it cannot be trained.")
    images = {"num_channels": in_chans, "image_size": img_size if isinstance(img_size, int) else list(img_size)}
    for key, value in {**{key: value for key, value in images.items() if hasattr(config, key)}, **keywords}.items():
        if not hasattr(config, key):
            raise ModelError(f"hf:{kind} takes no keyword '{key}'.")
        setattr(config, key, value)
    network: nn.Module = catch_keywords(
        f"hf:{kind}", lambda: transformers.AutoModelForImageClassification.from_config(config)
    )
    return network
