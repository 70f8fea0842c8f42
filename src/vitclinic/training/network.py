"""The network of a run: built from its recipe, operated on by its treatments, and read back from disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitclinic._core.errors import ModelError
from vitclinic.data import Augment, Dataset, ImageSpec
from vitclinic.data.randomness import torch_seed
from vitclinic.models import Normalized, check_fit, create_model
from vitclinic.training.checkpoint import load_network_state
from vitclinic.training.recipe import Recipe
from vitclinic.training.run import Run
from vitclinic.treatments import Treatment, operate


def build_network(recipe: Recipe, dataset: Dataset) -> Normalized:
    """Build the network to train: of the data's size and channels, with its task's head and treatments' surgery.

    From scratch it normalizes by the training images' own mean and standard deviation.
    """
    spec = dataset.spec
    statistics = {} if recipe.model.pretrained else dict(zip(("mean", "std"), dataset.statistics, strict=True))
    network = create_network(recipe, spec, recipe.model.pretrained, **statistics)
    check_fit(network, spec.in_chans, spec.img_size, recipe.task.num_outputs(spec))
    return network


def adapt_augmentation(
    augment: Augment, treatments: Sequence[Treatment], network: nn.Module, spec: ImageSpec
) -> tuple[Augment, list[str]]:
    """Return the augmentation that a run really trains with, and a sentence for every treatment that changed it."""
    augment, notices = augment.resolve(), []
    for treatment in treatments:
        changed = treatment.augmentation(augment, network, spec)
        parts = [
            f"{name} is {_describe(getattr(changed, name))} instead of {_describe(value)}"
            for name, value in augment
            if value != getattr(changed, name)
        ]
        if parts:
            notices.append(f"{treatment.name} changes the recipe's data.augment: {', '.join(parts)}")
        augment = changed
    return augment, notices


def _describe(value: Any) -> str:
    """A part of the augmentation, as a notice says it."""
    if value is None:
        return "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def load_model(path: str | Path, checkpoint: str | None = None) -> Normalized:
    """Load the trained network of a run directory.

    Args:
        path: The run directory.
        checkpoint: `best`, `last`, `previous` or `epoch-N`; the best one there is unless given.

    Returns:
        The network in evaluation mode, taking pixels in [0, 1].

    Raises:
        RunError: Where this is no run, or its checkpoint is not there or damaged.

    Example:
        >>> network = load_model("runs/first")  # doctest: +SKIP
    """
    run = Run.open(path)
    network = create_network(run.recipe, run.spec)
    name = checkpoint or ("best" if "best" in run.checkpoints.names() else "last")
    load_network_state(network, run.checkpoints.read_model(name), f"'{path}'")
    return network.eval()


def create_network(
    recipe: Recipe, spec: ImageSpec, pretrained: bool = False, **statistics: Sequence[float]
) -> Normalized:
    """Create the network of a recipe for such images, treated, with the weights that its seed draws.

    Raises:
        ModelError: Where it cannot be built, or has another number of outputs than the task needs.
    """
    outputs = recipe.task.num_outputs(spec)
    keywords: dict[str, Any] = {"num_classes": outputs, "in_chans": spec.in_chans, **recipe.model.keywords}
    if keywords["num_classes"] != outputs:
        raise ModelError(
            f"model.num_classes is {keywords['num_classes']}, and {recipe.task.name} of {spec.num_classes} classes"
            f" needs {outputs} outputs: leave model.num_classes out."
        )
    size = spec.img_size[0] if spec.img_size[0] == spec.img_size[1] else spec.img_size
    with torch.random.fork_rng():
        torch.manual_seed(torch_seed("weights", recipe.seed))
        network = create_model(
            recipe.model.name, img_size=size, pretrained=pretrained, normalize=True, **statistics, **keywords
        )
        network.backbone = operate(network.backbone, recipe.treatments, spec)
    return network
