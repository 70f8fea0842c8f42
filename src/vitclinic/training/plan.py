"""The plan of a run: what a start settles, with what a step costs, before anything is trained or any image is decoded.

The trainer is built as for a run, so that a recipe's mistakes show as they would there. Then one pass of it is traced
with torch's fake tensors, which have shapes and no numbers: it takes no memory and hardly any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vitclinic._core.distributed import Distributed, pick_device
from vitclinic._core.errors import MissingWeightsError, RecipeError
from vitclinic._core.sources import check_model_name
from vitclinic.data import Batch
from vitclinic.data.annotations import Annotations
from vitclinic.data.described import describe_data
from vitclinic.data.named import find_missing_data
from vitclinic.models.cost import count_flops, count_state, make_fake, peak_bytes
from vitclinic.tasks.criterion import Moment
from vitclinic.training.budget import fit_size_to_images, image_counts, total_steps
from vitclinic.training.init import InitialWeights, read_initial_weights, settle
from vitclinic.training.overrides import Overrides, build_recipe
from vitclinic.training.parallel import NOTHING_TO_DIVIDE, choose_blocks, count_gathered
from vitclinic.training.recipe import Recipe
from vitclinic.training.token_label_teacher import describe_token_labels
from vitclinic.training.trainer import Trainer

_CPU = torch.device("cpu")
HOW = (
    "the tensors of one pass at this precision, traced without computing, with fused attention where the network uses"
    " it; scratch space of kernels and unused memory of an allocator come on top"
)
"""How `Memory.activations` was found."""


@dataclass(frozen=True)
class PlannedGroup:
    """A group of the optimizer's parameters."""

    parameters: int
    tensors: int
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class Memory:
    """Bytes that a process holds at the peak of a step."""

    weights: int
    """Weights and buffers of the network and of the objectives."""
    averaged: int
    """The averaged weights of `ema`."""
    gradients: int
    optimizer: int
    """The state of the optimizer."""
    step_rule: int
    """What the treatments' step rule keeps besides, such as a copy of the weights."""
    images: int
    """The images of a step, with their targets."""
    activations: int | None
    """The tensors of one forward and backward pass of `pass_images` images; None if they cannot be traced."""
    pass_images: int
    """How many images go through the network at a time."""
    gathered: int | None = None
    """With `parallel=fsdp`, about what a process has whole at a time of weights and gradients."""

    @property
    def total(self) -> int:
        """The sum; without the activations if they are not known."""
        held = (self.weights, self.averaged, self.gradients, self.optimizer, self.step_rule, self.images)
        return sum(held) + (self.activations or 0)

    def of_process(self, processes: int) -> int:
        """Return about what each of several processes holds, which divide the images, and with fsdp all else, too."""
        by_image = self.images + (self.activations or 0)
        kept = self.total - by_image
        divided = kept if self.gathered is None else kept // processes + self.gathered
        return divided + by_image // processes


