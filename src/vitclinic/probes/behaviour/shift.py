"""Accuracy on data of another kind, whose classes are some of the network's, or several of them together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic.data import Batch
from vitclinic.data.source import fingerprint
from vitclinic.errors import DataError
from vitclinic.measurement import Scalar
from vitclinic.probes.behaviour.behaviour import finite, see_together
from vitclinic.probes.behaviour.class_map import Outputs, Valid, class_map, image_map, read_map, unrelated
from vitclinic.probes.estimates import share
from vitclinic.probes.probe import DoesNotApply, OwningProbe, Result
from vitclinic.probes.registry import register
from vitclinic.probes.subject import Subject

Entry = int | str | list[int | str] | None


@register
class Shift(OwningProbe):
    """Accuracy on another data set, by a map of its classes to the network's [chen2022 Table 2; Beyer et al. 2020].

    An image is recognised if the largest logit is one of those that are right for it; once with all the network's
    outputs in competition, and once with only those that are right for some class of the set.
    """

    name: ClassVar[str] = "shift"
    by_default: ClassVar[bool] = False

    data: str | None = Field(None, description="the other data, as in --data; by default the exam's own")
    classes: dict[str | int, Entry] | list[Entry] | str | None = Field(
        None, description="{class: output or outputs}, a list of these, or a JSON or YAML file; by default by name"
    )
    labels: str | None = Field(None, description="a JSON or YAML file: the right outputs of each image, as in ReaL")
    images: Annotated[int, Field(ge=1)] | None = Field(None, description="at most so many images, stratified")

    def view(self, subject: Subject) -> Subject:
        if self.data is not None:
            return subject.elsewhere(self.data, self.images)
        few = self.images is not None and self.images < len(subject)
        return subject.on(subject.split, self.images) if few else subject

    def conditions(self, subject: Subject) -> dict[str, Any]:
        """What the files say, and what the outputs are taken to mean."""
        files = {"classes": self.classes if isinstance(self.classes, str) else None, "labels": self.labels}
        read = {key: fingerprint(repr(read_map(path))) for key, path in files.items() if path is not None}
        return read if subject.output_names is None else {**read, "outputs": fingerprint(subject.output_names)}

    def forwards(self, subject: Subject) -> float:
        return float(len(subject))

    def measure(self, subject: Subject) -> Result:
        right_for, competing = self._right(subject)
        correct, among, counted = (np.zeros(len(subject), np.bool_) for _ in range(3))
        unmapped = torch.from_numpy(~competing).to(subject.device)

        def see(batch: Batch) -> int:
            places = batch.indices.numpy()
            with torch.no_grad():
                logits = finite(subject.logits(batch.images), subject.name)
            valid = right_for(places)
            counted[places] = valid.any(1)
            correct[places] = hits(logits, valid)
            among[places] = hits(logits.masked_fill(unmapped, -torch.inf), valid)
            return len(batch)

        see_together(subject, self.name, len(subject), subject.share(), see, (correct, among, counted))
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
        """What gives, for the images at some places, the outputs that are right; and those right for any image."""
        if self.labels is not None and self.classes is not None:
            raise DataError("shift.labels says what is right for each image, shift.classes for each class: give one.")
        outputs = Outputs(subject.outputs, self._names(subject))
        images = subject.images
        if self.labels is None:
            given = read_map(self.classes) if isinstance(self.classes, str) else self.classes
            if given is None and self.data is None and (reason := unrelated(subject.classes, outputs)):
                raise DoesNotApply(reason)  # nothing was asked for that could be wrong
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
        """What the outputs mean: of a network that does not say it, the exam's classes, if these are as many."""
        own = self.data is None and subject.outputs == len(subject.classes)
        return subject.output_names or (subject.classes if own else None)


def hits(logits: Tensor, valid: Valid) -> NDArray[np.bool_]:
    """Whether the largest logit is a right one."""
    found: NDArray[np.bool_] = valid[np.arange(len(valid)), logits.argmax(1).cpu().numpy()]
    return found
