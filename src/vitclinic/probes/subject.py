"""The subject of a measurement: a network, and the images to measure it on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitclinic._core.distributed import ALONE, Distributed
from vitclinic._core.errors import AnatomyError, EmptySplitError
from vitclinic._core.io import fingerprint
from vitclinic.anatomy import Anatomy
from vitclinic.data import Augment, Batch, Dataset, Split, TrainingStream, evaluation_batches, open_data
from vitclinic.data.source import subset
from vitclinic.models import Headed, Normalized
from vitclinic.models.input_sizes import check_ready
from vitclinic.probes.digest import network_digest
from vitclinic.probes.footprint import Footprint
from vitclinic.probes.guards import preserve_state
from vitclinic.probes.output import Adapted, Output, OutputFunction, are_probabilities, are_sigmoids, observe_output
from vitclinic.probes.past_training import Training
from vitclinic.probes.probe import DoesNotApply

Progress = Callable[[str, int, int], None]
"""Called with (task, images done, images in total)."""
_JUDGED = 16
"""Images by which probabilities are told from logits."""


class Subject:
    """A network under examination, with the images to measure it on.

    Args:
        network: A network that takes pixels in [0, 1].
        dataset: The data set.
        name: Name of the network in messages and reports.
        split: Split to measure on.
        limit: Maximum number of images: the first of the split's stratified order, so that a smaller limit is part of a
            larger one.
        batch_size: Images per forward pass; halved when memory runs out.
        seed: Seed of everything random in a measurement.
        output_names: Class names of the network's outputs, if known.
        training: How the network was trained, if known.
        scratch: Files in which probes may keep unfinished work, by the name of the probe (see `Partial`).
        progress: Called with (task, images done, images in total).
        distributed: Processes that measure this subject together and divide the work among them.
        run: The training run that the network comes from, if any.
        output: Function from what the network returns to its class scores [B, K]; see `load_subject`.
        drawn: Names of the classifier's parameters if these are not trained but freshly drawn.

    Example:
        >>> from vitclinic.data import load_batches
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        >>> subject = Subject(network, load_batches([(torch.rand(20, 1, 8, 8), torch.arange(20) % 10)]), limit=10)
        >>> len(subject), subject.outputs
        (10, 10)
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
        output: OutputFunction | None = None,
        drawn: tuple[str, ...] = (),
    ) -> None:
        check_ready(network, name)
        # On several devices these would call copies of the network, in threads or together with other processes.
        if isinstance(network, nn.DataParallel | DistributedDataParallel):
            network = cast(nn.Module, network.module)
        self._given = network
        self._function = output
        self.drawn = drawn
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
        """Return the same network with at most `limit` images of another split.

        The same arguments return the same object. Data without splits, such as a single loader, stands in for any split
        unless `strict` is set.

        Raises:
            EmptySplitError: If the split has no images, or (`strict`) the data has no splits.
        """
        if strict and self._whole.undivided and split != self.split:
            raise EmptySplitError(f"'{self._whole.name}' has no splits, so its {split} images are unknown.", split)
        if (split, limit) not in self._views:
            self._views[split, limit] = self._with(self._whole, split, limit, self.output_names)
        return self._views[split, limit]

    def on_source(self, source: str, limit: int | None = None) -> Subject:
        """Return the same network with at most `limit` images of another data source, which may have other classes.

        Images are resized to the size used here. If the class names of the network's outputs are not known, they are
        assumed to be the classes of the data examined here, provided that there are as many.
        """
        if (source, limit) not in self._elsewhere:
            size, channels = self.dataset.size, self.dataset.channels
            opened = open_data(source, size=size, channels=channels, progress=self.progress)
            dataset = replace(opened, splits={"test": opened.unseen})
            names = self.classes if self.outputs == len(self.classes) else None
            self._elsewhere[source, limit] = self._with(dataset, "test", limit, self.output_names or names)
        return self._elsewhere[source, limit]

    def on_dataset(self, dataset: Dataset) -> Subject:
        """Return the same network on the same split of another data set."""
        return self._with(dataset, self.split, None, self.output_names)

    def select(self, numbers: Sequence[int]) -> Subject:
        """Return the same network with the images of these numbers, in this order."""
        rows, images = np.array(numbers), self.images
        chosen = images.take(rows)
        dataset = replace(self.dataset, splits={**self.dataset.splits, self.split: chosen})
        return self._with(dataset, self.split, None, self.output_names)

    def _with(self, dataset: Dataset, split: str, limit: int | None, output_names: tuple[str, ...] | None) -> Subject:
        view = Subject(
            self._given,
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
            output=self._function,
            drawn=self.drawn,
        )
        view._origin = self._origin  # facts about the network are computed once and shared
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
        """Device of the network."""
        return self._like.device

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the network's weights."""
        return self._like.dtype

    @property
    def _like(self) -> Tensor:
        tensors = (*self._given.parameters(), *self._given.buffers())
        return next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))

    def batches(self) -> Iterator[Batch]:
        """Yield all images in order, unaugmented, on the network's device; the last batch may be smaller."""
        for batch in evaluation_batches(self.dataset, self.split, self.batch_size):
            yield batch.to(self.device, self.dtype)

    def own_batches(self) -> Iterator[Batch]:
        """Yield this process's share of `batches`: all of them if there is only one process."""
        part, parts = self.distributed.rank, self.distributed.size
        for batch in evaluation_batches(self.dataset, self.split, self.batch_size, part, parts):
            yield batch.to(self.device, self.dtype)

    def augmented_batches(
        self, size: int, count: int, augment: bool = True, *, which: Iterable[int] | None = None
    ) -> Iterator[Batch]:
        """Yield the first `count` batches of `size` training images, augmented as in the network's training.

        Args:
            size: Images per batch.
            count: Number of batches.
            augment: Set to False for plain images; they are also plain if the training is not known.
            which: Numbers of the batches to yield, if not all of them.
        """
        seen = self.training.augment if augment and self.training is not None else Augment(level="none")
        stream = TrainingStream(self.dataset, seen, self.seed)
        places = (range(number * size, (number + 1) * size) for number in (range(count) if which is None else which))
        for batch in stream.batches(places, workers=0):
            yield batch.to(self.device, self.dtype)

    @property
    def given(self) -> nn.Module:
        """The network as it was handed in: one with a task's head returns what the task is about."""
        return self._given

    @property
    def network(self) -> nn.Module:
        """The network as one that returns a tensor [B, K]; when first used, one image is passed to see what that is."""
        return self._origin._output.network

    def logits(self, images: Tensor) -> Tensor:
        """Return the class scores [B, K] for pixels in [0, 1], or the features of an encoder without a head."""
        return cast(Tensor, self.network(images))

    @cached_property
    def example(self) -> Tensor:
        """First image, [1, C, H, W]."""
        return next(evaluation_batches(self.dataset, self.split, 1)).to(self.device, self.dtype).images

    @property
    def outputs(self) -> int:
        """Number of outputs K. Raises a ModelError if the network cannot take the images."""
        return self._origin._output.count

    @property
    def features(self) -> str | None:
        """The name of what an encoder without a head returns; None if the network returns class scores."""
        return self._origin._output.features

    @cached_property
    def _output(self) -> Output:
        return observe_output(self._given, self.example, self._function, name=self.name)

    @property
    def returns_probabilities(self) -> bool:
        """True if the network returns probabilities, the softmax of its logits, judged by several images."""
        return self._origin._judged[0]

    @property
    def returns_sigmoids(self) -> bool:
        """True if the network returns the probability of each class by itself, judged by several images."""
        return self._origin._judged[1]

    @cached_property
    def _judged(self) -> tuple[bool, bool]:
        """Return whether the scores of several images are probabilities, and whether they are sigmoids.

        The images pass one by one, and a graph is kept of the first alone, so that memory is never short here.
        """
        if not self._output.may_be_probabilities:
            return False, False
        images = next(evaluation_batches(self.dataset, self.split, _JUDGED)).to(self.device, self.dtype).images
        first, *others = torch.split(images, 1)
        with preserve_state(self.network, self.seed):
            with torch.enable_grad():
                traced = self.logits(first.requires_grad_())
            with torch.no_grad():
                scores = torch.cat([traced, *map(self.logits, others)])
        return are_probabilities(scores, traced), are_sigmoids(scores, traced)

    @property
    def anatomy(self) -> Anatomy:
        """The network as a sequence of units; raises an AnatomyError if its structure is not known."""
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
    def footprint(self) -> Footprint:
        """The memory that passes of the network take."""
        return self._origin._footprint

    @cached_property
    def _footprint(self) -> Footprint:
        return Footprint(self)

    @property
    def digest(self) -> str:
        """SHA-256 of the network: its structure, settings, code, hooks and weights."""
        return self._origin._digest

    @cached_property
    def _digest(self) -> str:
        return network_digest(self._given if self._function is None else Adapted(self._given, self._function))

    @cached_property
    def data_digest(self) -> str:
        """SHA-256 of the images, their labels and their size."""
        rows = hashlib.sha256(self.images.rows.tobytes() + self.images.labels.tobytes()).hexdigest()
        return fingerprint(self.dataset.digest, self.dataset.size, self.dataset.channels, self.split, rows)


