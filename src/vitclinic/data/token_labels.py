"""Maps of soft labels: what a teacher says of each part of an image, moved along with crops, flips and mixes.

A map divides the whole stored image into h x w cells, each with shares of the classes. Of many classes, only the
largest shares are stored; the rest is spread evenly over the others. A patch of a training image gets the mean of the
cells that it shows, by area.

Shapes: M images with a map, B images of a batch, h x w cells of a map, k shares stored of K classes, g x g' patches of
a training image, N = g g'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitclinic._core.errors import DataError
from vitclinic._core.io import staged

Mix = Literal["labels", "teacher", "blend"]
_AGREED, _DISAGREED = 0.5, 0.9
"""The teacher's part in a class target of `blend`, where its class is the label's and where it is not."""


@dataclass(frozen=True)
class LabelMaps:
    """Maps of the images of a split.

    Example:
        >>> shares = np.array([[[[0.7, 0.2]]], [[[0.5, 0.3]]]], np.float16)  # two images, one cell, two of K classes
        >>> maps = LabelMaps(shares, np.array([[[[2, 0]]], [[[1, 2]]]]), np.arange(2), num_classes=4)
        >>> [round(share, 2) for share in maps.read(np.array([0]))[0, 0, 0].tolist()]
        [0.2, 0.05, 0.7, 0.05]
    """

    shares: NDArray[np.float16]
    """[M, h, w, k], shares of classes."""
    labels: NDArray[np.int32] | None
    """[M, h, w, k], the classes that `shares` are of; None if they are of all classes in order."""
    places: NDArray[np.int64]
    """The map of each image of the split, as a row of `shares`."""
    num_classes: int

    def take(self, rows: NDArray[np.int64]) -> LabelMaps:
        """Return the maps of some of the images."""
        return replace(self, places=self.places[rows])

    def read(self, indices: NDArray[np.int64]) -> Tensor:
        """Return the maps of the images at `indices` of the split, [B, h, w, K], whose shares add up to 1."""
        rows = self.places[indices]
        shares = torch.from_numpy(np.asarray(self.shares[rows], np.float32))
        if self.labels is None:
            return shares / shares.sum(-1, keepdim=True)
        others = self.num_classes - shares.shape[-1]
        rest = (1 - shares.sum(-1, keepdim=True)).clamp(min=0) / max(1, others)
        whole = rest.expand(*shares.shape[:3], self.num_classes).clone()
        whole.scatter_(3, torch.from_numpy(np.asarray(self.labels[rows], np.int64)), shares)
        return whole / whole.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Frames:
    """Parts of the stored images that training images show."""

    boxes: NDArray[np.float64]
    """[B, 4], left, top, right, bottom as shares of the stored image's sides; padding lies outside [0, 1]."""
    mirrored: NDArray[np.bool_]
    """[B], whether the image was mirrored left to right after that."""


@dataclass(frozen=True)
class TokenLabels:
    """Targets of patches, as a stream makes them from maps."""

    maps: LabelMaps
    grid: tuple[int, int]
    """Rows and columns of the network's patches."""
    class_targets: Mix = "labels"

    def read(self, indices: NDArray[np.int64], frames: Frames, smoothing: float) -> Tensor:
        """Return the targets of the patches of framed images, [B, N, K]."""
        labels_bnk = frame_labels(self.maps.read(indices), frames, self.grid)
        return (1 - smoothing) * labels_bnk + smoothing / labels_bnk.shape[2]

    def target_images(self, truth_bk: Tensor, labels_bnk: Tensor) -> Tensor:
        """Return the targets of whole images, [B, K], from those of the data and those of their patches."""
        if self.class_targets == "labels":
            return truth_bk
        taught_bk = labels_bnk.mean(1)
        return taught_bk if self.class_targets == "teacher" else blend_targets(truth_bk, taught_bk)


def blend_targets(truth_bk: Tensor, taught_bk: Tensor) -> Tensor:
    """Return the teacher's part and the truth's: half and half where they agree, else 0.9 and 0.1 [VOLO's code]."""
    agreed = (truth_bk.argmax(1) == taught_bk.argmax(1))[:, None]
    part = torch.where(agreed, _AGREED, _DISAGREED)
    return part * taught_bk + (1 - part) * truth_bk


