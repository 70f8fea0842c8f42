"""What a treatment is: a strict config, facts about it, and up to six seams.

A treatment changes a training run in at most six ways, and the training loop knows these seams and no
treatment: *surgery* on the network before the optimizer is built, an added *objective*, the *augmentation* of the
images, a *batch transform*, a *step rule* and an *input ascent* (at most one of each a run). A treatment overrides the
seams it uses and leaves the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from pydantic import ConfigDict

from vitclinic._core.config import Config
from vitclinic._core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitclinic.data import Augment, Batch, ImageSpec
    from vitclinic.treatments.objective import Objective

Losses: TypeAlias = "dict[str, Tensor]"
BatchTransform: TypeAlias = "Callable[[Batch], Batch]"


class LossesAndGradients(Protocol):
    """Forward and backward of one micro-batch: adds to the parameters' gradients, returns the named losses.

    With `sync=False` the gradients stay this process's own. `weight` is the share of the step's gradient that this
    micro-batch stands for, relative to the others; one that is not a number makes a gradient that is not. Called twice
    on one batch it uses the same dropout masks. Images that require a gradient get theirs.
    """

    @property
    def module(self) -> nn.Module:
        """What is differentiated: the network with its objectives, out of all wrappers."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """What the optimizer trains."""

    @property
    def scale(self) -> float:
        """What the gradients are multiplied by (fp16's loss scale; 1 otherwise); the loop divides by it later."""

    def __call__(self, batch: Batch, sync: bool = True, weight: float = 1.0) -> Losses: ...

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each of this process's tensors by its mean over all processes, all of which call this."""


class StepRule(Protocol):
    """The rule by which a step gets its gradient; clipping, unscaling, optimizer, EMA and schedule stay in the loop."""

    def __call__(self, batches: Sequence[Batch], losses_and_gradients: LossesAndGradients) -> Losses:
        """Leave the gradient to step with in `.grad`; return the named losses at the weights stepped from."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class InputAscent(Protocol):
    """A change of the images towards a higher loss, by one backward pass from a start."""

    def start(self, batch: Batch) -> Batch:
        """Return the batch that the pass is made with: its images ask for a gradient."""

    def finish(self, batch: Batch, started: Batch) -> Batch:
        """Return the batch to train on, from the one given and the started one, whose images now have a gradient."""


@runtime_checkable
class TakesInputAscent(Protocol):
    """A step rule with a first pass of its own, by which the images can climb, too."""

    def take_input_ascent(self, inputs: InputAscent) -> None: ...


class Treatment(Config):
    """Base of all treatments: subclass, state the facts, add fields, override seams, and `register`."""

    model_config = ConfigDict(allow_inf_nan=False)

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    """The paper's key, with the place in it."""
    changes: ClassVar[str] = ""
    """What it changes, in one line."""
    costs: ClassVar[str] = ""
    """What it costs, in one line."""
    tasks: ClassVar[tuple[str, ...] | None] = None
    """The tasks that it makes sense for; None: any."""
    families: ClassVar[tuple[str, ...] | None] = None
    """The families of networks (names of `vitclinic.anatomy`) that it fits; None: any network."""

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        """Return the network to train, changed in place or replaced: surgery.

        Raises:
            TreatmentError: Where the treatment does not fit the network.
        """
        return network

    def objectives(self, network: nn.Module, spec: ImageSpec) -> Mapping[str, Objective]:
        """Return losses to add to the task's own, by name."""
        return {}

    def augmentation(self, augment: Augment, network: nn.Module, spec: ImageSpec) -> Augment:
        """Return the augmentation to train with, where the recipe's is at odds with this treatment; the run says so."""
        return augment

    def batch_transform(self, network: nn.Module, spec: ImageSpec) -> BatchTransform | None:
        """Return a change to every training batch, drawn from the batch's keys; None: no change."""
        return None

    def step_rule(self) -> StepRule | None:
        """Return the rule by which a step gets its gradient; None: plain back-propagation."""
        return None

    def input_ascent(self) -> InputAscent | None:
        """Return how the images of a step climb before it, by a pass of their own or by the step rule's first."""
        return None

    def passes(self) -> float:
        """Return the cost of a step in forward and backward passes of the network; a plain step is one."""
        return 1.0


TREATMENTS: Registry[Treatment] = Registry("treatment", "vitclinic.treatments", (Treatment,))
register = TREATMENTS.register


def known_treatments() -> dict[str, type[Treatment]]:
    """Return all treatments by name: ours, those registered in this process, and those of installed packages."""
    return TREATMENTS.all()


def parse_treatments(entries: Sequence[Any]) -> list[Treatment]:
    """Turn `["sam", {"conv_stem": {"act": "gelu"}}]` into treatments, in order.

    Raises:
        RecipeError: Where a treatment or an option is unknown, or has a value that it cannot have.
    """
    return TREATMENTS.parse(entries)


class Treatments(tuple[Treatment, ...]):
    """The treatments of a recipe, parsed once, with the plain data that they were written as.

    A run's digest is of the plain data, to the letter: `sam` and `{sam: {rho: 0.05}}` are two recipes.

    Example:
        >>> treatments = Treatments(["conv_stem", {"sam": {"rho": 0.1}}])
        >>> treatments[1].rho, treatments.written
        (0.1, ['conv_stem', {'sam': {'rho': 0.1}}])
    """

    written: list[Any]

    def __new__(cls, entries: Iterable[Any] = ()) -> Treatments:
        """Parse names, `{name: {option: value}}` and `Treatment` objects."""
        entries = list(entries)
        treatments = super().__new__(cls, parse_treatments(entries))
        treatments.written = [_plain(entry) for entry in entries]
        return treatments

    def __reduce__(self) -> tuple[type[Treatments], tuple[list[Any]]]:
        """Travel to other processes as plain data."""
        return Treatments, (self.written,)


def _plain(entry: Any) -> Any:
    """An entry of a recipe's `treatments` as it would be written in a file."""
    if isinstance(entry, Treatment):
        options = entry.model_dump(mode="json", exclude_unset=True)
        return {entry.name: options} if options else entry.name
    return copy.deepcopy(entry)
