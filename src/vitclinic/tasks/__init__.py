"""Tasks: what a training run learns. One file a task; `task.py` says what a task is."""

from vitclinic.tasks.classification import Classification, LossConfig
from vitclinic.tasks.task import Learner, Metric, Score, Task, headlines, known_tasks, parse_task, register

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
