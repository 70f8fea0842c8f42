"""The contract of a probe: a config, whose fields are its options, that can measure a subject. There are two kinds.

A *streaming* probe reads activations, attention maps or logits while images pass through the network; any number of
streaming probes share one pass. Its `begin` returns a `Tally`, which declares what it wants to read, is updated batch
by batch, and returns the result at the end. An *owning* probe makes its own passes in `measure`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from vitclinic._core.config import Config, validate
from vitclinic._core.errors import ModelError, VitclinicError
from vitclinic._core.records import Measurement, Scalar, UnitRow
from vitclinic._core.registry import LAST, OTHER, FigureSpec, KeyScalars, ProbeFacts, Registry

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitclinic._core.statistics import RunningMean
    from vitclinic.anatomy import AttentionMap, Site, Unit
    from vitclinic.data import Batch
    from vitclinic.probes.subject import Subject

Cheaper = tuple[Mapping[str, Any], ...]
"""Options with which a probe costs less, the cheapest first."""
Need = Literal["scores", "labels", "logits", "anatomy", "attention", "gradients"]
"""A requirement of a probe."""


class DoesNotApply(VitclinicError):  # noqa: N818 (it is the name of the status)
    """Error of a probe that makes no sense for a subject, such as attention maps of a CNN; the message says why."""


@dataclass(frozen=True)
class Result:
    """Result of a probe.

    Args:
        scalars: Named numbers of the whole network, with their intervals.
        units: One row per unit of the network, for numbers by depth.
        arrays: Named arrays: curves, matrices, per-image outcomes.
        status: `not_converged` if the numbers are the best estimate so far.
        reason: The reason for `not_converged`.
        mode: Mode of the network's BatchNorm layers during the measurement.

    Example:
        >>> Result({"loss": Scalar(value=0.5)}).unless("only 3 of 10 draws fit the budget.").status
        'not_converged'
    """

    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    units: Sequence[UnitRow] = ()
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    status: Literal["ok", "not_converged"] = "ok"
    reason: str | None = None
    mode: Literal["eval", "train"] = "eval"

    def unless(self, reason: str | None) -> Result:
        """Return this result, marked `not_converged` if a reason is given."""
        return self if reason is None else replace(self, status="not_converged", reason=reason)


if TYPE_CHECKING:  # editors and mypy read the options from the fields
    from pydantic._internal._model_construction import ModelMetaclass as _ProbeType
else:

    class _ProbeType(type(Config)):
        """The class of probe classes: a mistake such as `Flatness(sgima=1)` is a sentence with a suggestion."""

        def __call__(cls, **options: Any) -> Any:
            return validate(cls, options, where=f"probes.{getattr(cls, 'name', cls.__name__)}")


class Probe(Config, metaclass=_ProbeType):
    """Base class of all probes; fields are options.

    Subclass `StreamingProbe` or `OwningProbe`, not this class. The first line of the docstring is shown by
    `vitclinic list probes`. The class attributes below tell reports and plans about the probe.
    """

    name: ClassVar[str]
    """Name in commands, recipes and records."""
    group: ClassVar[str] = OTHER
    """Part of a report: Behaviour, Representation, Attention, Curvature, Network, or any other."""
    rank: ClassVar[int] = LAST
    """Position in plans and summaries, smallest first; the built-in ranks are five or ten apart."""
    title: ClassVar[str] = ""
    """Heading of its section; the name by default."""
    question: ClassVar[str] = ""
    """Question that it answers, in one sentence; the first line of the docstring by default."""
    paper: ClassVar[str] = ""
    """Reference, such as "Park and Kim 2022, Fig. 9"."""
    key_scalars: ClassVar[KeyScalars] = {}
    """Scalars of the summary, in order, and which way each is better; the first six scalars by default."""
    figures: ClassVar[Sequence[FigureSpec]] = ()
    """Figures of its section; by default, every value of the units is plotted by depth."""
    asked_for: ClassVar[bool] = False
    """True if it only runs when it is named."""
    needs: ClassVar[frozenset[Need]] = frozenset()
    """Requirements: class scores, labels that match them, logits (no probabilities), anatomy, attention, gradients."""
    by_default: ClassVar[bool] = True
    """True for quick probes; False for those that take minutes."""
    cheaper: ClassVar[Cheaper] = ()
    """Cheaper settings, the cheapest first: an exam with a budget picks one of them, or the defaults."""
    revision: ClassVar[int] = 1
    """Version of the formula. Raise it when the same options give other numbers: stored results are then redone."""

    @classmethod
    def facts(cls) -> ProbeFacts:
        """Return the facts that a report needs; every measurement carries them."""
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
            cls.facts()  # fail where the class is defined, not after an hour of measuring

    def forwards(self, subject: Subject) -> float:
        """Estimate the cost before running, in forward passes of one image.

        A streaming probe counts only its work beyond the shared pass.
        """
        raise TypeError(f"{type(self).__name__} must implement forwards(), its cost in forward passes of one image.")

    def view(self, subject: Subject) -> Subject:
        """Return the subject to measure; an owning probe may pick other images, as in `subject.on("train", 256)`."""
        return subject

    def requirements(self, subject: Subject) -> frozenset[Need]:
        """Return what it requires of a subject: `needs`, unless it also measures networks of other tasks."""
        return self.needs

    def check(self, subject: Subject) -> None:
        """Raise `DoesNotApply` if the probe makes no sense for the subject for a reason that `needs` does not cover."""

    def conditions(self, subject: Subject) -> dict[str, Any]:
        """Return what the result depends on besides subject, data, options and seed, as plain data."""
        return {}

    def __call__(self, model: nn.Module, data: Any, **options: Any) -> Measurement:
        """Measure a network with this probe only.

        Args:
            model: Any network that takes pixels in [0, 1]; pass `mean` and `std` if it takes normalized images.
            data: A torch DataLoader or any other iterable of `(images, labels)`, a `Dataset`, a folder or a name.
            options: `split`, `limit`, `batch_size`, `seed`, `mean`, `std`, `normalized`, `output`: see `load_subject`.

        Returns:
            The measurement, with `scalars`, `units` (one row per unit) and `arrays`.

        Raises:
            DoesNotApply: If the probe makes no sense for the network or the data.
            VitclinicError: If measuring fails.

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
        """Return the pictures of a measurement, [H, W, 3] each, by file name without extension."""
        return {}


