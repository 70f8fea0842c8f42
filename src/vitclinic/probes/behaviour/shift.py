"""Accuracy on another data set, with a map from its classes to the network's outputs.

A map has an entry for each class of the data set: one or several outputs, by name or by number, any of which is right;
or null, which leaves out the images of that class. It is written as {class: entry}, with classes by name or by number,
or as a list in the order of the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic._core.errors import DataError, did_you_mean
from vitclinic._core.io import expand_path, fingerprint, read_json, read_text, read_yaml
from vitclinic._core.records import Scalar
from vitclinic._core.registry import FigureSpec, KeyScalars
from vitclinic.data import Batch
from vitclinic.probes.behaviour.behaviour_probe import divide_images
from vitclinic.probes.behaviour.intervals import share
from vitclinic.probes.behaviour.predictions import check_logits
from vitclinic.probes.probe import DoesNotApply, Need, OwningProbe, Result, register
from vitclinic.probes.subject import Subject

Valid = NDArray[np.bool_]
"""[classes, outputs]: True if an output is right for a class."""

_SHOWN = 3
"""Maximum number of names in an error message."""


@dataclass(frozen=True)
class Outputs:
    """Outputs of a network: their number and, if known, their class names."""

    count: int
    names: tuple[str, ...] | None

    def resolve(self, entry: Any, where: str) -> list[int]:
        """Return the outputs that an entry of a map stands for; `where` is the entry's place, for error messages."""
        if entry is None:
            return []
        entries = entry if isinstance(entry, list | tuple) else [entry]
        return [self._number(item, where) for item in entries]

    def _number(self, item: Any, where: str) -> int:
        if isinstance(item, str):
            return self._find(item, where)
        if isinstance(item, bool) or not isinstance(item, int):
            raise DataError(f"{where}: expected the name or number of an output, or a list of these (got {item!r}).")
        if not 0 <= item < self.count:
            raise DataError(f"{where}: there is no output {item}; the network has {self.count} outputs, from 0.")
        return item

    def _find(self, name: str, where: str) -> int:
        if self.names is None:
            raise DataError(f"{where}: the class names of the network are not known. Write a number for '{name}'.")
        return _place(name, self.names, f"{where}: the network")


def class_map(given: Mapping[Any, Any] | Sequence[Any] | None, classes: tuple[str, ...], outputs: Outputs) -> Valid:
    """Return the outputs that are right for each class, [classes, outputs].

    Without a map, outputs are matched by name or, if the names are not known, by number.

    Raises:
        DoesNotApply: If there is no map, and outputs cannot be matched.
    """
    if given is None:
        entries = _by_name(classes, outputs)
    elif isinstance(given, Mapping):
        entries = _by_class(given, classes)
    elif isinstance(given, str) or not isinstance(given, Sequence):
        kind = type(given).__name__
        raise DataError(f"The class map must be a list, or a mapping of classes to outputs (got {kind}).")
    else:
        entries = list(given)
        if len(entries) != len(classes):
            raise DataError(f"The class map has {len(entries)} entries, but the data has {len(classes)} classes.")
    valid = np.zeros((len(classes), outputs.count), np.bool_)
    for label, (name, entry) in enumerate(zip(classes, entries, strict=True)):
        valid[label, outputs.resolve(entry, f"The class map, '{name}'")] = True
    return valid


def image_map(given: Any, records: int, outputs: Outputs) -> list[list[int]]:
    """Return the outputs that are right for each image of the data set [Beyer et al. 2020]; an empty list for none."""
    if not isinstance(given, list) or len(given) != records:
        found = f"{len(given)} entries" if isinstance(given, list) else f"a {type(given).__name__}"
        raise DataError(f"The labels must be a list with one entry for each of the {records} images (got {found}).")
    return [outputs.resolve(entry, f"The labels, image {number}") for number, entry in enumerate(given)]


def find_mismatch(classes: tuple[str, ...], outputs: Outputs) -> str | None:
    """Return the reason why classes and outputs cannot be matched without a map; None if they can."""
    if outputs.names is None:
        if outputs.count == len(classes):
            return None
        return (
            f"the network has {outputs.count} outputs without names, and the data {len(classes)} "
            f"class{'' if len(classes) == 1 else 'es'}; map classes to outputs with shift.classes."
        )
    known = set(outputs.names)
    missing = [name for name in classes if name not in known]
    return f"the network has no {_list(missing)}; map them to outputs with shift.classes." if missing else None


