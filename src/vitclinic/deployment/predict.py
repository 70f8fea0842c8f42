"""The verb `predict`: the classes of new images, by any network that can be examined.

Images are prepared exactly as the run's own test images were, by worker processes; probabilities are those of the
softmax at a temperature that was fitted on the run's val images, once for each checkpoint, and is stored with the run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset

from vitclinic._core.callback import Callback, CallbackList
from vitclinic._core.distributed import pick_device
from vitclinic._core.errors import DamagedFileError, DataError, ModelError, RecipeError, RunError, VitclinicError
from vitclinic._core.io import is_unchanged, read_record, sign, write_json
from vitclinic.data import evaluation_batches, open_data
from vitclinic.data.augment import to_unit_interval
from vitclinic.data.decoding import UNREADABLE, Preprocessing, storage_size
from vitclinic.data.stream import read_ahead, spare_workers
from vitclinic.deployment.images import check_output, find_images, make_rows, open_rows
from vitclinic.exam.targets import Network, Target, resolve
from vitclinic.functional import expected_calibration_error, fit_temperature
from vitclinic.probes.behaviour import check_logits
from vitclinic.probes.digest import network_digest
from vitclinic.probes.output import are_probabilities, are_sigmoids, observe_output
from vitclinic.training import Run

log = logging.getLogger(__name__)

CALIBRATION = "calibration.json"
TOP_K, BATCH_SIZE = 5, 64

Images = str | Path | Image.Image | Sequence[str | Path | Image.Image]


class Decoded(NamedTuple):
    """Some images, and why others could not be read, by name."""

    names: list[str]
    images: Tensor
    skipped: dict[str, str]


class ImageStream(TorchDataset[Decoded]):
    """Batches of images by their places, decoded and prepared for a network."""

    def __init__(self, images: Sequence[str | Image.Image], preprocessing: Preprocessing) -> None:
        self.images, self.preprocessing = images, preprocessing

    def __getitem__(self, places: range) -> Decoded:
        names, pixels, skipped = [], [], {}
        for place in places:
            image = self.images[place]
            name = image if isinstance(image, str) else f"image {place}"
            try:
                pixels.append(self._read(image))
                names.append(name)
            except (*UNREADABLE, DataError) as error:
                skipped[name] = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        empty = np.empty((0, *self.preprocessing.size, self.preprocessing.channels), np.uint8)
        return Decoded(names, to_unit_interval(np.stack(pixels) if pixels else empty), skipped)

    def _read(self, image: str | Image.Image) -> NDArray[np.uint8]:
        if not isinstance(image, str):
            return self.preprocessing(image)
        with Image.open(image) as opened:
            return self.preprocessing(opened)


@dataclass
class Predictions:
    """The probabilities of the classes of some images, most useful as `labels`, `rows()` or a file.

    Example:
        >>> found = Predictions(["a.png"], ("cat", "dog"), np.array([[0.2, 0.8]]))
        >>> found.labels, len(found)
        (['dog'], 1)
    """

    files: list[str]
    classes: tuple[str, ...]
    probabilities: NDArray[np.float64]
    """[images, classes]."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Why some images could not be read, by file."""
    temperature: float = 1.0

    def __len__(self) -> int:
        return len(self.files)

    @property
    def labels(self) -> list[str]:
        """The likeliest class of each image."""
        return [self.classes[k] for k in self.probabilities.argmax(1)] if len(self) else []

    def rows(self, top_k: int = TOP_K, probabilities: bool = False) -> list[dict[str, Any]]:
        """Return a row for each image, as they stand in a file.

        Args:
            top_k: How many of the likeliest classes are told.
            probabilities: Also tell the probability of each class.
        """
        return list(make_rows(self.files, self.probabilities, self.classes, top_k, probabilities))

    def write(self, path: str | Path, top_k: int = TOP_K, probabilities: bool = False) -> Path:
        """Write a file, .csv, .jsonl or .parquet, which appears whole; arguments are those of `rows`."""
        check_output(Path(path))
        with open_rows(Path(path)) as write:
            write(self.rows(top_k, probabilities))
        return Path(path)