class OwningProbe(Probe):
    """Base class of probes that make their own forward (and backward) passes.

    Example:
        >>> import torch
        >>> from vitclinic.probes import OwningProbe, Result, Scalar
        >>> class Parameters(OwningProbe):
        ...     name = "parameters"
        ...
        ...     def forwards(self, subject):
        ...         return 0.0
        ...
        ...     def measure(self, subject):
        ...         return Result({"count": Scalar(value=sum(p.numel() for p in subject.network.parameters()))})
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
        >>> Parameters()(model, [(torch.rand(4, 3, 2, 2), torch.tensor([0, 1, 0, 1]))]).scalars["count"].value
        26.0
    """

    def peak_memory(self, subject: Subject) -> float:
        """Estimate the bytes held at the peak, beside the network and its data; by default, a batch's forward pass.

        `subject.footprint` has what other passes hold.
        """
        return subject.footprint.forward(min(subject.batch_size, len(subject)))

    def measure(self, subject: Subject) -> Result:
        """Measure the subject and return the result.

        The network is in eval mode, and its state is restored afterwards whatever is done to it. If memory runs out,
        `measure` is called again with half the `subject.batch_size`.
        """
        raise TypeError(f"{type(self).__name__} must implement measure().")


class Sum(Protocol):
    """A sum over images, such as a `RunningMean`."""

    def merge(self, other: Self) -> None:
        """Add the sum of another process."""


