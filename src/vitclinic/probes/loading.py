"""A subject from a network and data as people have them: a loader, a data set of ours, a folder or a name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitclinic._core.errors import DataError, ModelError, RecipeError
from vitclinic.data import DataConfig, Dataset, Normalization, load_batches, open_data
from vitclinic.data.loader import LOADER
from vitclinic.models import Normalized
from vitclinic.probes.restoring import preserve_state
from vitclinic.probes.subject import Subject, as_logits

Data = str | Path | DataConfig | Dataset | Iterable[Any] | Mapping[str, Iterable[Any]]
"""What probes and `examine` take as data."""


def is_loader(data: Any) -> bool:
    """Tell a user's own loader, or a mapping of splits to loaders, from what `open_data` opens."""
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
    **options: Any,
) -> Subject:
    """Return the subject that `model` is on `data`.

    Args:
        model: Any network. It takes pixels in [0, 1], or normalized ones if `mean` and `std` are given.
        data: A loader or any other iterable of `(images, labels)`, `{"train": loader, "test": loader}`, a `Dataset`, a
            folder, or a name of `vitclinic list datasets`.
        name: What to call the network; its class unless given.
        split: Which of the data's splits to measure on.
        limit: Use at most so many images.
        mean: What the network's input is normalized by, for each channel.
        std: Likewise.
        normalized: Say that the loader's images are normalized: by `mean` and `std`, or by the network's own
            preprocessing where a timm network knows it. Without this word, images outside of [0, 1] are an error.
        options: Other arguments of `Subject`.
    """
    normalization = find_normalization(model, mean, std, normalized)
    if is_loader(data):
        dataset = load_batches(data, limit=limit, normalization=normalization, normalized=normalized)  # type: ignore[arg-type]
    elif isinstance(data, Dataset):
        dataset = data
    else:
        dataset = open_data(data if isinstance(data, DataConfig) else str(data))
    network = model if normalization is None else Normalized(model, *normalization)
    dataset = name_classes(dataset, network, options.get("seed", 0))
    return Subject(network, dataset, name=name or type(model).__name__, split=split, limit=limit, **options)


def find_normalization(
    model: nn.Module, mean: Sequence[float] | None, std: Sequence[float] | None, normalized: bool | None
) -> Normalization | None:
    """Return what the network's input is normalized by; None if it takes pixels in [0, 1]."""
    if (mean is None) != (std is None):
        raise RecipeError("Give both mean= and std=, one number a channel each.")
    if mean is not None and std is not None:
        if len(mean) != len(std) or any(value <= 0 for value in std):
            raise RecipeError(f"mean and std must be as many numbers, std above 0 (got {mean} and {std}).")
        return Normalization(list(mean), list(std))
    if not normalized:
        return None
    own = getattr(model, "pretrained_cfg", None) or {}
    if "mean" not in own or "std" not in own:
        raise RecipeError(
            f"{type(model).__name__} does not say what its images are normalized by: give mean= and std=."
        )
    return Normalization(list(own["mean"]), list(own["std"]))


def name_classes(dataset: Dataset, network: nn.Module, seed: int) -> Dataset:
    """Name as many classes as the network has outputs, where a loader has no names and its labels allow it.

    Some classes may have no image among those that were read.
    """
    if dataset.name != LOADER:
        return dataset
    if dataset.classes != tuple(map(str, range(len(dataset.classes)))) or not len(dataset.classes):
        return dataset
    count = _count_outputs(network, dataset, seed)
    return replace(dataset, classes=tuple(map(str, range(count)))) if count > len(dataset.classes) else dataset


def _count_outputs(network: nn.Module, dataset: Dataset, seed: int) -> int:
    example = torch.from_numpy(next(part for part in dataset.splits.values() if len(part)).read([0]))  # type: ignore[arg-type]
    like = next(network.parameters(), torch.empty(0))
    try:
        with preserve_state(network, seed), torch.no_grad():
            logits = as_logits(network(example.permute(0, 3, 1, 2).to(like.device, like.dtype)))
    except ModelError:
        raise
    except Exception as error:
        raise DataError(f"The network does not take the loader's images: {error}") from error
    return logits.shape[1] if logits.ndim == 2 else 0
