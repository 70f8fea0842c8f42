"""What a task is: the batch it reads, its head, its losses, its metrics, and the number that selects a checkpoint.

A task owns these five things and nothing else. The loop, step rules, optimizers, schedules, EMA, processes,
checkpoints and treatments know `Task` and no task in particular.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict

from vitclinic._core.config import Config, validate
from vitclinic._core.errors import RecipeError
from vitclinic._core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitclinic._core.distributed import Distributed
    from vitclinic.data import Batch, Dataset, ImageSpec
    from vitclinic.treatments import Losses

DEFAULT = "classification"
BATCH_SIZE = 256

Score = dict[str, Any]
"""The metrics of a network on a split by name, with `count`, the number of images."""


@dataclass(frozen=True)
class Metric:
    """A number of a score, and how to print it.

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
    """Printed wherever a score is."""

    def show(self, value: float) -> str:
        """Return the value as text."""
        return f"{value:.1%}" if self.share else f"{value:.3f}"

    def show_interval(self, score: Mapping[str, Any]) -> str:
        """Return the 95% interval in a score as text."""
        return f"{self.show(score[f'{self.name}_low'])} to {self.show(score[f'{self.name}_high'])}"


class Task(Config, ABC):
    """Base of all tasks: subclass, state the facts, add fields for options, and `register`.

    The methods may be called in any process of a run, and must not keep state between calls.
    """

    model_config = ConfigDict(allow_inf_nan=False)
    main_key: ClassVar[str | None] = "name"

    name: ClassVar[str]
    title: ClassVar[str] = ""
    """A few words for reports."""
    paper: ClassVar[str] = ""
    """The paper's key, with the place in it."""
    metrics: ClassVar[tuple[Metric, ...]]
    """The numbers of its scores."""
    selects: ClassVar[str]
    """The metric on val that selects the best checkpoint."""
    higher_is_better: ClassVar[bool] = True
    """The direction of that metric."""
    loss_metric: ClassVar[str]
    """The metric that is the loss on val and test: one that is not finite is a divergence."""

    def read(self, batch: Batch) -> Batch:
        """Return the batch that losses and metrics see, from the one that was read: images and class labels."""
        return batch

    @abstractmethod
    def num_outputs(self, spec: ImageSpec) -> int:
        """Return how many outputs the head on the backbone has, for data of these classes."""

    @abstractmethod
    def losses(self, outputs: Tensor, batch: Batch) -> Losses:
        """Return the losses of a batch by name, each a scalar; their sum is differentiated.

        Args:
            outputs: What the network returns for `batch.images`, of shape [images, `num_outputs`].
            batch: As `read` returned it.
        """

    @abstractmethod
    def measure(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return what to add up over all images of a split: sums over the batch, as one float64 vector."""

    @abstractmethod
    def summarize(self, sums: list[float]) -> Score:
        """Return the metrics, with `count`, from the sums of `measure` over a whole split."""

    def evaluate(
        self, network: nn.Module, dataset: Dataset, split: str, distributed: Distributed, batch_size: int = BATCH_SIZE
    ) -> Score:
        """Score a network on a whole split, each process taking its share of the images.

        Metrics that are no function of sums over images need an `evaluate` of their own.
        """
        import torch

        from vitclinic.anatomy import eval_mode
        from vitclinic.data import evaluation_batches

        with torch.no_grad(), eval_mode(network):
            own = evaluation_batches(dataset, split, batch_size, distributed.rank, distributed.size)
            sums = distributed.sum(lambda: self._sum(network, own, evaluation_batches(dataset, split, 1)))
        return self.summarize(sums.tolist())

    def _sum(self, network: nn.Module, own: Iterator[Batch], any_images: Iterator[Batch]) -> Tensor:
        """Add up what is measured of a process's own images; of `any_images` zeros, as many, where it has none."""
        parameter = next(network.parameters())
        total: Tensor | None = None
        for batch in own:
            moved = self.read(batch.to(parameter.device, parameter.dtype))
            measured = self.measure(network(moved.images), moved)
            total = measured if total is None else total + measured
        return 0 * self._sum(network, any_images, any_images) if total is None else total

    def improves(self, score: Mapping[str, Any], best: Mapping[str, Any] | None) -> bool:
        """Tell whether a score on val is better than the best so far."""
        if best is None:
            return True
        new, old = score[self.selects], best[self.selects]
        return bool(new > old if self.higher_is_better else new < old)

    def plain(self) -> str | dict[str, Any]:
        """Return the task as a recipe writes it: its name, or its name and the options that were set."""
        options = self.model_dump(mode="json", exclude_unset=True)
        return {"name": self.name, **options} if options else self.name


TASKS: Registry[Task] = Registry("task", "vitclinic.tasks", (Task,))
register = TASKS.register


def known_tasks() -> dict[str, type[Task]]:
    """Return all tasks by name: ours, those registered in this process, and those of installed packages."""
    return TASKS.all()


def headlines(task: Task) -> list[Metric]:
    """Return the metrics of a task that are printed wherever a score is."""
    return [metric for metric in task.metrics if metric.headline]


def parse_task(value: Any) -> Task:
    """Turn `task` of a recipe into a task: a name, or `{name: ..., option: value}`.

    Raises:
        RecipeError: Where a task or an option is unknown, or has a value that it cannot have.

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
