"""The corruptions of CIFAR-10-C and ImageNet-C [Hendrycks & Dietterich 2019], on batches of images in [0, 1]."""

from typing import TYPE_CHECKING

from vitclinic._core import make_lazy

if TYPE_CHECKING:
    from vitclinic.data.corruptions.corruption import Corruption, corrupt
    from vitclinic.data.corruptions.parameters import EXTRA, FIFTEEN, NINETEEN, SEVERITIES, SMALLEST, setting

__all__ = ["EXTRA", "FIFTEEN", "NINETEEN", "SEVERITIES", "SMALLEST", "Corruption", "corrupt", "setting"]

make_lazy(__name__)
