"""Notices: what a user should know of a run before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from vitclinic.tasks import Classification
from vitclinic.training.parallel import describe_sharing
from vitclinic.training.schedule import in_steps

if TYPE_CHECKING:
    from vitclinic.training.trainer import Trainer

SCORES_VAL = (
    "The data has no test images and none are held out: test scores are of val, on which the best checkpoint is"
    " selected, and the last is not."
)


def describe_run(trainer: Trainer, blocks: Sequence[nn.Module] | None) -> list[str]:
    """Return what the task, the division among processes and the sizes of images say of a run.

    Args:
        trainer: The trainer, ready for its first step.
        blocks: The blocks whose weights are gathered at a time; None if there is nothing to divide.
    """
    recipe, dataset = trainer.recipe, trainer.dataset
    notices = [*trainer.task.notices(dataset)]
    notices += describe_sharing(recipe, blocks, trainer.micro_batch * trainer.distributed.size)
    if recipe.progressive_resizing.shares:
        notices.append(trainer.sizes.describe())
    if recipe.test and dataset.scores_val:
        notices.append(SCORES_VAL)
    return notices


def find_unheeded(trainer: Trainer) -> list[str]:
    """Return a notice for each part of the recipe that this run is too short, or its data too few, to heed."""
    recipe, notices = trainer.recipe, []
    dataset = trainer.dataset
    if isinstance(recipe.task, Classification) and len(dataset.classes) < 2:
        notices.append(
            f"'{dataset.name}' has one class, '{dataset.classes[0]}', so that any network is right; perhaps a folder"
            " inside it has the class folders"
        )
    elif isinstance(recipe.task, Classification) and len(set(dataset.train.labels.tolist())) < 2:
        notices.append("all training images have one label, so that any network learns to give it")
    epochs = trainer.total_steps / trainer.steps_per_epoch
    if late := [epoch for epoch in recipe.checkpoint.keep_epochs if epoch > epochs + 1e-9]:
        named = ", ".join(str(epoch) for epoch in late)
        notices.append(f"checkpoint.keep_epochs names epoch {named}, but the run ends after {epochs:g}")
    if in_steps(recipe.schedule.warmup, trainer.steps_per_epoch, trainer.total_steps) >= max(2, trainer.total_steps):
        notices.append(f"schedule.warmup is {recipe.schedule.warmup}, the whole run: lr never reaches its peak")
    return notices
