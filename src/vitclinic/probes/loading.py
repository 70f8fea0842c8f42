"""Making a subject from a network and data in any form: a loader, a `Dataset`, a folder or a name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitclinic._core.errors import RecipeError
from vitclinic.anatomy.wrappers import weight_like
from vitclinic.data import DataConfig, Dataset, Normalization, load_batches, open_data
from vitclinic.data.loader import LOADER
from vitclinic.models import Normalized
from vitclinic.probes.output import OutputFunction, observe_output
from vitclinic.probes.subject import Subject

Data = str | Path | DataConfig | Dataset | Iterable[Any] | Mapping[str, Iterable[Any]]
"""Data as probes and `examine` take it."""


def is_loader(data: Any) -> bool:
    """Return True for a loader, or a mapping of splits to loaders; False for anything that `open_data` opens."""
    return not isinstance(data, str | Path | DataConfig | Dataset)


def load_subject(
    model: nn.Module,
    data: Data,
    *,
    name: str | None = None,
    split: str = "test",
    limit: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    normalized: bool | None = None,
    output: OutputFunction | None = None,
    **options: Any,
) -> Subject:
    """Return a subject for measuring `model` on `data`.

    Args:
        model: Any network. It takes pixels in [0, 1], or normalized images if `mean` and `std` are given.
        data: A loader or any other iterable of `(images, labels)`, `{"train": loader, "test": loader}`, a `Dataset`, a
            folder, or a name of `vitclinic list datasets`.
        name: Name of the network; its class by default.
        split: Split to measure on.
        limit: Maximum number of images.
        mean: Per-channel mean that the network's input is normalized with.
        std: Per-channel standard deviation that the network's input is normalized with.
        normalized: Set to True if the loader's images are already normalized: with `mean` and `std` or, for a timm
            model without these, with the model's own preprocessing. Images outside of [0, 1] are an error otherwise.
        output: Function from what the network returns to its class scores [B, K]. Without it, they are the tensor that
            the network returns, `logits` of a dict, dataclass or Hugging Face output, or the first tensor of a tuple or
            list; an encoder without a head has features instead, and probes that need no labels.
        options: Other arguments of `Subject`.

    Example:
        >>> subject = load_subject(
        ...     nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), [(torch.rand(4, 1, 8, 8), torch.arange(4))]
        ... )
        >>> subject.name, len(subject), subject.outputs
        ('Sequential', 4, 10)
    """
    if not isinstance(model, nn.Module):
        raise RecipeError(f"A probe is called on (model, data) with a torch.nn.Module (got {type(model).__name__}).")
    normalization = find_normalization(model, mean, std, normalized)
    if is_loader(data):
        dataset = load_batches(data, limit=limit, normalization=normalization, normalized=normalized)  # type: ignore[arg-type]
    elif isinstance(data, Dataset):
        dataset = data
    else:
        dataset = open_data(data if isinstance(data, DataConfig) else str(data))
    network = model if normalization is None else Normalized(model, *normalization)
    dataset = name_classes(dataset, network, output)
    name = name or type(model).__name__
    return Subject(network, dataset, name=name, split=split, limit=limit, output=output, **options)


def find_normalization(
    model: nn.Module, mean: Sequence[float] | None, std: Sequence[float] | None, normalized: bool | None
) -> Normalization | None:
    """Return the normalization of the network's input; None if it takes pixels in [0, 1].

    Args:
        model: The network; a timm model has its own normalization in `pretrained_cfg`.
        mean: Per-channel mean, if given by the user.
        std: Per-channel standard deviation, if given by the user.
        normalized: True if the images are already normalized.

    Raises:
        RecipeError: If only one of mean and std is given, they do not fit, or the normalization is not known.

    Example:
        >>> find_normalization(nn.Linear(1, 1), [0.5], [0.25], None)
        Normalization(mean=[0.5], std=[0.25])
    """
    if (mean is None) != (std is None):
        raise RecipeError("Pass both mean= and std=, with one number per channel each.")
    if mean is not None and std is not None:
        if not isinstance(mean, Sequence) or not isinstance(std, Sequence):
            raise RecipeError(f"mean and std are lists with one number per channel (got {mean!r} and {std!r}).")
        if len(mean) != len(std) or any(value <= 0 for value in std):
            raise RecipeError(
                f"mean and std must have the same length, and std must be above 0 (got {mean} and {std})."
            )
        return Normalization(list(mean), list(std))
    if not normalized:
        return None
    own = getattr(model, "pretrained_cfg", None) or {}
    if "mean" not in own or "std" not in own:
        raise RecipeError(f"{type(model).__name__} does not state its normalization. Pass mean= and std=.")
    return Normalization(list(own["mean"]), list(own["std"]))


def name_classes(dataset: Dataset, network: nn.Module, output: OutputFunction | None = None) -> Dataset:
    """Return the data with as many classes as the network has outputs, if it comes from a loader without class names.

    A loader may not have an image of every class.
    """
    if dataset.name != LOADER:
        return dataset
    if dataset.classes != tuple(map(str, range(len(dataset.classes)))) or not len(dataset.classes):
        return dataset
    example = torch.from_numpy(next(part for part in dataset.splits.values() if len(part)).read([0]))  # type: ignore[arg-type]
    like = weight_like(network)
    found = observe_output(network, example.permute(0, 3, 1, 2).to(like.device, like.dtype), output)
    if found.features is not None or found.count <= len(dataset.classes):
        return dataset
    return replace(dataset, classes=tuple(map(str, range(found.count))))
