"""The base class of treatments: a strict config, facts about the treatment, and six hooks into training.

A treatment changes a training run through at most six hooks: *surgery* on the network before the optimizer is built,
added *objectives*, the *augmentation* of the images, a *batch transform*, a *step rule* and an *input ascent* (at most
one of the last two per run). It overrides the hooks it needs. The training loop knows the hooks and no treatment in
particular.
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
    from vitclinic.treatments.patch_losses import Objective

Losses: TypeAlias = "dict[str, Tensor]"
BatchTransform: TypeAlias = "Callable[[Batch], Batch]"


class LossesAndGradients(Protocol):
    """Forward and backward of one micro-batch: adds to the parameters' gradients and returns the named losses.

    With `sync=False` the gradients are not exchanged between processes, unless these divide the weights (`processes`).
    `weight` scales the micro-batch's contribution to the gradient of the step relative to the others; NaN makes the
    gradient NaN. Two calls on the same batch use the same dropout masks. Images that require a gradient get one.
    """

    @property
    def module(self) -> nn.Module:
        """The differentiated module, without wrappers: the network with its objectives."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that the optimizer trains."""

    @property
    def processes(self) -> int:
        """How many processes average the gradients of every pass, whatever `sync`: 1 unless they divide the weights."""

    @property
    def scale(self) -> float:
        """The factor on the gradients (the loss scale of fp16, otherwise 1); the loop divides by it later."""

    def __call__(self, batch: Batch, sync: bool = True, weight: float = 1.0) -> Losses: ...

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over all processes; every process must call this."""


class StepRule(Protocol):
    """The computation of a step's gradient; clipping, unscaling, optimizer, EMA and schedule stay in the loop."""

    def __call__(self, batches: Sequence[Batch], losses_and_gradients: LossesAndGradients) -> Losses:
        """Leave the gradient to step with in `.grad`; return the named losses at the current weights."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class MixedSteps(Protocol):
    """A step rule whose steps are of several kinds, which cost different times."""

    def kinds(self) -> Sequence[tuple[float, StepRule]]:
        """Return each kind: its share of the rule's steps, and a new rule that makes no others once it is under way."""


class InputAscent(Protocol):
    """A perturbation of the images towards a higher loss, from a starting point and one backward pass."""

    def start(self, batch: Batch) -> Batch:
        """Return the batch to run the pass on; its images require a gradient."""

    def finish(self, batch: Batch, started: Batch) -> Batch:
        """Return the batch to train on, given the original and the started one, whose images now have a gradient."""


@runtime_checkable
class TakesInputAscent(Protocol):
    """A step rule with a first pass that can also perturb the images."""

    def take_input_ascent(self, inputs: InputAscent) -> None:
        """Perturb the images with `inputs` in the first pass."""


class Treatment(Config):
    """Base class of all treatments: subclass it, state the facts, add fields for options, override hooks, `register`.

    Example:
        >>> class FreezeHead(Treatment):
        ...     name = "freeze_head"
        ...     changes = "the classifier keeps its initial weights"
        ...
        ...     def operate(self, network, spec):
        ...         network.get_classifier().requires_grad_(False)
        ...         return network
        >>> FreezeHead().passes()
        1.0
    """

    model_config = ConfigDict(allow_inf_nan=False)

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    """The key of the paper, with section or equation."""
    changes: ClassVar[str] = ""
    """One line on what it changes."""
    costs: ClassVar[str] = ""
    """One line on what it costs."""
    tasks: ClassVar[tuple[str, ...] | None] = None
    """Names of the tasks it applies to; None means any."""
    part: ClassVar[str] = ""
    """The part of a network that it changes, such as "an MLP over channels"; it fits any network with that part. Empty
    means any network."""

    def fitting_tasks(self) -> tuple[str, ...] | None:
        """Return the names of the tasks it applies to with these options; None means any."""
        return self.tasks

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        """Return the network to train, changed in place or replaced (surgery).

        Args:
            network: The bare network, before the optimizer is built.
            spec: Image shape and number of classes.

        Raises:
            TreatmentError: The treatment does not fit the network.
        """
        return network

    def objectives(self, network: nn.Module, spec: ImageSpec) -> Mapping[str, Objective]:
        """Return losses to add to the task's own, by name; their parameters are trained too."""
        return {}

    def augmentation(self, augment: Augment, network: nn.Module, spec: ImageSpec) -> Augment:
        """Return the augmentation to train with, if the recipe's conflicts with this treatment; runs report it."""
        return augment

    def batch_transform(self, network: nn.Module, spec: ImageSpec) -> BatchTransform | None:
        """Return a function to apply to every training batch, with randomness from the batch's keys, or None."""
        return None

    def step_rule(self) -> StepRule | None:
        """Return the rule that computes a step's gradient; None means plain back-propagation."""
        return None

    def step_rule_start(self) -> float:
        """Return the share of the run, below 1, that is done without the step rule before it applies."""
        return 0.0

    def input_ascent(self) -> InputAscent | None:
        """Return the perturbation of a step's images, which uses the step rule's first pass or a pass of its own."""
        return None

    def passes(self) -> float:
        """Return the mean cost of a step in forward-backward passes of the network; a plain step costs one."""
        return 1.0

    def pass_images(self, images: int) -> int:
        """Return how many images of a process's micro-batch of `images` go through the network at a time."""
        return images

    def ascent_images(self, images: int) -> int:
        """Return how many of `images` share a gradient of their own within a step; all of them in a plain one."""
        return images

    def copies(self) -> float:
        """Return the memory that a step needs beyond a plain one, in copies of the trained weights."""
        return 0.0


TREATMENTS: Registry[Treatment] = Registry("treatment", "vitclinic.treatments", (Treatment,))
register = TREATMENTS.register


def known_treatments() -> dict[str, type[Treatment]]:
    """Return all treatments by name: built-in, registered in this process, and from installed packages."""
    return TREATMENTS.all()


def parse_treatments(entries: Sequence[Any]) -> list[Treatment]:
    """Turn `["sam", {"conv_stem": {"act": "gelu"}}]` into treatments, in order.

    Args:
        entries: Names, `{name: {option: value}}` or `Treatment` objects.

    Raises:
        RecipeError: A treatment or option is unknown, or a value is invalid.

    Example:
        >>> parse_treatments(["conv_stem", {"sam": {"rho": 0.2}}])[1].rho
        0.2
    """
    return TREATMENTS.parse(entries)


class Treatments(tuple[Treatment, ...]):
    """The treatments of a recipe, together with the plain data they were parsed from.

    The digest of a run covers the plain data literally: `sam` and `{sam: {rho: 0.1}}` are two different recipes.

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
        """Pickle as plain data, for other processes."""
        return Treatments, (self.written,)


def _plain(entry: Any) -> Any:
    """Return an entry of a recipe's `treatments` as it would be written in a file."""
    if isinstance(entry, Treatment):
        options = entry.model_dump(mode="json", exclude_unset=True)
        return {entry.name: options} if options else entry.name
    return copy.deepcopy(entry)
