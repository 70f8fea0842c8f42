"""The network of a run: built from its recipe, changed by its treatments, trained with its losses, loaded from disk."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitclinic._core.errors import ModelError, RecipeError
from vitclinic.data import Augment, Batch, Dataset, ImageSpec
from vitclinic.data.randomness import torch_seed
from vitclinic.models import Normalized, check_fit, create_model
from vitclinic.models.classifiers import create_library_network
from vitclinic.tasks.criterion import Criterion
from vitclinic.tasks.task import Task
from vitclinic.training.checkpoint import load_network_state
from vitclinic.training.init import InitialWeights, Loaded
from vitclinic.training.recipe import Recipe
from vitclinic.training.run import Run
from vitclinic.treatments import Losses, Objective, operate


class Learner(nn.Module):
    """A network with its task's losses and the treatments' objectives, as wrapped by DDP and trained."""

    def __init__(
        self, network: nn.Module, task: Task, objectives: Mapping[str, Objective], criterion: Criterion | None = None
    ) -> None:
        super().__init__()
        self.network = network
        self.task = task
        self.criterion = criterion
        self.objectives = nn.ModuleDict(dict(objectives))

    def forward(self, batch: Batch) -> Losses:
        """Return the losses of a batch by name: the task's own, then the objectives'."""
        if self.criterion is None:
            outputs = self.network(batch.images)
            losses = self.task.losses(outputs, batch)
        else:
            outputs, losses = self.criterion(self.network, batch)
        for name, objective in self.objectives.items():
            losses[name] = objective(batch, outputs)
        return losses


def build_network(
    recipe: Recipe, dataset: Dataset, init: InitialWeights | None = None
) -> tuple[Normalized, Loaded | None]:
    """Build the network to train: sized for the data, with the task's head and the treatments' surgery.

    A network trained from scratch normalizes with the mean and standard deviation of the training images, any other as
    its weights want it.

    Args:
        recipe: The recipe.
        dataset: The data.
        init: The weights to start from; without them, they are drawn from the seed, or timm's published ones.

    Returns:
        The network, and what was loaded of `init`.
    """
    spec = recipe.task.frame(dataset.spec)
    known = None if recipe.model.pretrained else dataset.statistics
    if init is not None:
        known = init.statistics
    statistics = {} if known is None else dict(zip(("mean", "std"), known, strict=True))
    loaded = None
    with torch.random.fork_rng():
        network = _create_untreated(recipe, spec, recipe.model.pretrained, **statistics)
        state = None if init is None else init.convert_for(network.backbone, spec)
        network.backbone = operate(network.backbone, recipe.task.adapt(recipe.treatments, network.backbone, spec), spec)
    if init is not None and state is not None:
        loaded = init.load_into(network.backbone, state, dataset.classes)
    check_fit(network, spec.in_chans, spec.img_size, recipe.task.num_outputs(spec))
    _put_head(network, recipe, spec)
    return network, None if loaded is None else loaded.with_head(network.backbone)


def _put_head(network: Normalized, recipe: Recipe, spec: ImageSpec) -> None:
    """Put the task's head, if it has one, on a treated network."""
    with torch.random.fork_rng():
        torch.manual_seed(torch_seed("head", recipe.seed))
        network.put_head(recipe.task.attach(network.backbone, spec))


def build_objectives(recipe: Recipe, network: Normalized, spec: ImageSpec) -> dict[str, Objective]:
    """Return the losses that treatments add, with weights that depend on the recipe's seed alone."""
    objectives: dict[str, Objective] = {}
    with torch.random.fork_rng():
        torch.manual_seed(torch_seed("objectives", recipe.seed))
        for treatment in recipe.treatments:
            objectives.update(treatment.objectives(network.trunk, spec))
    return objectives


