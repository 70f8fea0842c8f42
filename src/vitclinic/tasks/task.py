"""The base class of tasks. A task defines five things: how a batch is read, the size of the head, the losses, the
metrics, and the metric that selects the best checkpoint.

The loop, step rules, optimizers, schedules, EMA, processes, checkpoints and treatments know `Task` and no task in
particular.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict

from vitclinic._core.config import Config, validate
from vitclinic._core.errors import RecipeError
from vitclinic._core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitclinic._core.distributed import Distributed
    from vitclinic.data import Augment, Batch, Dataset, ImageSpec, TrainingStream
    from vitclinic.tasks.criterion import Criterion
    from vitclinic.training.recipe import Recipe
    from vitclinic.treatments import Losses, Treatment

DEFAULT = "classification"
BATCH_SIZE = 256

Score = dict[str, Any]
"""The metrics of a network on a split by name, with `count`, the number of images."""


@dataclass(frozen=True)
class Metric:
    """One number of a score, and how to print it.

    Attributes:
        name: Its key in the score.
        share: Between 0 and 1, printed as a percentage.
        interval: The score also has its 95% interval, as `NAME_low` and `NAME_high`.
        headline: Print it wherever a score is shown.

    Example:
        >>> Metric("accuracy", share=True).show(0.5), Metric("nll").show(0.5)
        ('50.0%', '0.500')
    """

    name: str
    share: bool = False
    """Between 0 and 1, printed as a percentage."""
    interval: bool = False
    """The score also has its 95% interval, as `NAME_low` and `NAME_high`."""
    headline: bool = True
    """Printed wherever a score is shown."""

    def show(self, value: float) -> str:
        """Format a value of this metric."""
        return f"{value:.1%}" if self.share else f"{value:.3f}"

    def show_interval(self, score: Mapping[str, Any]) -> str:
        """Format the 95% interval in a score."""
        return f"{self.show(score[f'{self.name}_low'])} to {self.show(score[f'{self.name}_high'])}"


class Task(Config, ABC):
    """Base class of all tasks: subclass it, state the facts, add fields for options, and `register`.

    Methods may be called in any process of a run and must not keep state between calls. docs/tasks.md has an example.
    """

    model_config = ConfigDict(allow_inf_nan=False)
    main_key: ClassVar[str | None] = "name"

    name: ClassVar[str]
    title: ClassVar[str] = ""
    """A short title for reports."""
    paper: ClassVar[str] = ""
    """The key of the paper, with section or equation."""
    metrics: ClassVar[tuple[Metric, ...]]
    """The numbers of its scores."""
    selects: ClassVar[str]
    """The metric on val that selects the best checkpoint."""
    higher_is_better: ClassVar[bool] = True
    """The direction in which that metric improves."""
    target: ClassVar[str] = "class"
    """What its images come with: `class`, `mask`, `objects` or `questions` (`data.target`)."""
    default_source: ClassVar[str] = "shapes"
    """The data of a recipe that names none."""
    loss_metric: ClassVar[str]
    """The metric that serves as the loss on val and test; if it is not finite, the run has diverged."""

    def check(self, recipe: Recipe) -> None:
        """Raise a ValueError, in one sentence, if another key of the recipe does not fit the task."""
        return None

    @property
    def varies_size(self) -> bool:
        """True if the network also has to take training images smaller than its own size."""
        return False

    def stream(self, dataset: Dataset, augment: Augment, seed: int, network: nn.Module) -> TrainingStream:
        """Return the stream of training samples: which images, in which order, in how many views."""
        from vitclinic.data import TrainingStream

        return TrainingStream(dataset, augment, seed)

    def frame(self, spec: ImageSpec) -> ImageSpec:
        """Return what the network takes: the images of the data, unless the task shows it parts of them."""
        return spec

    def adapt(self, treatments: Sequence[Treatment], network: nn.Module, spec: ImageSpec) -> Sequence[Treatment]:
        """Return the treatments as they are applied to the bare network under the task's head."""
        return treatments

    def attach(self, backbone: nn.Module, spec: ImageSpec) -> nn.Module:
        """Return the network to train, score and store: the treated backbone, or a `models.Headed` with a head on it.

        A head's weights are drawn from torch's generator, which is seeded by the recipe's seed.
        """
        return backbone

    def criterion(self, network: nn.Module, spec: ImageSpec) -> Criterion | None:
        """Return what computes the losses if they have a state; None if `losses` does."""
        return None

    def notices(self, dataset: Dataset) -> list[str]:
        """Return what a user should know of this data before the run, one sentence each, without a full stop."""
        return []

    def passes(self, spec: ImageSpec) -> float:
        """Return the cost of a pass in forward and backward passes of the network over the images of a batch."""
        return 1.0

    def evaluation_images(self, counts: Mapping[str, int], split: str) -> int:
        """Return how many images go through the network to score a split, given the images of each split."""
        return counts[split]

    def find_failure(self, row: Mapping[str, Any], progress: float) -> str | None:
        """Return a sentence if a row of metrics shows that the task has failed, though its losses are finite.

        Args:
            row: A row of metrics, of kind train, val or test.
            progress: Share of the run that is done.
        """
        return None

    def read(self, batch: Batch) -> Batch:
        """Convert a batch of images and class labels to the batch that losses and metrics see."""
        return batch

    @abstractmethod
    def num_outputs(self, spec: ImageSpec) -> int:
        """Return the number of outputs of the backbone's own classifier; 0 for features, as under a task's head."""

    @abstractmethod
    def losses(self, outputs: Tensor, batch: Batch) -> Losses:
        """Return the losses of a batch by name, each a scalar; their sum is differentiated.

        Args:
            outputs: Outputs of the network for `batch.images`, of shape [images, `num_outputs`], or what the head of
                `attach` returns.
            batch: The batch that `read` returned.
        """

    @abstractmethod
    def measure(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return sums over the batch, as one float64 vector; they are added up over all images of a split."""

    @abstractmethod
    def summarize(self, sums: list[float]) -> Score:
        """Compute the metrics, including `count`, from the sums of `measure` over a whole split."""

    def evaluate(
        self, network: nn.Module, dataset: Dataset, split: str, distributed: Distributed, batch_size: int = BATCH_SIZE
    ) -> Score:
        """Score a network on a whole split; each process takes its share of the images.

        Override this for metrics that cannot be computed from sums over images.

        Args:
            network: The network, which takes pixels in [0, 1].
            dataset: The data.
            split: `train`, `val` or `test`.
            distributed: The processes of the run.
            batch_size: Images per forward pass.

        Returns:
            The metrics by name.
        """
        import torch

        from vitclinic.anatomy import eval_mode
        from vitclinic.data import evaluation_batches

        with torch.no_grad(), eval_mode(network):
            own = evaluation_batches(dataset, split, batch_size, distributed.rank, distributed.size)
            sums = distributed.sum(lambda: self._sum(network, own, evaluation_batches(dataset, split, 1)))
        return self.summarize(sums.tolist())

    def _sum(self, network: nn.Module, own: Iterator[Batch], any_images: Iterator[Batch]) -> Tensor:
        """Add up `measure` over a process's own images; without any, return zeros, shaped by `any_images`."""
        parameter = next(network.parameters())
        total: Tensor | None = None
        for batch in own:
            moved = self.read(batch.to(parameter.device, parameter.dtype))
            measured = self.measure(network(moved.images), moved)
            total = measured if total is None else total + measured
        return 0 * self._sum(network, any_images, any_images) if total is None else total

    def improves(self, score: Mapping[str, Any], best: Mapping[str, Any] | None) -> bool:
        """Tell whether a validation score is better than the best so far."""
        if best is None:
            return True
        new, old = score[self.selects], best[self.selects]
        return bool(new > old if self.higher_is_better else new < old)

    def plain(self) -> str | dict[str, Any]:
        """Return the task as written in a recipe: its name, or name and the options that were set."""
        options = self.model_dump(mode="json", exclude_unset=True)
        return {"name": self.name, **options} if options else self.name


TASKS: Registry[Task] = Registry("task", "vitclinic.tasks", (Task,))
register = TASKS.register


def known_tasks() -> dict[str, type[Task]]:
    """Return all tasks by name: built-in, registered in this process, and from installed packages."""
    return TASKS.all()


def refuse_parts(task: Task, recipe: Recipe, parts: Iterable[str]) -> None:
    """Refuse parts of the augmentation, and compilation, for a task that can use neither.

    Args:
        task: The task, for the message.
        recipe: The recipe to check.
        parts: Parts of `data.augment`, such as `mixup`.

    Raises:
        ValueError: The recipe has one of the parts, or compiles its network.
    """
    augment = recipe.data.augment.resolve()
    made = [part for part in parts if getattr(augment, part)]
    if made:
        raise ValueError(f"the task {task.name} takes no data.augment.{made[0]}: set it to 0")
    if recipe.compile:
        raise ValueError(f"compile is not for the task {task.name}: remove it")


def headlines(task: Task) -> list[Metric]:
    """Return the metrics of a task that are printed wherever a score is shown.

    Args:
        task: The task.
    """
    return [metric for metric in task.metrics if metric.headline]


def parse_task(value: Any) -> Task:
    """Parse `task` of a recipe.

    Args:
        value: A name, `{name: ..., option: value}` or a `Task`.

    Returns:
        The task.

    Raises:
        RecipeError: A task or option is unknown, or a value is invalid.

    Example:
        >>> parse_task("classification").selects
        'accuracy'
    """
    if isinstance(value, Task):
        return value
    options = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = options.pop("name", DEFAULT)
    if not isinstance(name, str):
        raise RecipeError(f"'task': write a name, or {{name: ..., option: value}} (got {value!r}).")
    cls = TASKS.get(name)
    if options and not cls.model_fields:
        raise RecipeError(f"The task '{name}' has no options (got {', '.join(map(repr, options))}).")
    return validate(cls, options, where="task")