def frame_labels(maps_bhwk: Tensor, frames: Frames, grid: tuple[int, int]) -> Tensor:
    """Return the labels of the patches of framed images, [B, N, K]: means by area of the cells that a patch shows.

    A patch of padding has the labels of the nearest cell.
    """
    height, width = maps_bhwk.shape[1:3]
    down_bgh = torch.from_numpy(_overlaps(frames.boxes[:, [1, 3]], grid[0], height))
    across_bgw = torch.from_numpy(_overlaps(frames.boxes[:, [0, 2]], grid[1], width))
    mirrored = torch.from_numpy(frames.mirrored)[:, None, None]
    across_bgw = torch.where(mirrored, across_bgw.flip(1), across_bgw)
    labels = torch.einsum("bih,bhwk,bjw->bijk", down_bgh.to(maps_bhwk), maps_bhwk, across_bgw.to(maps_bhwk))
    return labels.flatten(1, 2)


def _overlaps(ends: NDArray[np.float64], parts: int, cells: int) -> NDArray[np.float64]:
    """Return the share of each of `parts` equal parts of [low, high] that lies in each of `cells`, [B, parts, cells].

    `ends` [B, 2] are in [0, 1] where they are on the map; what lies beside it counts as its border.
    """
    tiny = 1e-6
    edges = ends[:, :1] + (ends[:, 1:] - ends[:, :1]) * np.linspace(0, 1, parts + 1)
    low = np.clip(edges[:, :-1, None] * cells, 0, cells - tiny)
    high = np.maximum(np.clip(edges[:, 1:, None] * cells, 0, cells), low + tiny)
    cell = np.arange(cells)
    shared = np.clip(np.minimum(high, cell + 1) - np.maximum(low, cell), 0, None)
    return np.asarray(shared / shared.sum(-1, keepdims=True))


def mix_labels(labels_bnk: Tensor, partner: NDArray[np.int64], theirs_bhw: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the labels of patches of the first len(partner) images after mixing them with their partners.

    Args:
        labels_bnk: Labels of all images before, of which `partner` names rows.
        partner: The row that each is mixed with.
        theirs_bhw: The partner's part in each pixel.
        grid: Rows and columns of patches.
    """
    count, height, width = theirs_bhw.shape
    whole = Frames(np.tile([0.0, 0.0, 1.0, 1.0], (count, 1)), np.zeros(count, bool))
    part_bn1 = frame_labels(theirs_bhw.reshape(count, height, width, 1), whole, grid)
    return torch.lerp(labels_bnk[:count], labels_bnk[torch.from_numpy(partner)], part_bn1.to(labels_bnk))


def write_maps(path: Path, shares: NDArray[np.float16], labels: NDArray[np.int32] | None) -> None:
    """Write maps as a safetensors file with `shares` and, unless they are of all classes, `labels`."""
    from safetensors.numpy import save_file

    arrays = {"shares": shares} if labels is None else {"shares": shares, "labels": labels}
    with staged(path) as staging:
        save_file(arrays, staging)


def read_maps(path: Path, count: int, num_classes: int) -> tuple[NDArray[np.float16], NDArray[np.int32] | None]:
    """Return the arrays of a file of maps, mapped into memory.

    Args:
        path: A safetensors file.
        count: Images that it must have maps of.
        num_classes: Classes of the data.

    Raises:
        DataError: It is no such file, or of other images or classes.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"Token labels '{path}' cannot be read as a safetensors file ({error}).") from error
    shares, labels = found.get("shares"), found.get("labels")
    if shares is None or shares.ndim != 4 or not shares.is_floating_point():
        raise DataError(f"Token labels '{path}' have no numbers 'shares' [images, rows, columns, classes].")
    if len(shares) != count:
        raise DataError(f"Token labels '{path}' are of {len(shares):,} images, and the data has {count:,} to train on.")
    if labels is None and shares.shape[3] != num_classes:
        raise DataError(f"Token labels '{path}' are of {shares.shape[3]} classes, and the data has {num_classes}.")
    if labels is not None and (
        labels.shape != shares.shape or labels.is_floating_point() or labels.min() < 0 or labels.max() >= num_classes
    ):
        raise DataError(f"'labels' of the token labels '{path}' are not a class below {num_classes} for each share.")
    return shares.numpy(), None if labels is None else labels.numpy()