class Tally:
    """Running state of a streaming probe during one pass.

    For each batch, `begin_batch` is called first, then `update` and `update_attention` in the order of the forward
    pass, then `end_batch`; `finish` is called once at the end. Memory must not grow with the number of images.
    """

    def taps(self) -> Mapping[Any, Site]:
        """Return the sites to read, by keys of your choice; `unit.output` is the state after a unit."""
        return {}

    def attention(self) -> Sequence[Unit]:
        """Return the units whose attention maps to read."""
        return ()

    def begin_batch(self, batch: Batch) -> None:
        """Prepare for a batch that is about to pass."""

    def update(self, key: Any, activation: Tensor) -> None:
        """Read the activation at the site `key` for the current batch; copy it if you keep it beyond this call."""

    def update_attention(self, seen: AttentionMap) -> None:
        """Read the attention map of one unit for the current batch."""

    def end_batch(self, batch: Batch, logits: Tensor) -> None:
        """Read the logits of a batch that has passed."""

    def sums(self) -> Mapping[str, Sum] | None:
        """Return everything summed over images, by names that all processes share; None if that is not all the state.

        If all tallies of a pass have sums, several processes divide the images among them; the leading process merges
        the sums of the others into its own and finishes.
        """
        return None

    def finish(self) -> Result:
        """Return the result, once all images have passed."""
        raise TypeError(f"{type(self).__name__} must implement finish().")


class StreamingProbe(Probe):
    """Base class of probes that share a forward pass: eval mode, no gradients, all images once and in order.

    Example:
        >>> import torch
        >>> from vitclinic.probes import Result, RunningMean, StreamingProbe, Tally, mean_scalar
        >>> class Brightness(StreamingProbe):
        ...     name = "brightness"
        ...
        ...     def begin(self, subject):
        ...         return BrightnessTally()
        >>> class BrightnessTally(Tally):
        ...     def __init__(self):
        ...         self.mean = RunningMean()
        ...
        ...     def end_batch(self, batch, logits):
        ...         self.mean.add(batch.images.mean((1, 2, 3)).cpu().numpy())
        ...
        ...     def finish(self):
        ...         return Result({"brightness": mean_scalar(self.mean)})
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
        >>> Brightness()(model, [(torch.ones(4, 3, 2, 2), torch.tensor([0, 1, 0, 1]))]).scalars["brightness"].value
        1.0
    """

    on_all_images: ClassVar[bool] = False
    """Plan it first, and on all images if affordable, because readers look for its number first."""

    def forwards(self, subject: Subject) -> float:
        return 0.0

    def begin(self, subject: Subject) -> Tally:
        """Return a new tally; if memory runs out, the pass starts over with another one."""
        raise TypeError(f"{type(self).__name__} must implement begin().")


def unit_row(unit: Unit, note: str | None = None, /, **values: Scalar) -> UnitRow:
    """Return a row of a measurement: the values of one unit, and a note if there is something to say about it.

    Args:
        unit: The unit.
        note: Something to say about it.
        values: Its values, by name.
    """
    return UnitRow(name=unit.name, kind=unit.kind, stage=unit.stage, depth=unit.depth, values=values, note=note)


def check_finite(values: Tensor | NDArray[Any], unit: Unit) -> None:
    """Raise a ModelError if any value computed from the output of `unit` is NaN or infinite."""
    if not np.isfinite(np.asarray(values)).all():
        raise ModelError(f"the output of {unit.name} is not finite (NaN or infinity) for some image.")


def mean_scalar(running: RunningMean) -> Scalar:
    """Return the mean over images, with a 95% t interval if there are two or more; of several numbers, the last.

    Args:
        running: The numbers of all images.

    Example:
        >>> from vitclinic.probes import RunningMean
        >>> running = RunningMean()
        >>> running.add(np.array([1.0, 2.0, 3.0]))
        >>> mean_scalar(running).value
        2.0
    """
    mean, half = (float(np.ravel(values)[-1]) for values in (running.mean, running.half_width()))
    if math.isnan(half):
        return Scalar(value=mean, n=running.n)
    return Scalar(value=mean, low=mean - half, high=mean + half, n=running.n)


PROBES: Registry[Probe] = Registry("probe", "vitclinic.probes", (OwningProbe, StreamingProbe))
register = PROBES.register