def predict(
    target: Target,
    images: Images,
    *,
    temperature: float | None = None,
    size: int | None = None,
    batch_size: int = BATCH_SIZE,
    workers: int | None = None,
    device: str = "auto",
    callbacks: Iterable[Callback] = (),
) -> Predictions:
    """Predict the classes of images.

    Args:
        target: A run, one of its checkpoints, a network, or what `vitclinic examine` takes.
        images: A file, a folder, a pattern such as `photos/*.jpg`, an image of Pillow's, or a list of these.
        temperature: That of the softmax; by default the one that fits the run's val images, and 1 for other networks.
        size: Pixels a side, for networks that take any.
        batch_size: Images at a time.
        workers: Processes that decode images; by default as many as there are spare CPUs, none for a few images.
        device: `"auto"`, `"cpu"` or `"cuda"`.
        callbacks: Objects that follow the progress.

    Returns:
        The probabilities by image, and the images that could not be read.

    Raises:
        DataError: There is no such image, or none can be read.
        ModelError: The network does not classify images of this size.

    Example:
        >>> found = predict("runs/photos", "new/*.jpg")  # doctest: +SKIP
        >>> found.labels  # doctest: +SKIP
        ['cat', 'dog']
    """
    callback = CallbackList(callbacks)
    listed = [images] if isinstance(images, str | Path | Image.Image) else list(images)
    inputs = [one for word in listed for one in ([word] if isinstance(word, Image.Image) else find_images([word]))]
    predictor = Predictor(target, temperature=temperature, size=size, device=device, callback=callback)
    parts = list(predictor.stream(inputs, batch_size, workers))
    skipped = {name: why for part in parts for name, why in part.skipped.items()}
    if inputs and len(skipped) == len(inputs):
        name, why = next(iter(skipped.items()))
        raise DataError(f"None of the {len(inputs)} images can be read; '{name}': {why}.")
    rows = np.concatenate([np.empty((0, len(predictor.classes))), *(part.probabilities for part in parts)])
    files = [name for part in parts for name in part.names]
    return Predictions(files, predictor.classes, rows, skipped, predictor.temperature)


class Predicted(NamedTuple):
    """A batch of predictions."""

    names: list[str]
    probabilities: NDArray[np.float64]
    skipped: dict[str, str]


class Predictor:
    """A network that is ready to classify images; arguments are those of `predict`."""

    def __init__(
        self,
        target: Target,
        *,
        temperature: float | None = None,
        size: int | None = None,
        device: str = "auto",
        callback: Callback | None = None,
    ) -> None:
        if temperature is not None and not temperature > 0:
            raise RecipeError(f"'temperature' must be above 0 (got {temperature}).")
        self.callback = callback or Callback()
        self.device = pick_device(device)
        self.target = resolve(target, self.device)
        if self.target.run is not None and self.target.run.recipe.task.name != "classification":
            raise RecipeError(
                f"'{self.target.name}' was trained for {self.target.run.recipe.task.name}; predict classifies images."
            )
        self.preprocessing = _find_preprocessing(self.target, size)
        height, width = self.preprocessing.size
        example = torch.full((1, self.preprocessing.channels, height, width), 0.5, device=self.device)
        output = observe_output(self.target.network, example, name=f"'{self.target.name}'")
        if output.features is not None:
            raise ModelError(f"'{self.target.name}' returns {output.features}, not classes.")
        self.network = output.network.eval()
        self.classes = _name_classes(self.target, output.count)
        self._given = temperature

    @cached_property
    def temperature(self) -> float:
        """The divisor of the logits."""
        if self._given is not None or self.target.run is None:
            return 1.0 if self._given is None else self._given
        return float(calibrate(self.target, self.network, self.device, self.callback)["temperature"])

    def stream(
        self, images: Sequence[str | Image.Image], batch_size: int = BATCH_SIZE, workers: int | None = None
    ) -> Iterator[Predicted]:
        """Yield predictions of the images, in order, a batch at a time."""
        if batch_size < 1:
            raise RecipeError(f"'batch_size' must be at least 1 (got {batch_size}).")
        count, temperature, done = len(images), self.temperature, 0
        requests = [range(start, min(start + batch_size, count)) for start in range(0, count, batch_size)]
        if workers is None:
            workers = spare_workers() if len(requests) > 1 else 0
        for decoded in read_ahead(ImageStream(images, self.preprocessing), requests, workers):
            probabilities = np.empty((0, len(self.classes)))
            if decoded.names:
                probabilities = self._classify(decoded.images, temperature)
            done += len(decoded.names) + len(decoded.skipped)
            self.callback.on_progress("predicting", done, count)
            yield Predicted(decoded.names, probabilities, decoded.skipped)

    @torch.inference_mode()
    def _classify(self, images: Tensor, temperature: float) -> NDArray[np.float64]:
        scores = check_logits(self.network(images.to(self.device)), self.target.name).double().cpu()
        if len(scores) > 1 and are_probabilities(scores):
            raise ModelError(f"'{self.target.name}' returns probabilities; predict needs the logits before them.")
        if len(scores) > 1 and are_sigmoids(scores):
            raise ModelError(
                f"'{self.target.name}' returns a sigmoid of each class; predict needs logits of one class."
            )
        probabilities: NDArray[np.float64] = (scores / temperature).softmax(1).numpy()
        return probabilities


