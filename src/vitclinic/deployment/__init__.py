"""After training: predictions for new images, and networks as files that other libraries open."""

from typing import TYPE_CHECKING

from vitclinic._core import make_lazy

if TYPE_CHECKING:
    from vitclinic.deployment.annotate import Boxes, FoundObjects, Masks
    from vitclinic.deployment.answers import Answers
    from vitclinic.deployment.card import push_to_hub
    from vitclinic.deployment.export import export
    from vitclinic.deployment.predict import Predictions, Predictor, predict

__all__ = [
    "Answers",
    "Boxes",
    "FoundObjects",
    "Masks",
    "Predictions",
    "Predictor",
    "export",
    "predict",
    "push_to_hub",
]

make_lazy(__name__)
