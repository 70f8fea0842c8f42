"""The endless stream of training samples that batches are cut from, and the images of a split in order.

Epoch after epoch of shuffled images, one after the other: place p of the stream is in epoch p // n. A step
takes the next `batch_size` places; no image is ever dropped, and a batch may span two epochs. The sample at
a place, and its random numbers, depend on (seed, place) alone: a run can start anywhere in the
stream, and any division of it into batches, processes and workers gives the same samples.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from vitclinic._core.environment import read_count
from vitclinic._core.errors import DataError
from vitclinic.data.annotations.batch import Annotations
from vitclinic.data.annotations.geometry import fit_annotated
from vitclinic.data.annotations.view import AnnotatedView
from vitclinic.data.augment import Augmenter, Mixing, PatchMixing, soft_targets, to_unit_interval
from vitclinic.data.batch import Batch
from vitclinic.data.cache import StreamedImages
from vitclinic.data.config import Augment
from vitclinic.data.dataset import Dataset
from vitclinic.data.decoding import Images, Size, centre_view
from vitclinic.data.randomness import Keys, sample_keys, view_keys
from vitclinic.data.shards.images import ShardedImages, make_order
from vitclinic.data.split import Split
from vitclinic.data.token_labels import TokenLabels, mix_labels

Places = range


class View(Protocol):
    """Protocol of what makes one view of each image: stored pixels and keys to [B, C, height, width] in [0, 1]."""

    @property
    def size(self) -> Size: ...

    @property
    def is_heavy(self) -> bool:
        """True if it is slow enough to be worth worker processes."""

    def __call__(self, images: Images, keys: Keys) -> Tensor: ...


class TrainingStream(TorchDataset[Batch]):
    """Endless stream of augmented training samples, read in batches by place: `stream[range(0, 128)]`.

    Args:
        dataset: The data set whose training split to read.
        augment: The augmentation.
        seed: Seed of the order and of the augmentation.
        views: What makes each view of an image: the first makes a batch's images, the others its crops. By default
            there is one view, by `augment`; mixing and label smoothing remain those of `augment`.
        annotated: What makes the view of an annotated image. By default it mirrors images as `augment` does.
        token_labels: What makes the targets of patches.

    Raises:
        DataError: The data set has no training images.

    Example:
        >>> from vitclinic.data import Augment, open_data
        >>> stream = TrainingStream(open_data("digits"), Augment(level="light"), seed=0)
        >>> batch = stream[range(0, 128)]
        >>> batch.images.shape, batch.targets.shape
        (torch.Size([128, 1, 8, 8]), torch.Size([128]))
    """

    def __init__(
        self,
        dataset: Dataset,
        augment: Augment,
        seed: int,
        views: Sequence[View] = (),
        annotated: AnnotatedView | None = None,
        token_labels: TokenLabels | None = None,
    ) -> None:
        dataset.check_trainable()
        self.split: Split = dataset.train
        self.classes = len(dataset.classes)
        self.seed = seed
        self.augmenter = Augmenter(augment, dataset.size)
        config = self.augmenter.config
        self.smoothing = config.smoothing or 0.0
        self.order = make_order(self.split, seed, config.repeats or 1)
        self.mixing = _mixing(config, dataset.size)
        self.views: Sequence[View] = views or [self.augmenter]
        self.token_labels = token_labels
        self.annotated: AnnotatedView | None = None
        if dataset.target != "class":
            self.annotated = annotated or AnnotatedView(dataset.size, flip=bool(config.flip))

    questions = 1
    """Questions that are asked of an image at a time, each with targets of its own."""

    @property
    def has_soft_targets(self) -> bool:
        """True if targets are shares of the classes [B, K]."""
        taught = self.token_labels is not None and self.token_labels.class_targets != "labels"
        return self.mixing is not None or self.smoothing > 0 or taught

    @property
    def patch_grid(self) -> Size | None:
        """Rows and columns of the patches that have targets of their own; None if none have."""
        if self.token_labels is not None:
            return self.token_labels.grid
        return self.mixing.grid if isinstance(self.mixing, PatchMixing) else None

    def __getitem__(self, places: Places) -> Batch:
        self._look_ahead(places.stop)
        if self.annotated is not None:
            return self._read_annotated(places, self.annotated)
        if self.token_labels is not None:
            return self._read_taught(places, self.token_labels)
        count = len(places)
        partner, indices, keys = self._draw(places)
        pixels = self.split.read(indices)
        images, *crops = (view(pixels, view_keys(keys, number)) for number, view in enumerate(self.views))
        labels = torch.from_numpy(self.split.labels[indices])
        targets, patch_targets = labels[:count], None
        if self.mixing is not None and partner is not None:
            soft = soft_targets(labels, self.classes, self.smoothing)
            if isinstance(self.mixing, PatchMixing):
                images, targets, patch_targets = self.mixing(images, soft, partner, keys)
            else:
                images, targets = self.mixing(images, soft, partner, keys)
        elif self.smoothing:
            targets = soft_targets(targets, self.classes, self.smoothing)
        index, signed = torch.from_numpy(indices[:count]), torch.from_numpy(keys[:count].view(np.int64))
        return Batch(images, targets, index, signed, patch_targets, tuple(crops))

    def _draw(self, places: Places) -> tuple[NDArray[np.int64] | None, NDArray[np.int64], Keys]:
        """Return the partners of the images at places if they are mixed, then images and keys.

        Partners that fall outside this batch are read for its sake.
        """
        partner = None if self.mixing is None else self._partners(places)
        wanted = np.arange(places.start, places.stop, dtype=np.int64)
        if partner is not None:
            wanted = np.concatenate([wanted, np.setdiff1d(wanted ^ 1, wanted)])
        indices, showings = self.order(wanted)
        return partner, indices, sample_keys(self.seed, showings, indices)

    def _read_taught(self, places: Places, taught: TokenLabels) -> Batch:
        """Return images whose patches have targets, which follow crop, flip and mixing."""
        count = len(places)
        partner, indices, keys = self._draw(places)
        images, frames = self.augmenter.augment(self.split.read(indices), keys)
        labels = torch.from_numpy(self.split.labels[indices])
        patch_targets = taught.read(indices, frames, self.smoothing)
        targets = taught.target_images(soft_targets(labels, self.classes, self.smoothing), patch_targets)
        if self.mixing is not None and partner is not None:
            images, targets = self.mixing(images, targets, partner, keys)[:2]
            patch_targets = mix_labels(patch_targets, partner, self._mixed_in(images, keys), taught.grid)
        elif not self.has_soft_targets:
            targets = labels
        index, signed = torch.from_numpy(indices[:count]), torch.from_numpy(keys[:count].view(np.int64))
        return Batch(images, targets, index, signed, patch_targets)

    def _mixed_in(self, images: Tensor, keys: Keys) -> Tensor:
        """Return the partner's part in each pixel of mixed images, [B, h, w]: what mixing makes of 0 and 1."""
        assert self.mixing is not None
        own = torch.zeros(len(images), 1, *images.shape[2:])
        partner = len(images) + np.arange(len(images))
        nothing = torch.zeros(2 * len(images), 1)
        return self.mixing(torch.cat([own, own + 1]), nothing, partner, keys)[0][:, 0]

    def _read_annotated(self, places: Places, view: AnnotatedView) -> Batch:
        """Return images that annotations follow through their augmentation; nothing is mixed."""
        indices, showings = self.order(np.arange(places.start, places.stop, dtype=np.int64))
        keys = sample_keys(self.seed, showings, indices)
        images, annotations = view(self.split.read(indices), self.split.annotate(indices), keys)
        labels, index = torch.from_numpy(self.split.labels[indices]), torch.from_numpy(indices)
        signed = torch.from_numpy(keys.view(np.int64))
        return Batch(images, labels, index, signed, annotations=Annotations.join(annotations))

    def _look_ahead(self, place: int) -> None:
        """Have the shards fetched that are read from this place on."""
        images = self.split.images
        if isinstance(images, ShardedImages):
            coming, _ = self.order(np.arange(place, place + images.span, dtype=np.int64))
            images.expect(self.split.rows[coming])

    @staticmethod
    def _partners(places: Places) -> NDArray[np.int64]:
        """Return, for each place, the row of its neighbour (places 2k and 2k + 1), in the batch or appended to it."""
        mine = np.arange(places.start, places.stop, dtype=np.int64)
        rows = (mine ^ 1) - places.start
        outside = np.flatnonzero((rows < 0) | (rows >= len(places)))
        rows[outside] = len(places) + np.arange(len(outside))
        return rows

    def batches(self, requests: Iterable[Places], workers: int | None, pin: bool = False) -> Iterator[Batch]:
        """Return an iterator over the batches of `requests`, in order.

        Args:
            requests: The places of each batch.
            workers: Processes that read ahead; None uses spare CPUs if decoding or augmentation is slow, 0 reads in
                this process.
            pin: Put batches into page-locked memory.
        """
        if workers is None:
            heavy = any(view.is_heavy for view in ([self.annotated] if self.annotated else self.views))
            workers = spare_workers() if heavy or is_streamed(self.split) else 0
        return read_ahead(self, requests, workers, pin)


