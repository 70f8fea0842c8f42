"""Images from one's own loader: any iterable of batches, such as a torch DataLoader, as a `Dataset`.

Shapes: B images of a batch, C channels, h x w pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitclinic._core.errors import DataError, shorten
from vitclinic._core.io import fingerprint
from vitclinic.data.dataset import Dataset
from vitclinic.data.source import SPLITS
from vitclinic.data.split import Split

LOADER = "loader"
"""The name of a data set that was read from a loader."""
LARGEST = 4 * 2**30
"""Maximum bytes of images kept in memory."""
TOLERANCE = 1e-3
"""Distance from [0, 1] that rounding may cause."""
DARKEST = 2 / 255
"""Images none of whose pixels is brighter were, as far as one can tell, divided by 255 twice."""

_IMAGES = ("pixel_values", "images", "image", "x")
_LABELS = ("labels", "label", "targets", "target", "y")


class Normalization(NamedTuple):
    """Mean and standard deviation that a network's input is normalized by: (pixel - mean) / std for each channel.

    Example:
        >>> Normalization(mean=[0.5], std=[0.25]).std
        [0.25]
    """

    mean: Sequence[float]
    std: Sequence[float]


class LoadedImages:
    """Images in memory as floats in [0, 1], in the form that `Split` reads."""

    def __init__(self, x_bchw: Tensor, digest: str) -> None:
        self.x_bhwc: NDArray[np.float32] = x_bchw.permute(0, 2, 3, 1).contiguous().numpy()
        self.digest = digest
        self.skipped: list[str] = []
        self.kept = np.arange(len(x_bchw))

    def read(self, indices: NDArray[np.int64]) -> Any:
        """Return images [B, h, w, C]."""
        return self.x_bhwc[indices]


def load_batches(
    data: Iterable[Any] | Mapping[str, Iterable[Any]],
    *,
    limit: int | None = None,
    normalization: Normalization | None = None,
    normalized: bool | None = None,
) -> Dataset:
    """Read a loader once and keep its images in memory.

    Args:
        data: An iterable of batches, or of single samples: `(images, labels)`, a mapping such as
            `{"pixel_values": ..., "labels": ...}`, or images alone. Or a mapping from splits to such loaders, as in
            `{"train": ..., "test": ...}`; a single loader is used for every split.
        limit: Read at most this many images per split.
        normalization: Mean and std that the images are normalized by, if they are.
        normalized: True if the images are normalized, False if not; by default, given a `normalization`, this is
            decided by their range.

    Returns:
        A data set with the images, in [0, 1], and the labels of the loader.

    Raises:
        DataError: The images are outside [0, 1] without being declared as normalized, look as if they were divided by
            255 twice (and `normalized` is not False), differ in size or exceed the memory limit, or the labels are not
            class indices.

    Example:
        >>> batches = [(torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 1]))]
        >>> dataset = load_batches(batches)
        >>> len(dataset.test), dataset.size, dataset.classes
        (4, (8, 8), ('0', '1', '2'))
    """
    if isinstance(data, Mapping) and not is_split_mapping(data):
        keys = ", ".join(map(str, data)) or "none"
        raise DataError(
            f"A mapping of loaders has the splits {', '.join(SPLITS)} as keys (got {keys}); put a single batch into a"
            " list, as in data=[batch]."
        )
    loaders: Mapping[str, Iterable[Any]] = data if is_split_mapping(data) else {"test": data}
    read = {split: _read(loader, limit, normalization, normalized) for split, loader in loaders.items()}
    shapes = {split: images.x_bhwc.shape[1:] for split, (images, _) in read.items()}
    if len(set(shapes.values())) > 1:
        raise DataError(f"The splits have images of different sizes: {_by_split(shapes)}.")
    parts = {split: _split(images, labels) for split, (images, labels) in read.items()}
    undivided = not is_split_mapping(data)
    if undivided:
        parts = dict.fromkeys(SPLITS, parts["test"])
    empty = Split(next(iter(parts.values())).images, np.arange(0), np.arange(0))
    height, width, channels = next(iter(shapes.values()))
    digest = fingerprint([(split, images.digest) for split, (images, _) in sorted(read.items())])
    return Dataset(
        name=LOADER,
        classes=_classes(loaders.values(), [labels for _, labels in read.values()]),
        size=(height, width),
        channels=channels,
        splits={split: parts.get(split, empty) for split in SPLITS},
        digest=digest,
        undivided=undivided,
    )


def is_split_mapping(data: Any) -> TypeGuard[Mapping[str, Iterable[Any]]]:
    """Return True for `{"train": loader, "test": loader}`, False for a batch that is a mapping."""
    return isinstance(data, Mapping) and bool(data) and set(data) <= set(SPLITS)


def split_batch(batch: Any) -> tuple[Tensor, Tensor | None]:
    """Return the images and, if there are any, the labels of a batch or of a single sample."""
    labels: Any = None
    if isinstance(batch, Mapping):
        images = next((batch[key] for key in _IMAGES if key in batch), None)
        labels = next((batch[key] for key in _LABELS if key in batch), None)
        if images is None:
            raise DataError(
                f"A batch has the keys {', '.join(map(str, batch))}; expected images under one of {', '.join(_IMAGES)}."
            )
    elif isinstance(batch, Sequence) and len(batch):
        images, labels = batch[0], batch[1] if len(batch) > 1 else None
    else:
        images = batch
    if not isinstance(images, Tensor) or images.ndim not in (3, 4):
        shape = f" of shape {tuple(images.shape)}" if isinstance(images, Tensor) else ""
        raise DataError(
            f"A batch has {type(images).__name__}{shape} instead of images [B, C, h, w] as a tensor:"
            " make the loader yield (images, labels)."
        )
    single = images.ndim == 3
    return images[None] if single else images, None if labels is None else _class_numbers(labels, single)


def _class_numbers(labels: Any, single: bool) -> Tensor:
    try:
        y_b = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(f"Labels must be class indices [B], as numbers (got {shorten(labels)}).") from None
    y_b = y_b[None] if single else y_b
    if y_b.ndim == 2 and y_b.shape[1] == 1:
        y_b = y_b[:, 0]
    if y_b.ndim != 1 or y_b.is_floating_point():
        hint = "; of one-hot or soft labels, pass labels.argmax(1)" if y_b.ndim == 2 else ""
        raise DataError(f"Labels must be class indices [B] (got {y_b.dtype} of shape {tuple(y_b.shape)}){hint}.")
    return y_b.long()


def _read(
    loader: Iterable[Any], limit: int | None, normalization: Normalization | None, normalized: bool | None
) -> tuple[LoadedImages, NDArray[np.int64] | None]:
    """Return the images in [0, 1] and, if there are any, their labels."""
    images: list[Tensor] = []
    labels: list[Tensor] = []
    count = size = 0
    try:
        batches = iter(loader)
    except TypeError:
        raise DataError(
            f"Cannot read data from {type(loader).__name__}: pass a folder, a name from `vitclinic list datasets`,"
            " or a loader."
        ) from None
    for batch in batches:
        x_bchw, y_b = split_batch(batch)
        x_bchw = x_bchw.detach().cpu()[: None if limit is None else limit - count]
        if images and x_bchw.shape[1:] != images[0].shape[1:]:
            raise DataError(f"All images must have the same size (got {_shape(images[0])}, then {_shape(x_bchw)}).")
        images.append(x_bchw)
        if y_b is not None:
            labels.append(y_b.cpu()[: len(x_bchw)])
        count += len(x_bchw)
        size += x_bchw.numel() * 4
        if count == limit:
            break
        if size > LARGEST:
            raise DataError(f"The loader has more than {LARGEST / 2**30:.0f} GiB of images: pass limit={count // 2}.")
    if not count:
        raise DataError("The loader has no images.")
    if labels and sum(map(len, labels)) != count:
        raise DataError(f"The loader has {count} images and {sum(map(len, labels))} labels.")
    y_n = torch.cat(labels).numpy() if labels else None
    if y_n is not None and y_n.min() < 0:
        raise DataError(f"Labels must be class indices from 0 (got {y_n.min()}).")
    x_nchw = _in_unit_interval(torch.cat(images), normalization, normalized)
    if normalized is not False and 0 < x_nchw.max() <= DARKEST:
        raise DataError(
            f"The brightest pixel of the loader's images is {x_nchw.max():.2g}: they were probably divided by 255 twice"
            " (ToTensor already does that). Divide once; if they are meant to be this dark, pass normalized=False."
        )
    digest = hashlib.sha256(x_nchw.numpy().tobytes() + (b"" if y_n is None else y_n.tobytes())).hexdigest()
    return LoadedImages(x_nchw, digest), y_n


def _in_unit_interval(x_nchw: Tensor, normalization: Normalization | None, normalized: bool | None) -> Tensor:
    """Undo the normalization of normalized images; raise a DataError if the result is not in [0, 1]."""
    if x_nchw.dtype == torch.uint8:
        raise DataError("The images are uint8: divide them by 255, as ToTensor does, so that pixels are in [0, 1].")
    x_nchw = x_nchw.float()
    if not bool(x_nchw.isfinite().all()):
        raise DataError("An image has a pixel that is not finite.")
    inside = _is_inside(x_nchw)
    channels = x_nchw.shape[1]
    if normalization is not None and len(normalization.mean) not in (1, channels):
        raise DataError(f"mean and std have {len(normalization.mean)} values and the images {channels} channels.")
    if normalization is None:
        if not inside:
            low, high = x_nchw.min().item(), x_nchw.max().item()
            raise DataError(
                f"The loader's pixels range from {low:.3g} to {high:.3g}; expected [0, 1]. If they are normalized,"
                " pass mean= and std=, or normalized=True if the network's own preprocessing was used; otherwise scale"
                " them to [0, 1]."
            )
        return x_nchw
    if not (not inside if normalized is None else normalized):
        return _inside(x_nchw, "The loader's pixels range")
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in normalization)
    return _inside(x_nchw * std + mean, "After undoing mean and std, the loader's pixels range")


def _is_inside(x_nchw: Tensor) -> bool:
    return bool(x_nchw.min() >= -TOLERANCE) and bool(x_nchw.max() <= 1 + TOLERANCE)


def _inside(x_nchw: Tensor, what: str) -> Tensor:
    if not _is_inside(x_nchw):
        raise DataError(f"{what} from {x_nchw.min():.3g} to {x_nchw.max():.3g}; expected [0, 1].")
    return x_nchw.clamp(0, 1)


def _split(images: LoadedImages, labels: NDArray[np.int64] | None) -> Split:
    count = len(images.kept)
    return Split(images, np.arange(count), np.zeros(count, np.int64) if labels is None else labels)


def _classes(loaders: Iterable[Any], labels: Sequence[NDArray[np.int64] | None]) -> tuple[str, ...]:
    """Return the names that the loader's data set has, or numbers up to the largest label; none without labels."""
    if any(y_n is None for y_n in labels):
        return ()
    count = max(int(y_n.max()) for y_n in labels if y_n is not None) + 1
    for loader in loaders:
        names = getattr(getattr(loader, "dataset", loader), "classes", None)
        if isinstance(names, Sequence) and len(names) >= count and all(isinstance(name, str) for name in names):
            return tuple(names)
    return tuple(map(str, range(count)))


def _shape(x_bchw: Tensor) -> str:
    return " x ".join(map(str, x_bchw.shape[1:]))


def _by_split(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{split} {' x '.join(map(str, shape))}" for split, shape in shapes.items())
