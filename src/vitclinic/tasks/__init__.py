"""Tasks: what a training run learns. One file per task; `task.py` has the base class."""

from typing import TYPE_CHECKING

from vitclinic._core import make_lazy

if TYPE_CHECKING:
    from vitclinic.tasks.classification import Classification, LossConfig
    from vitclinic.tasks.contrastive import Contrastive
    from vitclinic.tasks.criterion import Criterion
    from vitclinic.tasks.detection import Detection
    from vitclinic.tasks.dino import Dino
    from vitclinic.tasks.retrieval import Retrieval
    from vitclinic.tasks.segmentation import Segmentation
    from vitclinic.tasks.task import Metric, Score, Task, headlines, known_tasks, parse_task, register
    from vitclinic.tasks.vqa import Vqa

__all__ = [
    "Classification",
    "Contrastive",
    "Criterion",
    "Detection",
    "Dino",
    "LossConfig",
    "Metric",
    "Retrieval",
    "Score",
    "Segmentation",
    "Task",
    "Vqa",
    "headlines",
    "known_tasks",
    "parse_task",
    "register",
]

make_lazy(__name__)
