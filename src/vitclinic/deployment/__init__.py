"""What comes after training: predictions of new images, and networks as files that other libraries open."""

from typing import TYPE_CHECKING

from vitclinic._core import make_lazy

if TYPE_CHECKING:
    from vitclinic.deployment.predict import Predictions, Predictor, predict

__all__ = ["Predictions", "Predictor", "predict"]

make_lazy(__name__)
