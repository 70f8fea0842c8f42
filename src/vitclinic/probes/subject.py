"""What probes measure: a network, and the images to measure it on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vitclinic._core.distributed import ALONE, Distributed
from vitclinic._core.errors import AnatomyError, EmptySplitError, ModelError
from vitclinic._core.hashing import fingerprint
from vitclinic.anatomy import Anatomy
from vitclinic.data import Augment, Batch, Dataset, Split, TrainingStream, evaluation_batches, open_data
from vitclinic.data.splits import subset
from vitclinic.probes.digest import network_digest
from vitclinic.probes.restoring import preserve_state

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, how many images are done, how many there are)."""


@dataclass(frozen=True)
class PastWeights:
    """The weights that a training went through, by epochs done, in order; the last are its final ones.

    Nothing is read before it is asked for.
    """

    weights: Mapping[float, Callable[[], Mapping[str, Tensor]]]
    """Reads a state dict of the network."""
    projections: Callable[[], Mapping[float, NDArray[np.float64]]]
    """Reads random projections [k] of all parameters, the same k numbers at every epoch."""
    digest: Callable[[], str]
    """Stands for all of them."""
    finished: bool
    """Whether the training came to its end."""


@dataclass(frozen=True)
class Training:
    """How a network was trained: what a probe of its loss repeats."""

    augment: Augment
    """What its images went through, mixing included."""
    decay: float
    """Its weight decay."""
    decayed: frozenset[str]
    """The names of the parameters that it acted on."""
    past: PastWeights | None = None
    """The weights it went through, where they were kept."""


class Subject:
    """A network that takes pixels in [0, 1], and at most `limit` images of one split of the data.

    The images are the first of the split's stratified order, so that a smaller limit is part of a larger one.
    `batch_size` is how many images go through the network at a time; it is halved when memory runs out.
    `output_names` are the classes that the network's outputs mean, and `training` how it was trained, where that is
    known. `scratch` has, by the names of probes, the files where they may keep unfinished work (see `Partial`).
    `run` is the training run that it comes from, for those who know runs. With several processes (`distributed`), each
    of which has this subject, probes divide their work among them.
    """

    def __init__(
        self,
        network: nn.Module,
        dataset: Dataset,
        *,
        name: str = "network",
        split: str = "test",
        limit: int | None = None,
        batch_size: int = 64,
        seed: int = 0,
        output_names: tuple[str, ...] | None = None,
        training: Training | None = None,
        scratch: dict[str, Path] | None = None,
        progress: Progress = lambda what, done, total: None,
        distributed: Distributed = ALONE,
        run: Any = None,
    ) -> None:
        check_ready(network, name)
        self.network = network
        self.name = name
        self.split = split
        self.dataset = _limit(dataset, split, limit)
        self._whole = dataset
        self._views: dict[tuple[str, int | None], Subject] = {}
        self._elsewhere: dict[tuple[str, int | None], Subject] = {}
        self._origin: Subject = self
        self.batch_size = batch_size
        self.seed = seed
        self.output_names = output_names
        self.training = training
        self.scratch = {} if scratch is None else scratch
        self.progress = progress
        self.distributed = distributed
        self.run = run

    def on(self, split: str, limit: int | None = None, *, strict: bool = False) -> Subject:
        """Return the same network with at most `limit` images of that split; the same object for the same question.

        With `strict` the split must be known to be what its name says: data that is not divided, such as a single
        loader, stands for any split otherwise.
        """
        if strict and self._whole.undivided and split != self.split:
            raise EmptySplitError(f"'{self._whole.name}' does not say which of its images are for {split}.", split)
        if (split, limit) not in self._views:
            self._views[split, limit] = self._with(self._whole, split, limit, self.output_names)
        return self._views[split, limit]

    def on_source(self, source: str, limit: int | None = None) -> Subject:
        """The same network with at most `limit` images of another data source, whose classes may be others.

        They are brought to the size that the network is given here. The outputs are taken to mean the classes of the
        data that it is examined on, where there is nothing else to say it and these are as many.
        """
        if (source, limit) not in self._elsewhere:
            size, channels = self.dataset.size, self.dataset.channels
            opened = open_data(source, size=size, channels=channels, progress=self.progress)
            dataset = replace(opened, splits={"test": opened.unseen})
            names = self.classes if self.outputs == len(self.classes) else None
            self._elsewhere[source, limit] = self._with(dataset, "test", limit, self.output_names or names)
        return self._elsewhere[source, limit]

    def on_dataset(self, dataset: Dataset) -> Subject:
        """Return the same network with the same split of another data set."""
        return self._with(dataset, self.split, None, self.output_names)

    def select(self, numbers: Sequence[int]) -> Subject:
        """The same network with those of its images, in that order."""
        rows, images = np.array(numbers), self.images
        chosen = Split(images.images, images.rows[rows], images.labels[rows])
        dataset = replace(self.dataset, splits={**self.dataset.splits, self.split: chosen})
        return self._with(dataset, self.split, None, self.output_names)

    def _with(self, dataset: Dataset, split: str, limit: int | None, output_names: tuple[str, ...] | None) -> Subject:
        view = Subject(
            self.network,
            dataset,
            name=self.name,
            split=split,
            limit=limit,
            batch_size=self.batch_size,
            seed=self.seed,
            output_names=output_names,
            training=self.training,
            scratch=self.scratch,
            progress=self.progress,
            distributed=self.distributed,
            run=self.run,
        )
        view._origin = self._origin  # what is true of the network is found out once
        return view

    def __len__(self) -> int:
        return len(self.images)

    @property
    def images(self) -> Split:
        """The images to measure on, with their labels."""
        return self.dataset.splits[self.split]

    @property
    def classes(self) -> tuple[str, ...]:
        return self.dataset.classes

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self._like.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the network's own numbers."""
        return self._like.dtype

    @property
    def _like(self) -> Tensor:
        tensors = (*self.network.parameters(), *self.network.buffers())
        return next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))

    def batches(self) -> Iterator[Batch]:
        """All images in order, unaugmented, where the network can take them; the last batch may be smaller."""
        for batch in evaluation_batches(self.dataset, self.split, self.batch_size):
            yield batch.to(self.device, self.dtype)

    def own_batches(self) -> Iterator[Batch]:
        """As `batches`, of those images that are this process's share: all of them where there is one process."""
        part, parts = self.distributed.rank, self.distributed.size
        for batch in evaluation_batches(self.dataset, self.split, self.batch_size, part, parts):
            yield batch.to(self.device, self.dtype)

    def augmented_batches(
        self, size: int, count: int, augment: bool = True, *, which: Iterable[int] | None = None
    ) -> Iterator[Batch]:
        """The first `count` batches of `size` training images as its training would have shown them with this seed.

        Without a known training, or without `augment`, the images as they are. `which` are the numbers of some of them.
        """
        seen = self.training.augment if augment and self.training is not None else Augment(level="none")
        stream = TrainingStream(self.dataset, seen, self.seed)
        places = (range(number * size, (number + 1) * size) for number in (range(count) if which is None else which))
        for batch in stream.batches(places, workers=0):
            yield batch.to(self.device, self.dtype)

    def logits(self, images: Tensor) -> Tensor:
        """The network's output [B, K] for pixels in [0, 1]."""
        return as_logits(self.network(images))

    @cached_property
    def example(self) -> Tensor:
        """The first image, [1, C, H, W]."""
        return next(evaluation_batches(self.dataset, self.split, 1)).to(self.device, self.dtype).images

    @cached_property
    def outputs(self) -> int:
        """How many classes the network tells apart. The first call of the network: a misfit is a sentence here."""
        try:
            with preserve_state(self.network, self.seed), torch.no_grad():
                logits = self.logits(self.example)
        except ModelError:  # a sentence already
            raise
        except Exception as error:  # the user's own code may raise anything
            shape = " x ".join(str(side) for side in self.example.shape[1:])
            raise ModelError(f"{self.name} does not take the data's {shape} images: {_reason(error)}.") from error
        if logits.ndim != 2:
            raise ModelError(f"{self.name} returns {tuple(logits.shape)} for one image; expected (1, classes).")
        return logits.shape[1]

    @property
    def anatomy(self) -> Anatomy:
        """The network as units; an AnatomyError where its structure is not known."""
        found = self._origin._anatomy
        if isinstance(found, AnatomyError):
            raise found
        return found

    @cached_property
    def _anatomy(self) -> Anatomy | AnatomyError:
        try:
            with preserve_state(self.network, self.seed):
                return Anatomy.of(self.network, self.example)
        except AnatomyError as error:
            return error

    @property
    def digest(self) -> str:
        """SHA-256 of what the network computes: its structure, settings, code, hooks and weights."""
        return self._origin._digest

    @cached_property
    def _digest(self) -> str:
        return network_digest(self.network)

    @cached_property
    def data_digest(self) -> str:
        """SHA-256 of what the images, their labels and their size are."""
        rows = hashlib.sha256(self.images.rows.tobytes() + self.images.labels.tobytes()).hexdigest()
        return fingerprint(self.dataset.digest, self.dataset.size, self.dataset.channels, self.split, rows)

    def seconds_per_image(self) -> float:
        """What one image of a forward pass costs, from one batch run twice."""
        images = next(self.batches()).images
        with preserve_state(self.network, self.seed), torch.no_grad():
            self.network(images)
            start = time.perf_counter()
            self.network(images)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return (time.perf_counter() - start) / len(images)