def find_headed(subject: Subject, head: type[Headed], target: str, refusal: str) -> Normalized:
    """Return the network of a run of a task, if it has that task's head and the data is annotated for it.

    Args:
        subject: The network and its images.
        head: The class of the head.
        target: What the images of the task come with, as `Task.target` has it.
        refusal: What to say of a network without that head.

    Raises:
        DoesNotApply: The network has no such head, or the data has nothing of the kind.
    """
    network = subject.given
    if not isinstance(network, Normalized) or not isinstance(network.backbone, head):
        raise DoesNotApply(refusal)
    if subject.images.annotations is None or subject.dataset.target != target:
        raise DoesNotApply(f"the data has no {'masks' if target == 'mask' else target}.")
    return network


def _limit(dataset: Dataset, split: str, limit: int | None) -> Dataset:
    images = dataset.splits.get(split)
    if images is None or not len(images):
        filled = ", ".join(f"{name} ({len(part)})" for name, part in dataset.splits.items() if len(part))
        hint = next((f"; choose the split {name}" for name, part in dataset.splits.items() if len(part)), "")
        raise EmptySplitError(f"'{dataset.name}' has no images in its {split} split; it has {filled}{hint}.", split)
    if limit is None or limit >= len(images):
        return dataset
    rows = subset(images.labels, limit, seed=0)
    part = images.take(rows)
    return replace(dataset, splits={**dataset.splits, split: part})