def read_map(path: str) -> Any:
    """Return the content of a JSON or YAML file."""
    file = expand_path(path, DataError)
    text = read_text(file, DataError)
    try:
        found = read_json(text) if file.suffix == ".json" else read_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        raise DataError(f"Cannot read '{path}': {' '.join(str(error).split())}.") from error
    if found is None:
        raise DataError(f"'{path}' is empty.")
    return found


def _by_name(classes: tuple[str, ...], outputs: Outputs) -> list[Any]:
    if reason := find_mismatch(classes, outputs):
        if outputs.names is None:
            raise DoesNotApply(reason)
        raise DataError(reason[0].upper() + reason[1:])
    return list(range(outputs.count)) if outputs.names in (None, classes) else list(classes)


def _by_class(given: Mapping[Any, Any], classes: tuple[str, ...]) -> list[Any]:
    entries: dict[int, Any] = {}
    for key, entry in given.items():
        label = _label(key, classes)
        if not 0 <= label < len(classes):
            raise DataError(f"The class map: the data has no class {label}; it has {len(classes)} classes, from 0.")
        if label in entries:
            raise DataError(f"The class map has '{classes[label]}' twice.")
        entries[label] = entry
    if missing := [name for label, name in enumerate(classes) if label not in entries]:
        raise DataError(f"The class map lacks {_list(missing)}. Map a class to null to leave it out.")
    return [entries[label] for label in range(len(classes))]


def _label(key: Any, classes: tuple[str, ...]) -> int:
    """Return the class that a key of a map names or numbers; JSON keys are always strings."""
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise DataError(f"The class map: expected the name or number of a class (got {key!r}). Put names in quotes.")
    if isinstance(key, int):
        return key
    if key not in classes and key.isdecimal() and key.isascii():
        return int(key)
    return _place(key, classes, "The class map: the data")


def _place(name: str, names: tuple[str, ...], owner: str) -> int:
    if name not in names:
        raise DataError(f"{owner} has no class '{name}'.{did_you_mean(name, names)}")
    if names.count(name) > 1:
        raise DataError(f"{owner} has several classes '{name}'. Write the number of the one you mean.")
    return names.index(name)


