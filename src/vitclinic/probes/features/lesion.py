"""Lesion study: the accuracy lost when each unit is removed [park2022 Fig. 10b, D.4].

The part of the network before the removed unit is replayed (`anatomy.removal`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vitclinic._core.errors import ModelError
from vitclinic._core.records import Scalar, UnitRow
from vitclinic._core.registry import FigureSpec, KeyScalars
from vitclinic.anatomy import Anatomy, Unit
from vitclinic.anatomy.removal import Replay, stretches
from vitclinic.data import Batch
from vitclinic.probes.behaviour.intervals import Correct, drop, mean_over, share_correct
from vitclinic.probes.guards import Partial, preserve_state
from vitclinic.probes.probe import Cheaper, DoesNotApply, Need, OwningProbe, Result, register, unit_row
from vitclinic.probes.subject import Subject

KEPT_BYTES = 2**29
"""Maximum memory for recorded block outputs; beyond that, fewer images go through at a time."""
SAVED_EVERY = 1.0
"""Seconds of work that a killed exam may lose at most."""


@register
class Lesion(OwningProbe):
    """Drop in accuracy and rise in NLL when one unit at a time is removed [park2022 Fig. 10b, D.4].

    The branch of an MSA or MLP is set to zero, the 3 x 3 conv of a bottleneck becomes the identity (or subsampling),
    and the position embedding is set to zero. All networks see the same images, so that differences are paired.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> [row.name for row in Lesion()(model, loader).units]
        ['position', 'blocks.0.msa', 'blocks.0.mlp', 'blocks.1.msa', 'blocks.1.mlp']
    """

    name = "lesion"
    group = "Representation"
    rank = 190
    title = "Lesions"
    question = "How much is lost without one unit?"
    paper = "Park and Kim 2022, Fig. 10b, D.4 (P10)"
    key_scalars: ClassVar[KeyScalars] = {
        "accuracy_drop_msa": None,
        "accuracy_drop_mlp": None,
        "accuracy_drop_conv": None,
    }
    figures = (
        FigureSpec(
            name="lesion-drop",
            kind="units",
            values={"accuracy_drop": "accuracy lost"},
            table=["accuracy", "nll_rise"],
            share=True,
            title="Accuracy lost without each unit",
            reading="Each bar is the accuracy that the trained network loses when one unit is removed, with its 95%"
            " interval: a whisker that reaches zero is a unit that was not missed on these images. Park and Kim found"
            " that convs and MLPs at the beginning of a stage and MSAs at its end matter most, so that the bars"
            " repeat with the stages, which dotted lines part.",
        ),
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"labels", "logits", "anatomy"})
    by_default: ClassVar[bool] = False
    cheaper: ClassVar[Cheaper] = ({"images": 64}, {"images": 256})

    split: Literal["train", "val", "test"] = Field("test", description="split of the images")
    images: Annotated[int, Field(ge=1)] = Field(512, description="number of images")

    def view(self, subject: Subject) -> Subject:
        return subject.on(self.split, self.images)

    def forwards(self, subject: Subject) -> float:
        anatomy = subject.anatomy
        behind = (_share_behind(unit, anatomy) for unit in _removable(anatomy))
        return len(subject) * (1 + sum(behind)) + 1

    @torch.no_grad()
    def peak_memory(self, subject: Subject) -> float:
        with preserve_state(subject.network, subject.seed), Replay(subject.anatomy) as replay:
            images = min(_images_at_a_time(subject, replay), subject.batch_size, len(subject))
            return replay.recorded_bytes * images + subject.footprint.forward(images)

    @torch.no_grad()
    def measure(self, subject: Subject) -> Result:
        units = _removable(subject.anatomy)
        answers = LesionOutcomes(len(units), len(subject))
        partial = Partial(subject.scratch.get(self.name), " ".join(unit.name for unit in units), subject.distributed)
        answers.take(partial.read())
        try:
            with Replay(subject.anatomy) as replay:
                size = _images_at_a_time(subject, replay)
                for part in (part for batch in subject.batches() for part in batch.split(size)):
                    if int(part.indices[-1]) >= answers.done:
                        if answers.done == 0:
                            _check_repeatable(subject, part)
                        self._examine(subject, units, part, replay, answers)
                        partial.write(answers.arrays(), every=SAVED_EVERY)
        finally:
            partial.write(answers.arrays())
        return _result(units, answers)

    def _examine(
        self, subject: Subject, units: Sequence[Unit], batch: Batch, replay: Replay, answers: LesionOutcomes
    ) -> None:
        """Run one batch through the network, intact and without each unit."""
        passes = (len(units) + 1) * len(subject)
        before = answers.done * (len(units) + 1)
        with replay.record():
            answers.note(0, batch, subject.logits(batch.images))
        for number, unit in enumerate(units, start=1):
            subject.progress(self.name, before + number * len(batch), passes)
            with replay.skip_before(unit.depth), subject.anatomy.remove(unit):
                answers.note(number, batch, subject.logits(batch.images))
        answers.done = int(batch.indices[-1]) + 1
        subject.progress(self.name, answers.done * (len(units) + 1), passes)


def _check_repeatable(subject: Subject, batch: Batch) -> None:
    """Raise a ModelError if the same images get other answers each time: a lesion could not be told from chance."""
    first, second = (subject.logits(batch.images) for _ in range(2))
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise ModelError(
            f"{type(subject.anatomy.network).__name__} answers differently each time it sees the same images in eval"
            " mode (a dropout that stays on?), so that the effect of a lesion cannot be told from chance."
        )


class LesionOutcomes:
    """Correctness and NLL of each image; row 0 is the intact network, row k the k-th lesion."""

    def __init__(self, lesions: int, images: int) -> None:
        self.correct = np.zeros((lesions + 1, images), dtype=bool)
        self.nll = np.full((lesions + 1, images), np.nan)
        self.done = 0
        """Number of images that have been through all lesions."""

    def note(self, row: int, batch: Batch, logits: Tensor) -> None:
        """Add the logits of a batch; an answer with NaN counts as wrong."""
        logits = logits.double()
        right = (logits.argmax(dim=1) == batch.targets) & ~logits.isnan().any(dim=1)
        self.correct[row, batch.indices.numpy()] = right.cpu().numpy()
        self.nll[row, batch.indices.numpy()] = F.cross_entropy(logits, batch.targets, reduction="none").cpu().numpy()

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"correct": self.correct, "nll": self.nll, "done": np.array(self.done)}

    def take(self, arrays: dict[str, NDArray[Any]] | None) -> None:
        """Resume from the arrays of an earlier attempt."""
        if arrays is not None:
            self.correct[...], self.nll[...] = arrays["correct"], arrays["nll"]
            self.done = int(arrays["done"])


def _removable(anatomy: Anatomy) -> list[Unit]:
    units = [unit for unit in anatomy.units if unit.removal is not None]
    if not units:
        raise DoesNotApply(f"no unit of this {anatomy.family} can be removed.")
    return units


def _share_behind(unit: Unit, anatomy: Anatomy) -> float:
    """Return the share of the network that is computed when `unit` is removed, if all blocks cost the same."""
    skippable = {stretch.last for stretch in stretches(anatomy) if stretch.last < unit.depth}
    blocks = [block.units[-1].depth in skippable for block in anatomy.blocks]
    return 1 - sum(blocks) / max(1, len(blocks))


def _images_at_a_time(subject: Subject, replay: Replay) -> int:
    with replay.record():
        subject.logits(subject.example)
    return max(1, KEPT_BYTES // max(1, replay.recorded_bytes))


def _result(units: Sequence[Unit], answers: LesionOutcomes) -> Result:
    if not np.isfinite(answers.nll[0]).all():
        raise ModelError("the network's logits are not finite (NaN or infinity) for some image.")
    scalars = {"accuracy": share_correct(answers.correct[0]), "nll": mean_over(answers.nll[0], least=0.0)}
    for kind in dict.fromkeys(unit.kind for unit in units):
        rows = [number for number, unit in enumerate(units, start=1) if unit.kind == kind]
        scalars[f"accuracy_drop_{kind}"] = _mean_drop(answers.correct[0], answers.correct[rows])
    arrays = {"correct": answers.correct, "nll": answers.nll}
    return Result(scalars, [_row(unit, answers, number) for number, unit in enumerate(units, start=1)], arrays)


def _mean_drop(whole: Correct, lesioned: NDArray[np.bool_]) -> Scalar:
    """Return the drop in accuracy, averaged over lesions [R, n]."""
    if len(lesioned) == 1:
        return drop(whole, lesioned[0])
    drops = whole.astype(float) - lesioned.mean(axis=0)
    if not drops.any():  # no variance to compute an interval from, which does not make it exact
        return Scalar(value=0.0, n=len(drops))
    return mean_over(drops, least=-1.0, most=1.0)


def _row(unit: Unit, answers: LesionOutcomes, number: int) -> UnitRow:
    notes = [] if unit.removal is None else [unit.removal.how]
    values = {
        "accuracy": share_correct(answers.correct[number]),
        "accuracy_drop": drop(answers.correct[0], answers.correct[number]),
    }
    rises = answers.nll[number] - answers.nll[0]
    if np.isfinite(rises).all():
        values["nll_rise"] = mean_over(rises)
    else:
        notes.append("logits not finite for some image")
    return unit_row(unit, "; ".join(notes) or None, **values)