def _mixing(config: Augment, size: Size) -> Mixing | PatchMixing | None:
    mixup, cutmix, probability = config.mixup or 0.0, config.cutmix or 0.0, config.mix_probability or 0.0
    if config.cutmix_cell is not None:
        return PatchMixing(cutmix, probability, config.cutmix_cell, size)
    return Mixing(mixup, cutmix, probability) if mixup or cutmix else None


class EvaluationStream(TorchDataset[Batch]):
    """Batches of a split by its rows, without augmentation."""

    def __init__(self, dataset: Dataset, split: str) -> None:
        self.images, self.size = dataset.splits[split], dataset.size

    def __getitem__(self, rows: range) -> Batch:
        indices = np.arange(rows.start, rows.stop, dtype=np.int64)
        index, labels = torch.from_numpy(indices), torch.from_numpy(self.images.labels[indices])
        if isinstance(self.images.images, ShardedImages):
            self.images.images.expect(self.images.rows[rows.stop : rows.stop + self.images.images.span])
        if self.images.annotations is None:
            x_bhwc = np.ascontiguousarray(centre_view(self.images.read(indices), self.size))
            return Batch(to_unit_interval(x_bhwc), labels, index, index)
        x_bhwc, annotations = fit_annotated(self.images.read(indices), self.images.annotate(indices), self.size)
        return Batch(to_unit_interval(x_bhwc), labels, index, index, annotations=Annotations.join(annotations))