def _list(names: Sequence[str]) -> str:
    """Return names as text: class 'a', or classes 'a', 'b', 'c' and 5 more."""
    shown = ", ".join(f"'{name}'" for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{'class' if len(names) == 1 else 'classes'} {shown}{more}"


Entry = int | str | list[int | str] | None


@register
class Shift(OwningProbe):
    """Accuracy on another data set, by a map of its classes to the network's [chen2022 Table 2; Beyer et al. 2020].

    An image is classified correctly if the largest logit is one of its right outputs: once among all outputs of the
    network, and once among only those that are right for some class of the data set.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> Shift()(model, loader).scalars["accuracy"].n
        8
    """

    name = "shift"
    group = "Behaviour"
    rank = 280
    title = "Other data"
    question = "How well does it do on data of another kind?"
    paper = "Chen et al. 2022, Table 2 (C2)"
    key_scalars: ClassVar[KeyScalars] = {"accuracy": "higher", "accuracy_among_mapped": "higher"}
    figures = (
        FigureSpec(
            name="shift",
            kind="scalars",
            values={"accuracy": "among all outputs", "accuracy_among_mapped": "among the set's"},
            table=["images_left_out"],
            axis="accuracy",
            share=True,
            title="Accuracy on another set of images",
            reading="Bars are the share of the other set's images that are recognised, the best of all outputs"
            " deciding, or the best of those that stand for some class of the set, with 95% intervals. The first is the"
            " custom for ReaL, the second for ImageNet-R and -A; where the set has all classes they are the same.",
        ),
    )
    asked_for = True  # without another data set, it repeats the accuracy
    by_default: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need]] = frozenset({"scores"})

    data: str | None = Field(None, description="the other data set, a folder or a name; by default the exam's own")
    classes: dict[str | int, Entry] | list[Entry] | str | None = Field(
        None, description="{class: output or outputs}, a list of these, or a JSON or YAML file; by default, by name"
    )
    labels: str | None = Field(None, description="JSON or YAML file with the right outputs of each image, as in ReaL")
    images: Annotated[int, Field(ge=1)] | None = Field(None, description="maximum number of images (stratified sample)")

    def view(self, subject: Subject) -> Subject:
        if self.data is not None:
            return subject.on_source(self.data, self.images)
        few = self.images is not None and self.images < len(subject)
        return subject.on(subject.split, self.images) if few else subject

    def conditions(self, subject: Subject) -> dict[str, Any]:
        """Return digests of the files, and of the class names of the outputs."""
        files = {"classes": self.classes if isinstance(self.classes, str) else None, "labels": self.labels}
        read = {key: fingerprint(repr(read_map(path))) for key, path in files.items() if path is not None}
        return read if subject.output_names is None else {**read, "outputs": fingerprint(subject.output_names)}

    def forwards(self, subject: Subject) -> float:
        return float(len(subject))

    def measure(self, subject: Subject) -> Result:
        right_for, competing = self._right(subject)
        correct, among, counted = (np.zeros(len(subject), np.bool_) for _ in range(3))
        unmapped = torch.from_numpy(~competing).to(subject.device)

        def measure_batch(batch: Batch) -> int:
            places = batch.indices.numpy()
            with torch.no_grad():
                logits = check_logits(subject.logits(batch.images), subject.name)
            valid = right_for(places)
            counted[places] = valid.any(1)
            correct[places] = hits(logits, valid)
            among[places] = hits(logits.masked_fill(unmapped, -torch.inf), valid)
            return len(batch)

        divide_images(subject, self.name, len(subject), subject.own_batches(), measure_batch, (correct, among, counted))
        n = int(counted.sum())
        if not n:
            raise DataError(f"The {'labels leave' if self.labels else 'class map leaves'} out all images.")
        scalars = {
            "accuracy": share(int(correct.sum()), n),
            "accuracy_among_mapped": share(int(among.sum()), n),
            "images_left_out": Scalar(value=len(subject) - n),
        }
        return Result(scalars, arrays={"correct": correct, "among_mapped": among, "counted": counted})

    def _right(self, subject: Subject) -> tuple[Callable[[NDArray[np.int64]], Valid], NDArray[np.bool_]]:
        """Return a function from indices of images to their right outputs, and the outputs right for any image."""
        if self.labels is not None and self.classes is not None:
            raise DataError("Give either shift.labels (per image) or shift.classes (per class), not both.")
        outputs = Outputs(subject.outputs, self._names(subject))
        images = subject.images
        if self.labels is None:
            given = read_map(self.classes) if isinstance(self.classes, str) else self.classes
            if given is None and self.data is None and (reason := find_mismatch(subject.classes, outputs)):
                raise DoesNotApply(reason)  # the user asked for nothing that could be wrong
            valid = class_map(given, subject.classes, outputs)
            return lambda places: valid[images.labels[places]], np.logical_or.reduce(valid)
        store = images.images
        each = image_map(read_map(self.labels), len(store.kept) + len(store.skipped), outputs)
        records = store.kept[images.rows]
        competing = np.zeros(outputs.count, np.bool_)
        competing[sorted({output for right in each for output in right})] = True

        def right_for(places: NDArray[np.int64]) -> Valid:
            found = np.zeros((len(places), outputs.count), np.bool_)
            for row, record in enumerate(records[places]):
                found[row, each[record]] = True
            return found

        return right_for, competing

    def _names(self, subject: Subject) -> tuple[str, ...] | None:
        """Return the class names of the outputs; if not known, the exam's classes, provided that there are as many."""
        own = self.data is None and subject.outputs == len(subject.classes)
        return subject.output_names or (subject.classes if own else None)


def hits(logits: Tensor, valid: Valid) -> NDArray[np.bool_]:
    """Return which images have a right output as their largest logit."""
    found: NDArray[np.bool_] = valid[np.arange(len(valid)), logits.argmax(1).cpu().numpy()]
    return found
