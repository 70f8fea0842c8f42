"""What a probe is: a strict config that can measure a subject. There are two kinds.

A *streaming* probe reads activations, attention maps or logits while the images pass through the network, and
any number of them share one pass: `begin` makes a `Tally`, which says what it wants to see, is told, and in the
end gives the result. An *owning* probe has passes of its own: `measure`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from vitclinic._core.config import Config, validate
from vitclinic._core.errors import ModelError, RecipeError, VitclinicError
from vitclinic._core.facts import LAST, OTHER, FigureSpec, KeyScalars, ProbeFacts
from vitclinic._core.records import Measurement, Scalar, UnitRow
from vitclinic._core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitclinic._core.statistics import RunningMean
    from vitclinic.anatomy import AttentionMap, Site, Unit
    from vitclinic.data import Batch
    from vitclinic.probes.subject import Subject

Cheaper = tuple[Mapping[str, Any], ...]
Need = Literal["labels", "anatomy", "attention", "gradients"]


class DoesNotApply(VitclinicError):  # noqa: N818 (it is the name of the status)
    """Raised by a probe that has no meaning for a subject; the text says why."""


@dataclass(frozen=True)
class Result:
    """What a probe found, the network being in `mode`; `reason` says why an estimate has not converged."""

    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    units: Sequence[UnitRow] = ()
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    status: Literal["ok", "not_converged"] = "ok"
    reason: str | None = None
    mode: Literal["eval", "train"] = "eval"

    def unless(self, reason: str | None) -> Result:
        """The same, not converged for that reason if there is one."""
        return self if reason is None else replace(self, status="not_converged", reason=reason)


class Probe(Config):
    """Base of both kinds: fields are options. The docstring's first line is what `vitclinic list probes` says."""

    name: ClassVar[str]
    group: ClassVar[str] = OTHER
    """Its part of a report: Behaviour, Representation, Attention, Curvature, Network, or one of its own naming."""
    rank: ClassVar[int] = LAST
    """Its place in plans and summaries: what a reader wants to know first comes first, and ours are ten apart."""
    title: ClassVar[str] = ""
    """The heading of its section; without one, its name."""
    question: ClassVar[str] = ""
    """The question it answers, in one sentence; without one, the first line of its docstring."""
    paper: ClassVar[str] = ""
    """Where it comes from: "Park and Kim 2022, Fig. 9"."""
    key_scalars: ClassVar[KeyScalars] = {}
    """The scalars of the summary, in order, and which way each is better; without any, the first six are shown."""
    figures: ClassVar[Sequence[FigureSpec]] = ()
    """The figures of its section; without any, every value of its units is drawn by depth."""
    asked_for: ClassVar[bool] = False
    """Whether it is measured only if it is named."""
    needs: ClassVar[frozenset[Need]] = frozenset()
    by_default: ClassVar[bool] = True
    """Whether it is one of the quick ones; one that takes minutes is not."""
    cheaper: ClassVar[Cheaper] = ()
    """Options with which it costs less, the cheapest first: an exam within a budget chooses one, or the defaults."""
    revision: ClassVar[int] = 1
    """To be raised when the same options come to mean another number: stored results are then not reused."""

    @classmethod
    def facts(cls) -> ProbeFacts:
        """Return what a report has to know of it, as its measurements carry it."""
        stated = {
            "title": cls.title or cls.name,
            "question": cls.question or (cls.__doc__ or "").split("\n")[0],
            "group": cls.group,
            "rank": cls.rank,
            "key_scalars": dict(cls.key_scalars),
            "paper": cls.paper,
            "figures": list(cls.figures),
        }
        return validate(ProbeFacts, stated, where=cls.__name__)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if hasattr(cls, "name"):
            cls.facts()  # a mistake shows where the class is defined, not when it has measured for an hour

    def forwards(self, subject: Subject) -> float:
        """An estimate, before it runs, of its work in forward passes of one image each.

        For a streaming probe, beyond the pass that it shares.
        """
        raise TypeError(f"{type(self).__name__} does not say what it costs.")

    def view(self, subject: Subject) -> Subject:
        """What it measures, where an owning probe has its own choice of images: `subject.on("train", 256)`."""
        return subject

    def check(self, subject: Subject) -> None:
        """Raise `DoesNotApply` where it has no meaning, beyond what `needs` says, if that shows before measuring."""

    def conditions(self, subject: Subject) -> dict[str, Any]:
        """What else than subject, data, options and seed the result depends on, as plain data."""
        return {}

    def __call__(self, model: nn.Module, data: Any, **options: Any) -> Measurement:
        """Measure a network, alone and at once.

        Args:
            model: Any network that takes pixels in [0, 1], or normalized ones (say by what: `mean` and `std`).
            data: A torch DataLoader or any other iterable of `(images, labels)`, a `Dataset`, a folder or a name.
            options: `split`, `limit`, `batch_size`, `seed`, `mean`, `std`, `normalized`: see `load_subject`.

        Raises:
            DoesNotApply: Where the probe has no meaning for the network or the data.
            VitclinicError: Where it fails.

        Example:
            >>> import timm, torch
            >>> from vitclinic.probes import Norms
            >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
            >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
            >>> Norms()(model, loader).scalars["activation_norm_last"].n
            8
        """
        from vitclinic.probes.running import measure_one

        return measure_one(self, model, data, **options)

    def pictures(self, measurement: Measurement) -> Mapping[str, NDArray[np.uint8]]:
        """What there is to look at in a measurement of this probe: [H, W, 3] by names that a file can have."""
        return {}