def as_logits(output: Any) -> Tensor:
    """A network's output as a tensor: Hugging Face's networks return an object that has `logits`."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise ModelError(f"The network returns {type(output).__name__}; expected a tensor of logits.")
    return logits


def _reason(error: Exception) -> str:
    """The error's first line, with its type where the line alone says little."""
    line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    if isinstance(error, RuntimeError | AssertionError | ValueError) and line:
        return line
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def check_ready(network: nn.Module, name: str) -> None:
    """Raise where nothing can be measured yet, or at all: there are no numbers, or no code to look into."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in network.modules()):
        raise ModelError(
            f"{name} is a TorchScript module, which cannot be looked into; give the network it is made of."
        )
    tensors = (*network.parameters(), *network.buffers())
    if any(is_lazy(tensor) for tensor in tensors):
        raise ModelError(f"{name} has lazy modules without weights; call it once on images before it is examined.")
    if any(tensor.is_meta for tensor in tensors):
        raise ModelError(f"{name} is on the meta device and has no weights; load them first.")


def _limit(dataset: Dataset, split: str, limit: int | None) -> Dataset:
    images = dataset.splits.get(split)
    if images is None or not len(images):
        filled = ", ".join(f"{name} ({len(part)})" for name, part in dataset.splits.items() if len(part))
        hint = next((f"; use one of those (--split {name})" for name, part in dataset.splits.items() if len(part)), "")
        raise EmptySplitError(f"'{dataset.name}' has no images in its {split} split; it has {filled}{hint}.", split)
    if limit is None or limit >= len(images):
        return dataset
    rows = subset(images.labels, limit, seed=0)
    part = Split(images.images, images.rows[rows], images.labels[rows])
    return replace(dataset, splits={**dataset.splits, split: part})
