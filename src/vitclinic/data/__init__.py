"""Data: sources, splits, augmentation and the training stream."""

from vitclinic.data.augment import Augment
from vitclinic.data.batch import Batch
from vitclinic.data.corruptions import Corruption
from vitclinic.data.corruptions.copies import corrupt_data
from vitclinic.data.dataset import DataConfig, Dataset, Split, open_data
from vitclinic.data.loader import Normalization, load_batches
from vitclinic.data.spec import ImageSpec
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
