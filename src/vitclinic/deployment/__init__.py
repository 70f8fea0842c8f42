"""What comes after training: predictions of new images, and networks as files that other libraries open."""

from typing import TYPE_CHECKING

from vitclinic._core import make_lazy

if TYPE_CHECKING:
    from vitclinic.deployment.card import push_to_hub
    from vitclinic.deployment.export import export
    from vitclinic.deployment.predict import Predictions, Predictor, predict

__all__ = ["Predictions", "Predictor", "export", "predict", "push_to_hub"]

make_lazy(__name__)
