"""What a treatment is: a strict config and up to four seams.

A treatment changes a training run in at most four ways, and the training loop knows these seams and no
treatment: *surgery* on the network before the optimizer is built, an added *objective*, a *batch transform*,
and a *step rule* (at most one a run). A treatment overrides the seams it uses and leaves the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor, nn

from vitclinic.config import Config, validate
from vitclinic.data import Batch
from vitclinic.errors import RecipeError, did_you_mean

Losses = dict[str, Tensor]
BatchTransform = Callable[[Batch], Batch]


class LossesAndGradients(Protocol):
    """Forward and backward of one micro-batch: adds to the parameters' gradients, returns the named losses.

    With `sync=False` the gradients stay this process's own. Called twice on one batch it uses the same dropout masks.
    """

    def __call__(self, batch: Batch, sync: bool = True) -> Losses: ...


class StepRule(Protocol):
    """How a step gets its gradient. Clipping, unscaling, the optimizer's step, EMA and schedule stay in the loop."""

    def __call__(self, batches: Sequence[Batch], losses_and_gradients: LossesAndGradients) -> Losses:
        """Leave the gradient to step with in `.grad`; return the named losses at the weights stepped from."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Objective(nn.Module):
    """An added loss. Its parameters are trained and saved in the run's state, not in the exported network."""

    def forward(self, batch: Batch, logits: Tensor) -> Tensor:
        """The loss of this batch, a scalar. Hidden states are read by hooks set when the objective is made."""
        raise TypeError(f"{type(self).__name__} does not say what its loss is.")


@dataclass(frozen=True)
class Case:
    """What a treatment may know of the run it is applied to."""

    classes: int
    channels: int
    size: tuple[int, int]


class Treatment(Config):
    """Base of all treatments: subclass, add fields, override seams, and `register`."""

    name: ClassVar[str]

    def operate(self, network: nn.Module, case: Case) -> nn.Module:
        """Surgery: the network to train, changed in place or replaced."""
        return network

    def objectives(self, network: nn.Module, case: Case) -> Mapping[str, Objective]:
        """Losses to add to the task's own, by name."""
        return {}

    def batch_transform(self, case: Case) -> BatchTransform | None:
        """A change to every training batch, drawn from the batch's keys."""
        return None

    def step_rule(self) -> StepRule | None:
        """How a step gets its gradient, where this is not plain back-propagation."""
        return None


_REGISTRY: dict[str, type[Treatment]] = {}

T = TypeVar("T", bound=type[Treatment])


def register(treatment: T) -> T:
    """Class decorator: make a treatment known by its `name`."""
    _REGISTRY[treatment.name] = treatment
    return treatment


def parse_treatments(entries: Sequence[Any]) -> list[Treatment]:
    """`["sam", {"conv_stem": {"act": "gelu"}}]` as treatments, in order."""
    treatments = [_parse(entry) for entry in entries]
    names = [treatment.name for treatment in treatments]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"'treatments': '{name}' is listed twice.")
    return treatments


def _parse(entry: Any) -> Treatment:
    if isinstance(entry, str):
        entry = {entry: {}}
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise RecipeError(f"'treatments': write a name or {{name: {{option: value}}}} (got {entry!r}).")
    ((name, options),) = entry.items()
    if name not in _REGISTRY:
        raise RecipeError(f"There is no treatment '{name}'.{did_you_mean(str(name), _REGISTRY)}")
    return validate(_REGISTRY[name], options or {}, where=f"treatments.{name}")