def build_criterion(recipe: Recipe, network: Normalized, spec: ImageSpec) -> Criterion | None:
    """Return the losses of the task if they have a state, with weights that depend on the recipe's seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(torch_seed("criterion", recipe.seed))
        return recipe.resolved_task.criterion(network, spec)


def check_memory(images: int, shape: tuple[int, int, int]) -> None:
    """Raise a RecipeError if a micro-batch of images [C, H, W] alone needs more memory than the machine has."""
    if not hasattr(os, "sysconf"):
        return
    needed, there = 4 * images * math.prod(shape), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise RecipeError(
            f"batch_size: {images:,} images of {shape[1]} x {shape[2]} at a time need {needed / 1e9:.0f} GB, and this"
            f" machine has {there / 1e9:.0f}; choose a smaller batch_size, or accumulate."
        )


def adapt_augmentation(recipe: Recipe, network: nn.Module, spec: ImageSpec) -> tuple[Augment, list[str]]:
    """Return the augmentation a run actually trains with, and a notice for every treatment that changed it.

    Images that come with masks, objects or questions are not mixed, and no treatment changes that.
    """
    augment, notices = recipe.data.augment.resolve(), []
    for treatment in recipe.treatments if recipe.data.target == "class" else ():
        changed = treatment.augmentation(augment, network, spec)
        parts = [
            f"{name} is {_describe(getattr(changed, name))} instead of {_describe(value)}"
            for name, value in augment
            if value != getattr(changed, name)
        ]
        if parts:
            notices.append(f"{treatment.name} overrides the recipe's data.augment: {', '.join(parts)}")
        augment = changed
    return augment, notices


def _describe(value: Any) -> str:
    """Format a value of the augmentation for a notice."""
    if value is None:
        return "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def load_model(path: str | Path, checkpoint: str | None = None) -> Normalized:
    """Load the trained network of a run directory.

    Args:
        path: The run directory.
        checkpoint: `best`, `last`, `previous` or `epoch-N`. By default `best`, or `last` for a run without one.

    Returns:
        The network in evaluation mode. It takes pixels in [0, 1] and normalizes them itself, or images of Pillow's,
        which it prepares as the run's test images were; `classes` has the names of its outputs.

    Raises:
        RunError: The directory is not a run, or the checkpoint is missing or damaged.

    Example:
        >>> network = load_model("runs/first")  # doctest: +SKIP
        >>> logits = network(torch.rand(1, 3, 32, 32))  # doctest: +SKIP
        >>> network.classes[network(Image.open("cat.jpg")).argmax()]  # doctest: +SKIP
        'cat'
    """
    run = Run.open(path)
    name = checkpoint or run.checkpoints.default()
    run.refuse_changed_files(name)
    network = create_network(run.recipe, run.spec)
    load_network_state(network, run.checkpoints.read_model(name), f"'{path}'")
    network.preprocessing, network.classes = run.preprocessing, tuple(run.data_facts["classes"])
    return network.eval()


def create_network(recipe: Recipe, spec: ImageSpec) -> Normalized:
    """Create the recipe's treated network for images of this spec, with weights drawn from its seed.

    Raises:
        ModelError: The network cannot be built, or `model.num_classes` contradicts the task.
    """
    spec = recipe.task.frame(spec)
    with torch.random.fork_rng():
        network = _create_untreated(recipe, spec)
        network.backbone = operate(network.backbone, recipe.task.adapt(recipe.treatments, network.backbone, spec), spec)
    _put_head(network, recipe, spec)
    return network


def _create_untreated(
    recipe: Recipe, spec: ImageSpec, pretrained: bool = False, **statistics: Sequence[float]
) -> Normalized:
    """Create the recipe's network before surgery, which goes on with its random numbers."""
    outputs = recipe.task.num_outputs(spec)
    keywords: dict[str, Any] = {"num_classes": outputs, "in_chans": spec.in_chans, **recipe.model.keywords}
    if keywords["num_classes"] != outputs:
        raise ModelError(
            f"model.num_classes is {keywords['num_classes']}, but {recipe.task.name} of {spec.num_classes} classes"
            f" needs {outputs} outputs; remove model.num_classes."
        )
    size = spec.img_size[0] if spec.img_size[0] == spec.img_size[1] else spec.img_size
    name = recipe.model.name
    if name.partition(":")[0] in ("torchvision", "hf"):
        if pretrained:
            raise ModelError(f"model.pretrained is for timm's networks; write init={name} instead.")
        build = partial(create_library_network, name, img_size=size, **statistics)  # type: ignore[arg-type]
        return _seeded(build, recipe, keywords)
    build = partial(create_model, name, img_size=size, pretrained=pretrained, normalize=True, **statistics)
    return _seeded(build, recipe, keywords)


def _seeded(build: Callable[..., Normalized], recipe: Recipe, keywords: Mapping[str, Any]) -> Normalized:
    """Build a network with weights drawn from the recipe's seed, which takes smaller images if the recipe has them.

    timm's `dynamic_img_size` lets a network resample its position embedding in the forward pass. A network without
    this keyword may take any size as it is; the trainer finds out.
    """
    seed = torch_seed("weights", recipe.seed)
    if recipe.progressive_resizing.shares or recipe.task.varies_size:
        try:
            torch.manual_seed(seed)
            return build(**{"dynamic_img_size": True, **keywords})
        except ModelError:
            pass  # if it was for another reason, the same error comes again
    torch.manual_seed(seed)
    return build(**keywords)
