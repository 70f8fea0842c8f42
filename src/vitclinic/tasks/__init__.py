"""Tasks: what a training run learns. One file a task; `task.py` says what a task is."""

from typing import TYPE_CHECKING

from vitclinic._core.lazy import make_lazy

if TYPE_CHECKING:
    from vitclinic.tasks.classification import Classification, LossConfig
    from vitclinic.tasks.learner import Learner
    from vitclinic.tasks.task import Metric, Score, Task, headlines, known_tasks, parse_task, register

__all__ = [
    "Classification",
    "Learner",
    "LossConfig",
    "Metric",
    "Score",
    "Task",
    "headlines",
    "known_tasks",
    "parse_task",
    "register",
]

make_lazy(__name__)