def calibrate(target: Network, network: nn.Module, device: torch.device, callback: Callback) -> dict[str, Any]:
    """Return the temperature that fits a run's val images, with what it does; it is fitted once, and stored.

    Without val images, or where the data is gone, the temperature is 1 and the record says why.
    """
    run = target.run
    assert run is not None
    file, key = run.path / CALIBRATION, network_digest(target.network)[:16]
    stored = read_calibration(file)
    if key not in stored:
        try:
            stored[key] = _fit(run, network, device, callback)
        except VitclinicError as error:
            log.warning("Probabilities are not calibrated: %s", error)
            return {"temperature": 1.0, "reason": str(error)}
        try:
            write_json(file, sign(stored))
        except RunError as error:  # another's run can be read, too
            log.warning("%s", error)
    return stored[key]


def read_calibration(file: Path) -> dict[str, dict[str, Any]]:
    """Return the stored temperatures by the digest of the weights; none if the file is not there or damaged."""
    if not file.is_file():  # none yet
        return {}
    try:
        stored = read_record(file, {}, "it is fitted again")
        if not is_unchanged(stored):
            raise DamagedFileError(f"'{file}' was changed since it was written; it is fitted again.")
    except DamagedFileError as error:
        log.warning("%s", error)
        return {}
    known = {key: record for key, record in stored.items() if isinstance(record, dict)}
    return {key: record for key, record in known.items() if isinstance(record.get("temperature"), int | float)}


@torch.inference_mode()
def _fit(run: Run, network: nn.Module, device: torch.device, callback: Callback) -> dict[str, Any]:
    spec = run.spec
    dataset = open_data(run.recipe.data, size=spec.img_size, channels=spec.in_chans, progress=callback.on_progress)
    if dataset.digest != run.data_facts["digest"]:
        raise DataError(f"The data of '{run.path}' has changed since it was trained.")
    if not len(dataset.val):
        raise DataError(f"'{dataset.name}' has no val images.")
    logits = []
    for batch in evaluation_batches(dataset, "val", BATCH_SIZE):
        logits.append(check_logits(network(batch.images.to(device)), str(run.path)).cpu())
        callback.on_progress("calibrating", sum(map(len, logits)), len(dataset.val))
    z, y = torch.cat(logits), torch.from_numpy(dataset.val.labels)
    temperature = fit_temperature(z, y)
    errors = {name: expected_calibration_error(z / t, y) for name, t in (("ece", temperature), ("ece_before", 1.0))}
    return {"temperature": temperature, "images": len(y), **errors}


def _find_preprocessing(target: Network, size: int | None) -> Preprocessing:
    known = getattr(target.network, "preprocessing", None)
    if isinstance(known, Preprocessing):
        return known
    backbone: Any = getattr(target.network, "backbone", target.network)
    published = getattr(backbone, "pretrained_cfg", None) or {}
    wanted = target.size or (size and (size, size)) or published.get("input_size", (0, 0, 0))[1:]
    if not all(wanted):
        raise RecipeError(f"'{target.name}' does not say which images it takes; give `size`, their pixels a side.")
    height, width = wanted
    return Preprocessing((height, width), storage_size((height, width), float("inf")), target.channels or 3)


def _name_classes(target: Network, count: int) -> tuple[str, ...]:
    named = target.output_names or getattr(target.network, "classes", None)
    config = getattr(getattr(target.network, "backbone", target.network), "config", None)
    labels = getattr(config, "id2label", None) or {}
    if named is None and len(labels) == count:  # Hugging Face's networks know their classes
        named = tuple(str(labels[k]) for k in sorted(labels))
    return named if named is not None and len(named) == count else tuple(str(k) for k in range(count))
