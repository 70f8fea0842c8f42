"""Probes in your own evaluation loop: they read the forward passes that the loop makes anyway."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from vitclinic._core.errors import ModelError, RecipeError, shorten
from vitclinic._core.records import Measurement
from vitclinic.anatomy import AttentionMap, Site, record_attention, stream
from vitclinic.anatomy.forward import eager
from vitclinic.data import Batch, Dataset, Split
from vitclinic.data.loader import LoadedImages
from vitclinic.probes.output import OutputFunction, observe_output, read_output
from vitclinic.probes.probe import Probe, Result, StreamingProbe
from vitclinic.probes.running import find_obstacle, record
from vitclinic.probes.selection import parse_probes
from vitclinic.probes.shared_pass import Desk
from vitclinic.probes.subject import Subject

log = logging.getLogger(__name__)


class ProbeCollection:
    """Streaming probes that read a network while your own loop calls it.

    Only streaming probes work here: those that read activations, attention maps and logits. The others (`sharpness`,
    `lesion`, ...) make their own passes; call them directly, as in `Sharpness()(model, loader)`. The network is
    measured in the mode in which the loop calls it: call `model.eval()` first to get the numbers of `examine`.

    Args:
        model: The network that the loop calls. Its input, pixels or normalized images, is passed through unchanged.
        probes: Names, `{name: {option: value}}`, or probes.
        seed: Seed of everything random in the measurements.
        output: Function from what the network returns to its class scores [B, K], if `load_subject` needs one.

    Raises:
        RecipeError: If a probe is not known, or makes its own passes; if `model` is not a torch module.

    Example:
        >>> import timm
        >>> from vitclinic.probes import ProbeCollection
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10).eval()
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8)) for _ in range(2)]
        >>> with ProbeCollection(model, ["fourier", "accuracy"]) as probes:
        ...     for images, labels in loader:
        ...         _ = model(images)
        ...         probes.update(labels)
        >>> results = probes.compute()
        >>> results["accuracy"].scalars["accuracy"].n
        16
    """

    def __init__(
        self,
        model: nn.Module,
        probes: str | Sequence[str | Mapping[str, Any] | Probe],
        *,
        seed: int = 0,
        output: OutputFunction | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise RecipeError(f"ProbeCollection takes a torch.nn.Module (got {type(model).__name__}).")
        self.model, self.seed, self.output = model, seed, output
        parsed = parse_probes([probes] if isinstance(probes, str) else probes)
        if owning := [probe.name for probe in parsed if not isinstance(probe, StreamingProbe)]:
            raise RecipeError(
                f"{', '.join(owning)} makes its own passes and cannot read your loop. Call it on (model, loader)."
            )
        self.probes = {probe.name: probe for probe in parsed if isinstance(probe, StreamingProbe)}
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._desk: Desk | None = None
        self._subject: Subject | None = None
        self._obstacles: dict[str, Exception] = {}
        self._pass: ExitStack | None = None
        self._seen: tuple[Batch, Tensor] | None = None
        self._labels: list[Tensor] = []
        self._digest = hashlib.sha256()
        self._started = self._seconds = 0.0
        self._training = self._busy = False
        self._autocast: str | None = None

    def __enter__(self) -> Self:
        self._context = ExitStack()
        self._context.enter_context(eager())  # a network compiled in place would compile our hooks, or not see them
        self._handle = self.model.register_forward_pre_hook(self._before, with_kwargs=True)
        self._context.callback(lambda: self._handle.remove())
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.close()

    def update(self, labels: Tensor | None = None) -> None:
        """Add the batch that the network was just called with.

        Args:
            labels: Class indices [B]; optional unless a probe needs them.

        Raises:
            RecipeError: If there was no forward pass since the last update, or the labels are missing or do not fit.
        """
        if self._seen is None or self._desk is None:
            raise RecipeError(
                "Call the network before each update(), as in model(images), inside `with ProbeCollection(...)`;"
                " model.forward and parts of the network are not seen."
            )
        batch, logits = self._seen
        wanting = [name for name, probe in self.probes.items() if "labels" in probe.needs]
        if labels is None and wanting:
            raise RecipeError(f"{', '.join(wanting)} needs labels: call update(labels).")
        targets = _class_indices(labels, len(batch))
        if wanting and not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[-1]:
            span = f"{int(targets.min())} to {int(targets.max())}"
            raise RecipeError(f"The labels range from {span}, and the network has {logits.shape[-1]} outputs.")
        self._labels.append(targets.cpu().long())
        with torch.no_grad():
            self._desk.end_batch(replace(batch, targets=targets.long()), logits)
        self._seen = None

    def compute(self) -> dict[str, Measurement]:
        """Return the measurement of each probe over all batches so far; check its `status` for failures."""
        if self._subject is None or self._desk is None or not self._labels:
            raise RecipeError("There is nothing to compute yet: call the network, then update().")
        self._subject.dataset = self._all_images(self._subject.dataset)
        vars(self._subject).pop("data_digest", None)
        outcomes = {name: self._obstacles.get(name) or self._desk.outcome(name) for name in self.probes}
        mode: Literal["eval", "train"] = "train" if self._training else "eval"
        found = {
            name: record(
                self.probes[name],
                self._subject,
                replace(outcome, mode=mode) if isinstance(outcome, Result) else outcome,
                self._seconds,
            )
            for name, outcome in outcomes.items()
        }
        if self._autocast is None:
            return found
        precision = {"autocast": self._autocast}
        return {name: one.model_copy(update={"conditions": one.conditions | precision}) for name, one in found.items()}

    def _before(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Hook the network before a forward pass."""
        if self._busy:
            return
        if self._seen is not None:
            raise RecipeError("Call update() after each forward pass: there was none since the last one.")
        images = next((value for value in (*arguments, *keywords.values()) if isinstance(value, Tensor)), None)
        if images is None or images.ndim != 4:
            raise ModelError("Call the network with a batch of images [B, C, H, W].")
        images = images.detach()
        self._note_autocast(images.device)
        if self._desk is None:
            self._begin(images)
        assert self._desk is not None
        count = sum(map(len, self._labels))
        indices = torch.arange(count, count + len(images))
        batch = Batch(images, torch.full((len(images),), -1), indices, indices)
        self._digest.update(images.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        if module.training and not self._training:
            log.warning("The network is in training mode: call model.eval() for the numbers that `examine` gives.")
        self._training |= module.training
        self._desk.begin_batch(batch)
        self._watch(self._desk)
        self._seen = batch, torch.empty(0)
        self._started = time.perf_counter()

    def _note_autocast(self, device: torch.device) -> None:
        """Remember the precision of an autocast around the loop, which must be the same for all batches."""
        enabled = torch.is_autocast_enabled(device.type)
        precision = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.") if enabled else None
        if self._labels and precision != self._autocast:
            raise RecipeError(
                f"Autocast was {self._autocast or 'off'} for earlier batches and is {precision or 'off'} now: use one"
                " precision for all batches."
            )
        self._autocast = precision

    def _watch(self, desk: Desk) -> None:
        """Read activations and attention until `_after`."""

        def read(site: Site, activation: Tensor) -> None:
            with torch.no_grad():
                desk.read(site, activation)

        def view(seen: AttentionMap) -> None:
            with torch.no_grad():
                desk.view(replace(seen, weights=seen.weights.detach()))

        self._pass = ExitStack()
        self._pass.callback(lambda: last.remove())
        if desk.readers:
            self._pass.enter_context(stream({site: site for site in desk.readers}, read))
        if desk.viewers:
            self._pass.enter_context(record_attention(desk.viewers, view))
        last = self.model.register_forward_hook(self._after, always_call=True)  # after all that read the output

    def _after(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        assert self._pass is not None
        assert self._seen is not None
        self._seconds += time.perf_counter() - self._started
        watching, self._pass = self._pass, None
        if output is None:  # the forward pass failed, and its error is being raised
            self._seen = None
            failure = ModelError("the forward pass failed")
            watching.__exit__(ModelError, failure, None)
            return
        watching.close()
        self._seen = self._seen[0], read_output(output, self.output).detach()

    def _begin(self, images: Tensor) -> None:
        """Make a subject from the network and the first batch, and begin every probe."""
        self._busy = True
        try:
            outputs = observe_output(self.model, images[:1], self.output, name=type(self.model).__name__).count
            self._handle.remove()  # the digest of the network covers its hooks, and ours is no part of it
            self._subject = Subject(
                self.model,
                _first_images(images, outputs),
                name=type(self.model).__name__,
                batch_size=len(images),
                seed=self.seed,
                output=self.output,
            )
            self._subject.digest  # noqa: B018 (computed now)
            self._handle = self.model.register_forward_pre_hook(self._before, with_kwargs=True)
            self._desk = Desk()
            for name, probe in self.probes.items():
                obstacle = find_obstacle(probe, self._subject)
                if obstacle is None:
                    self._desk.attempt(name, self._desk.admit, name, probe, self._subject)
                else:
                    self._obstacles[name] = obstacle
        finally:
            self._busy = False

    def _all_images(self, first: Dataset) -> Dataset:
        """Return a data set that stands for all batches: their labels and digest; the pixels are not kept."""
        labels = torch.cat(self._labels).numpy()
        digest = hashlib.sha256(self._digest.digest() + labels.tobytes()).hexdigest()
        split = Split(first.test.images, np.arange(len(labels)), labels)
        return replace(first, splits=dict.fromkeys(first.splits, split), digest=digest)


def _class_indices(labels: Any, count: int) -> Tensor:
    """Return the labels of a batch as a tensor, zeros if there are none; raise a RecipeError if they do not fit."""
    if labels is None:
        return torch.zeros(count, dtype=torch.long)
    try:
        targets = torch.as_tensor(labels).detach()
    except (TypeError, ValueError, RuntimeError):
        raise RecipeError(f"update() expects class indices, [{count}], as numbers (got {shorten(labels)}).") from None
    if targets.ndim == 2:
        raise RecipeError(
            f"update() expects one label per image, [{count}] (got {list(targets.shape)}); of one-hot or soft labels,"
            " pass labels.argmax(1)."
        )
    if targets.is_floating_point():
        raise RecipeError(f"update() expects class indices, [{count}] (got {targets.dtype}).")
    if targets.shape != (count,):
        raise RecipeError(f"update() expects one label per image, [{count}] (got {list(targets.shape)}).")
    return targets


def _first_images(images: Tensor, outputs: int) -> Dataset:
    stored = LoadedImages(images.float().cpu(), "")
    split = Split(stored, np.arange(len(images)), np.zeros(len(images), np.int64))
    size = (images.shape[2], images.shape[3])
    splits = dict.fromkeys(("train", "val", "test"), split)
    return Dataset("loop", tuple(map(str, range(outputs))), size, images.shape[1], splits, "", undivided=True)
