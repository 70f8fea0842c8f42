"""Data: sources, splits, augmentation and the training stream."""

from typing import TYPE_CHECKING

from vitclinic._core import make_lazy

if TYPE_CHECKING:
    from vitclinic.data.batch import Batch
    from vitclinic.data.config import Augment, DataConfig, ImageSpec
    from vitclinic.data.corruptions import Corruption
    from vitclinic.data.corruptions.copies import corrupt_data
    from vitclinic.data.dataset import Dataset, open_data
    from vitclinic.data.loader import Normalization, load_batches
    from vitclinic.data.split import Split
    from vitclinic.data.stream import TrainingStream, evaluation_batches

__all__ = [
    "Augment",
    "Batch",
    "Corruption",
    "DataConfig",
    "Dataset",
    "ImageSpec",
    "Normalization",
    "Split",
    "TrainingStream",
    "corrupt_data",
    "evaluation_batches",
    "load_batches",
    "open_data",
]

make_lazy(__name__)
