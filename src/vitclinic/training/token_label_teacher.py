"""Token labels of a run's training images: of a file, or made by a teacher before the first step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitclinic._core.errors import ModelError, RecipeError
from vitclinic._core.io import find_path, fingerprint
from vitclinic._core.sources import LIBRARIES
from vitclinic.anatomy import eval_mode
from vitclinic.data import Dataset
from vitclinic.data.augment import to_unit_interval
from vitclinic.data.cache import cache_folder
from vitclinic.data.decoding import Images, Size, as_image
from vitclinic.data.token_labels import LabelMaps, read_maps, write_maps
from vitclinic.models import Normalized
from vitclinic.models.libraries import open_library
from vitclinic.tasks.classification import Classification, TokenLabelConfig
from vitclinic.training.network import load_model
from vitclinic.training.recipe import Recipe
from vitclinic.training.run import Run, find_run

Progress = Callable[[str, int, int], None]
_IMAGES = 64
"""Images that a teacher sees at a time."""


def add_token_labels(
    recipe: Recipe, dataset: Dataset, device: torch.device, progress: Progress
) -> tuple[Recipe, Dataset]:
    """Return the recipe with the digest of its token labels, and the data with them; both as they are without.

    Labels that a teacher made are kept in the cache.

    Raises:
        VitclinicError: There is no such teacher or file, it does not fit the data, or it is not what the run began
            with.
    """
    task = recipe.task
    if not isinstance(task, Classification) or task.token_labels is None:
        return recipe, dataset
    config, train = task.token_labels, dataset.train
    found = find_run(config.source)
    if found is None and config.source.partition(":")[0] not in LIBRARIES:
        digest, maps = _read_file(config, dataset)
    else:
        teacher, size = _open_run(config.source, *found, dataset) if found else _open_library(config.source, dataset)
        digest = _digest_network(teacher)
        maps = _teach(teacher.to(device), size, digest, config, dataset, progress)
    if config.digest not in (None, digest):
        raise RecipeError(f"task.token_labels: '{config.source}' is not what the run began with: it has changed.")
    settled = task.model_copy(update={"token_labels": config.model_copy(update={"digest": digest})})
    splits = {**dataset.splits, "train": replace(train, label_maps=maps)}
    return recipe.model_copy(update={"task": settled}), replace(dataset, splits=splits)


def describe_token_labels(recipe: Recipe, dataset: Dataset) -> Dataset:
    """Return described data with token labels that nobody reads, to plan a run by."""
    if not isinstance(recipe.task, Classification) or recipe.task.token_labels is None:
        return dataset
    blank = np.zeros((1, 1, 1, len(dataset.classes)), np.float16)
    maps = LabelMaps(blank, None, np.zeros(len(dataset.train), np.int64), len(dataset.classes))
    return replace(dataset, splits={**dataset.splits, "train": replace(dataset.train, label_maps=maps)})


def _read_file(config: TokenLabelConfig, dataset: Dataset) -> tuple[str, LabelMaps]:
    """Return the digest and the labels of a file, which has those of all images of the source's training split."""
    path = find_path(config.source, RecipeError, "token labels")
    if path is None or not path.is_file():
        raise RecipeError(
            f"task.token_labels '{config.source}' is neither a run nor a file of labels; write RUN[@CHECKPOINT],"
            " timm:NAME or a safetensors file."
        )
    store = dataset.train.images
    shares, labels = read_maps(path, len(store.kept), len(dataset.classes))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return digest, LabelMaps(shares, labels, dataset.train.rows, len(dataset.classes))


def _open_run(source: str, folder: Path, checkpoint: str, dataset: Dataset) -> tuple[Normalized, Size]:
    run = Run.open(folder)
    if tuple(run.data_facts["classes"]) != dataset.classes:
        raise RecipeError(f"task.token_labels: the classes of '{source}' are not those of '{dataset.name}'.")
    return load_model(folder, checkpoint or None), run.spec.img_size


def _open_library(source: str, dataset: Dataset) -> tuple[Normalized, Size]:
    opened = open_library(source)
    published = (getattr(opened.network.backbone, "pretrained_cfg", None) or {}).get("input_size")
    return opened.network, opened.size or (tuple(published[1:]) if published else dataset.size)