def evaluation_batches(dataset: Dataset, split: str, batch_size: int, part: int = 0, parts: int = 1) -> Iterator[Batch]:
    """Return an iterator over the images of a split, without augmentation and in order.

    Args:
        dataset: The data set.
        split: `train`, `val` or `test`.
        batch_size: Images per batch; the last batch may be smaller.
        part: The share to read, from 0, if the split is divided between processes.
        parts: The number of nearly equal shares.

    Example:
        >>> from vitclinic.data import open_data
        >>> [len(batch) for batch in evaluation_batches(open_data("digits"), "test", batch_size=100)]
        [100, 80]
    """
    stream = EvaluationStream(dataset, split)
    mine = np.array_split(np.arange(len(stream.images)), parts)[part]
    if not len(mine):
        return iter(())
    stop = int(mine[-1]) + 1
    requests = [range(start, min(start + batch_size, stop)) for start in range(int(mine[0]), stop, batch_size)]
    workers = spare_workers() if is_streamed(stream.images) else 0
    return read_ahead(stream, requests, workers)


def is_streamed(split: Split) -> bool:
    """Return True if reading decodes files rather than copying from memory."""
    return isinstance(split.images, StreamedImages)


def spare_workers() -> int:
    """Return the number of CPUs left beside this process and its siblings: at least 1, at most 8."""
    processes = max(1, read_count("LOCAL_WORLD_SIZE"))
    return max(1, min(8, (os.cpu_count() or 1) // processes - 1))


T = TypeVar("T")


def read_ahead(stream: TorchDataset[T], requests: Iterable[range], workers: int, pin: bool = False) -> Iterator[T]:
    """Return an iterator over `stream[request]` for each request, read by `workers` processes (0: by this one)."""
    if workers == 0:
        return (stream[places] for places in requests)
    loader = DataLoader(
        _Guarded(stream),
        batch_size=None,
        sampler=requests,
        num_workers=workers,
        collate_fn=_as_it_is,
        worker_init_fn=_own_session,
        pin_memory=pin,
    )
    return _raise_errors(iter(loader))


class _Guarded(TorchDataset[T | DataError]):
    """A stream whose errors about data are returned: raised in a worker, they would bring its traceback along."""

    def __init__(self, stream: TorchDataset[T]) -> None:
        self.stream = stream

    def __getitem__(self, places: range) -> T | DataError:
        try:
            return self.stream[places]
        except DataError as error:
            return error


def _raise_errors(results: Iterator[T | DataError]) -> Iterator[T]:
    for result in results:
        if isinstance(result, DataError):
            raise result
        yield result


def _as_it_is(batch: Any) -> Any:
    return batch


def _own_session(worker: int) -> None:
    """Keep a terminal's Ctrl-C and a scheduler's SIGTERM, sent to the whole group, from the workers.

    The main process decides what they mean; its workers end when it tells them to, or is gone.
    """
    os.setsid()