@dataclass(frozen=True)
class RunPlan:
    """Course of a training by a recipe, and its cost in one process.

    Numbers of FLOPs count two for each multiply-add, in the network alone; a backward pass is taken to cost two forward
    passes.
    """

    recipe: Recipe
    data: str
    data_is_here: bool
    images: dict[str, int]
    """Images of each split."""
    classes: int
    channels: int
    size: tuple[int, int]
    network: str
    """The class of the network."""
    parameters: int
    trainable: int
    objective_parameters: int
    """Trained besides the network, by treatments that add losses."""
    treatments: dict[str, dict[str, Any]]
    """All options of each treatment."""
    augmentation: dict[str, Any]
    """Every part of it, as the run would train with."""
    optimizer: tuple[PlannedGroup, ...]
    micro_batch: int
    steps: int | None
    """None if the run would measure a step first, to train for `max_time`."""
    warmup_steps: float | None
    steps_per_epoch: float
    forward_flops: int | None
    """Of the network, for one image; None if it cannot be traced."""
    passes: float
    """Forward and backward passes of a step, on average."""
    memory: Memory
    notes: tuple[str, ...]

    @property
    def images_seen(self) -> int | None:
        """Images shown in the whole run, repeats included."""
        return None if self.steps is None else self.steps * self.recipe.batch_size

    @property
    def step_flops(self) -> float | None:
        """FLOPs of a step: three forward passes for each image and pass."""
        return None if self.forward_flops is None else 3 * self.passes * self.forward_flops * self.recipe.batch_size

    @property
    def total_flops(self) -> float | None:
        """FLOPs of the whole run, without validation."""
        return None if self.steps is None or self.step_flops is None else self.steps * self.step_flops

    def plain(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        return {
            **asdict(self),
            "recipe": self.recipe.model_dump(mode="json"),
            "images_seen": self.images_seen,
            "step_flops": self.step_flops,
            "total_flops": self.total_flops,
            "memory": {**asdict(self.memory), "total": self.memory.total, "how": HOW},
        }


def plan_run(
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None, overrides: Overrides | None = None
) -> RunPlan:
    """Return what `train` would do with a recipe, without training: `vitclinic train RECIPE --dry-run`.

    No image is decoded, and data sets of the papers (`imagenet`, `cifar100` ...) need not be here. What is wrong with
    the recipe is raised as by `train`.

    Args:
        recipe: Name of a shipped recipe, YAML file, plain data or `Recipe`; by default the defaults of all keys.
        overrides: Changes to it, as for `train`.

    Returns:
        The network with its parameters, all settings as resolved, the steps, and FLOPs and memory of a step.

    Raises:
        VitclinicError: The recipe or its data cannot be used; the message says why.

    Example:
        >>> plan = plan_run("digits", {"epochs": 2, "treatments": ["sam"]})
        >>> plan.steps, plan.images_seen, plan.parameters, plan.passes
        (45, 2880, 202186, 2.0)
    """
    built = build_recipe(recipe, overrides)
    check_model_name(built.model.name)
    built, init, settled = _find_init(built)
    described = describe_data(built.data, size=built.image_size, channels=built.model.in_chans)
    dataset = describe_token_labels(built, described)
    built = fit_size_to_images(built, len(dataset.train))
    alone = Distributed()
    steps = None if built.max_time is not None else total_steps(built, dataset, alone, _CPU)
    trainer = Trainer(built.model_copy(update={"compile": False}), dataset, steps or 1, alone, _CPU, init)
    notices = [notice for notice in trainer.notices if notice != NOTHING_TO_DIVIDE]
    notes = [*settled, *notices, *_find_notes(built)]
    gathered = _plan_division(trainer) if built.parallel == "fsdp" else None
    network, learner = trainer.network, trainer.learner
    parameters, trainable = _count(network.parameters()), _count(trainer.parameters)
    own = {id(parameter) for parameter in network.parameters()}
    objectives = _count(p for p in learner.parameters() if p.requires_grad and id(p) not in own)
    groups = tuple(
        PlannedGroup(_count(group["params"]), len(group["params"]), group["lr"], group["weight_decay"])
        for group in trainer.optimizer.param_groups
    )
    memory, flops, obstacle = _trace(trainer)
    if obstacle:
        notes.append(f"FLOPs and activations are not known: the network cannot be traced ({obstacle}).")
    return RunPlan(
        recipe=built,
        data=dataset.name,
        data_is_here=find_missing_data(built.data.source) is None,
        images=image_counts(dataset),
        classes=len(dataset.classes),
        channels=dataset.channels,
        size=dataset.size,
        network=type(network.trunk).__name__,
        parameters=parameters,
        trainable=trainable - objectives,
        objective_parameters=objectives,
        treatments={treatment.name: treatment.model_dump(mode="json") for treatment in built.treatments},
        augmentation=trainer.stream.augmenter.config.model_dump(mode="json"),
        optimizer=groups,
        micro_batch=trainer.micro_batch,
        steps=steps,
        warmup_steps=None if steps is None else trainer.schedule.warmup,
        steps_per_epoch=trainer.steps_per_epoch,
        forward_flops=flops,
        passes=max([t.passes() for t in built.treatments], default=1.0) * trainer.task.passes(dataset.spec),
        memory=replace(memory, gathered=gathered),
        notes=tuple(notes),
    )


def _find_init(recipe: Recipe) -> tuple[Recipe, InitialWeights | None, list[str]]:
    """Return the recipe with its initial weights, and notes; published weights need not be here."""
    try:
        init, notes = read_initial_weights(recipe), []
    except MissingWeightsError as error:
        init, notes = read_initial_weights(recipe, random_weights=True), [str(error)]
    settled, notices = settle(recipe, init)
    return settled, init, [*notices, *notes]


def _find_notes(recipe: Recipe) -> Iterator[str]:
    """Yield remarks for the reader of the plan about things that are not mistakes yet."""
    try:
        pick_device(recipe.device)
    except RecipeError as error:
        yield str(error)


def _plan_division(trainer: Trainer) -> int:
    """Return how many bytes of the weights a process would gather; what cannot be divided is raised as by a start."""
    divided = trainer.divided or trainer.accumulate > 1
    return count_gathered(trainer.learner, choose_blocks(trainer.recipe, trainer.learner, trainer.spec, divided))


def _trace(trainer: Trainer) -> tuple[Memory, int | None, str | None]:
    """Return memory and FLOPs of a step, and what kept a pass from being traced, if anything did.

    The trainer cannot be used afterwards.
    """
    recipe, learner = trainer.recipe, trainer.learner
    images = min([trainer.micro_batch, *(t.pass_images(trainer.micro_batch) for t in recipe.treatments)])
    weights, gradients = _bytes_of(learner), sum(parameter.nbytes for parameter in trainer.parameters)
    averaged = 0 if trainer.ema is None else _bytes_of(trainer.ema.module)
    state = count_state(trainer.optimizer)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    make_fake(learner, mode)
    flops, activations, obstacle = None, None, None
    with mode:
        batch = _make_batch(trainer, images)
        one = sum(tensor.nbytes for tensor in _tensors_of(batch)) // images
        try:
            flops = _count_flops(trainer)
            activations = _measure_pass(trainer, batch)
        except RuntimeError as error:  # a network whose course depends on the numbers in it
            obstacle = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
    copies = max([treatment.copies() for treatment in recipe.treatments], default=0.0)
    memory = Memory(
        weights=weights,
        averaged=averaged,
        gradients=gradients,
        optimizer=state,
        step_rule=round(copies * gradients),
        images=one * trainer.micro_batch * recipe.accumulate,
        activations=activations,
        pass_images=images,
    )
    return memory, flops, obstacle


def _count_flops(trainer: Trainer) -> int:
    """Return the FLOPs of the network's forward pass of one image; of two, halved, since BatchNorm wants several."""
    images = _make_batch(trainer, 2).images
    return count_flops(lambda: trainer.network(images), trainer.network) // 2


def _measure_pass(trainer: Trainer, batch: Batch) -> int:
    """Return the peak of the tensors of a forward and backward pass beside weights and gradients."""
    for parameter in trainer.learner.parameters():
        if parameter.requires_grad:  # as in every pass but the first of a step: the new gradient is added to one
            parameter.grad = torch.zeros_like(parameter)

    def run() -> None:
        with trainer.passes.autocast():
            losses: list[Tensor] = list(trainer.learner(batch).values())
        sum(losses, torch.zeros(())).backward()  # type: ignore[no-untyped-call]

    return peak_bytes(run, _CPU)


def _make_batch(trainer: Trainer, images: int) -> Batch:
    """Return a batch of the shapes that the stream yields."""
    dataset, stream = trainer.dataset, trainer.stream
    classes = len(dataset.classes)
    soft = stream.has_soft_targets
    patches = None if stream.patch_grid is None else stream.patch_grid[0] * stream.patch_grid[1]
    numbers = torch.arange(images)
    batch = Batch(
        torch.zeros(images, dataset.channels, *trainer.spec.img_size, dtype=trainer.dtype),
        torch.zeros(images, stream.questions * classes, dtype=trainer.dtype)
        if soft
        else torch.zeros(images, dtype=torch.int64),
        numbers,
        numbers,
        None if patches is None else torch.zeros(images, patches, classes, dtype=trainer.dtype),
        annotations=None
        if dataset.target == "class"
        else Annotations.blank(dataset.target, images, trainer.spec.img_size, stream.questions),
    )
    batch = trainer.task.read(batch)
    if trainer.criterion is None:
        return batch
    shapes = [(images, dataset.channels, *view.size) for view in stream.views[1:]]
    batch = replace(batch, crops=tuple(torch.zeros(shape, dtype=trainer.dtype) for shape in shapes))
    return trainer.criterion.prepare(trainer.network, [batch], Moment(0, trainer.total_steps), divided=False)[0]


def _tensors_of(batch: Batch) -> list[Tensor]:
    known = [] if batch.annotations is None else batch.annotations.tensors()
    parts = (batch.images, batch.targets, batch.patch_targets, batch.teacher, *batch.crops, *known)
    return [tensor for tensor in parts if tensor is not None]


def _bytes_of(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)