def _digest_network(network: Normalized) -> str:
    hashed = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        hashed.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        hashed.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def _teach(
    teacher: Normalized, size: Size, digest: str, config: TokenLabelConfig, dataset: Dataset, progress: Progress
) -> LabelMaps:
    """Return the teacher's labels of the training images, from the cache if they were made before."""
    train, num_classes = dataset.train, len(dataset.classes)
    rows = hashlib.sha256(np.ascontiguousarray(train.rows).tobytes()).hexdigest()
    key = fingerprint("token labels", digest, dataset.digest, rows, list(size), config.top)
    path = cache_folder() / "token-labels" / f"{key[:32]}.safetensors"
    if not path.exists():
        parts = []
        for start in range(0, len(train), _IMAGES):
            indices = np.arange(start, min(start + _IMAGES, len(train)))
            images = _show_whole(train.read(indices), size)
            parts.append(_keep_largest(score_positions(teacher, images, num_classes), config.top))
            progress("labelling patches", int(indices[-1]) + 1, len(train))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_maps(path, *(np.concatenate([part[which] for part in parts]) for which in (0, 1)))
    shares, labels = read_maps(path, len(train), num_classes)
    return LabelMaps(shares, labels, np.arange(len(train)), num_classes)


def _show_whole(images: Images, size: Size) -> Tensor:
    """Return whole images at the teacher's size, whatever their aspect, in [0, 1]."""
    wanted = (size[1], size[0])
    shown = [np.asarray(as_image(image).resize(wanted, Image.Resampling.BICUBIC)) for image in images]
    return to_unit_interval(np.stack([image.reshape(*size, -1) for image in shown]))


def _keep_largest(shares_bhwk: Tensor, top: int) -> tuple[NDArray[np.float16], NDArray[np.int32]]:
    kept = shares_bhwk.topk(min(top, shares_bhwk.shape[-1]))
    return kept.values.half().numpy(), kept.indices.int().numpy()


@torch.no_grad()
def score_positions(network: Normalized, images: Tensor, num_classes: int) -> Tensor:
    """Return the shares of classes at each position of a network's last map, [B, h, w, K]: its own head on each alone.

    Raises:
        ModelError: The network is not one of timm's, has no map, or has other classes.
    """
    backbone: Any = network.backbone
    refused = f"task.token_labels: {type(backbone).__name__} cannot be the teacher;"
    if not hasattr(backbone, "forward_features") or not hasattr(backbone, "forward_head"):
        raise ModelError(
            f"{refused} it needs timm's forward_features and forward_head: write a file of labels instead."
        )
    if images.shape[1] != len(network.mean):
        raise ModelError(f"{refused} it takes {len(network.mean)} channels, and the images have {images.shape[1]}.")
    with eval_mode(network):
        features = backbone.forward_features((images.to(network.mean) - network.mean) / network.std)
        x_bhwd = _find_grid(backbone, features, images.shape[2:])
        if x_bhwd is None:
            raise ModelError(f"{refused} its last features {tuple(features.shape)} are not on a grid.")
        flat = x_bhwd.flatten(0, 2)  # each position as an image of its own
        if features.ndim == 3:
            alone = flat[:, None].expand(-1, 1 + getattr(backbone, "num_prefix_tokens", 0), -1)
        else:
            alone = flat[:, :, None, None] if x_bhwd.shape[3] == features.shape[1] else flat[:, None, None]
        scores = backbone.forward_head(alone)
    if scores.shape[-1] != num_classes:
        raise ModelError(f"{refused} it has {scores.shape[-1]} classes, and the data has {num_classes}.")
    shares: Tensor = scores.float().softmax(-1).view(*x_bhwd.shape[:3], -1).cpu()
    return shares


def _find_grid(backbone: Any, features: Tensor, size: torch.Size) -> Tensor | None:
    """Return features of a network as [B, h, w, D], without prefix tokens; None if they are on no grid."""
    if features.ndim == 4:
        last = getattr(backbone, "output_fmt", "NCHW") == "NHWC" or features.shape[1] != backbone.num_features
        return features if last else features.permute(0, 2, 3, 1)
    if features.ndim != 3:
        return None
    tokens = features[:, getattr(backbone, "num_prefix_tokens", 0) :]
    rows = round((tokens.shape[1] * size[0] / size[1]) ** 0.5)
    if rows == 0 or tokens.shape[1] % rows:
        return None
    return tokens.reshape(len(tokens), rows, -1, tokens.shape[2])
