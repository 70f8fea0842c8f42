"""The state of a trainer in a checkpoint: whole tensors, even if each process has only a part of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vitclinic.training.parallel import divide_lists, divide_optimizer_state, load_divided
from vitclinic.training.replanning import Course

if TYPE_CHECKING:
    from vitclinic.training.trainer import Trainer


def collect_state(trainer: Trainer) -> dict[str, Any]:
    """Return what resuming needs in addition to the exported network."""
    halved = trainer.accumulate != trainer.planned_accumulate
    state = {
        "step": trainer.step,
        "first_loss": trainer.divergence.first_loss,
        "skipped": trainer.divergence.skipped,
        **({} if trainer.recipe.max_time is None else trainer.course.plain()),
        **({"accumulate": trainer.accumulate} if halved else {}),
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "rule": trainer.rules.own.state_dict(),
        "objectives": trainer.learner.objectives.state_dict(),
        "raw_network": None if _exports_network(trainer) else trainer.network.state_dict(),
        **({} if trainer.criterion is None else {"criterion": _criterion_state(trainer)}),
    }
    return state if trainer.shards is None else trainer.shards.gather(state)


def restore_state(trainer: Trainer, model: Mapping[str, Tensor], state: dict[str, Any]) -> None:
    """Restore the exported network and what `collect_state` returned."""
    trainer.load_exported(model)
    if not _exports_network(trainer):
        load_divided(trainer.network, state["raw_network"])
    if trainer.criterion is not None:
        # What is missing is the network that the criterion exports, which has been loaded already.
        load_divided(trainer.criterion, state["criterion"], strict=False)
    load_divided(trainer.learner.objectives, state["objectives"])
    trainer.optimizer.load_state_dict(divide_optimizer_state(state["optimizer"], trainer.parameters))
    trainer.scaler.load_state_dict(state["scaler"])
    trainer.rules.own.load_state_dict(divide_lists(state["rule"], trainer.parameters))
    trainer.step = state["step"]
    trainer.divergence.first_loss, trainer.divergence.skipped = state["first_loss"], state.get("skipped", 0)
    trainer.lay_out(Course(state.get("planned", trainer.course.planned), state.get("bends", ())))


def _exports_network(trainer: Trainer) -> bool:
    """Return True if the network to evaluate is the one that is trained."""
    if trainer.shards is not None:
        return trainer.ema is None
    return trainer.evaluation_network is trainer.network


def _criterion_state(trainer: Trainer) -> dict[str, Tensor]:
    """Return the state of the criterion without the network that it exports: checkpoints have that already."""
    assert trainer.criterion is not None
    exported = {id(tensor) for tensor in trainer.evaluation_network.state_dict(keep_vars=True).values()}
    state = trainer.criterion.state_dict(keep_vars=True)
    return {name: tensor.detach() for name, tensor in state.items() if id(tensor) not in exported}