class OwningProbe(Probe):
    """A probe with passes of its own."""

    def measure(self, subject: Subject) -> Result:
        """The result. The network is in eval mode, and whatever is done to it is undone afterwards.

        Called again with half of `subject.batch_size` if memory runs out.
        """
        raise TypeError(f"{type(self).__name__} does not say how it measures.")


class Sum(Protocol):
    """A sum over images, such as a `RunningMean`."""

    def merge(self, other: Self) -> None:
        """Take in what another process has summed."""


class Tally:
    """The state of a streaming probe during one pass. Memory must not grow with the number of images."""

    def taps(self) -> Mapping[Any, Site]:
        """The sites to read, by keys of the tally's own; `unit.output` for the state after a unit."""
        return {}

    def attention(self) -> Sequence[Unit]:
        """The units whose attention maps to see."""
        return ()

    def begin_batch(self, batch: Batch) -> None:
        """The batch is about to pass."""

    def update(self, key: Any, activation: Tensor) -> None:
        """What passed the tap `key` for the current batch; to be copied if it is kept beyond this call."""

    def update_attention(self, seen: AttentionMap) -> None:
        """The attention map of one unit for the current batch."""

    def end_batch(self, batch: Batch, logits: Tensor) -> None:
        """The batch has passed."""

    def sums(self) -> Mapping[str, Sum] | None:
        """All that it has summed over images, by names that are the same in all processes; None if there is more to it.

        Several processes divide the images among them if all tallies of a pass have sums; those of the others are then
        merged into the leading one's, which finishes.
        """
        return None

    def finish(self) -> Result:
        """The result, once all images have passed."""
        raise TypeError(f"{type(self).__name__} does not say what its result is.")


class StreamingProbe(Probe):
    """A probe that shares a forward pass with others: eval mode, no gradients, all images once, in order."""

    on_all_images: ClassVar[bool] = False
    """Planned first, and on all images if at all affordable: readers look for its number before any other."""

    def forwards(self, subject: Subject) -> float:
        return 0.0

    def begin(self, subject: Subject) -> Tally:
        """A new tally; the pass starts over with another if memory runs out."""
        raise TypeError(f"{type(self).__name__} does not say what it tallies.")


def unit_row(unit: Unit, note: str | None = None, /, **values: Scalar) -> UnitRow:
    """What was measured of `unit`, and what is to be said about it, as a row of a measurement."""
    return UnitRow(name=unit.name, kind=unit.kind, stage=unit.stage, depth=unit.depth, values=values, note=note)


def check_finite(values: Tensor | NDArray[Any], unit: Unit) -> None:
    """Raise where something that was computed from what `unit` does is not a number: a mean over it would be none."""
    if not np.isfinite(np.asarray(values)).all():
        raise ModelError(f"what {unit.name} computes is not finite for some image.")


def mean_scalar(running: RunningMean) -> Scalar:
    """The mean over images, with its t interval where there are two of them at least; of several numbers, the last."""
    mean, half = (float(np.ravel(values)[-1]) for values in (running.mean, running.half_width()))
    if math.isnan(half):
        return Scalar(value=mean, n=running.n)
    return Scalar(value=mean, low=mean - half, high=mean + half, n=running.n)


PROBES: Registry[Probe] = Registry("probe", "vitclinic.probes", (OwningProbe, StreamingProbe))
register = PROBES.register


def known_probes() -> dict[str, type[Probe]]:
    """Return all probes by name: ours, those registered in this process, and those of installed packages."""
    return PROBES.all()


def default_probes() -> list[str]:
    """Return the names of the probes that are meant where none is named: those that take seconds."""
    return [name for name, probe in known_probes().items() if probe.by_default]


def parse_probes(entries: Sequence[Any] | None) -> list[Probe]:
    """Turn `["norms", {"cost": {"repeats": 20}}]` into probes, in order; None means the usual ones."""
    if entries is None:
        entries = default_probes()
    if not entries:
        raise RecipeError("'probes' is empty; name some of `vitclinic list probes`, or leave it out.")
    return PROBES.parse(entries)
