"""vitclinic: train vision transformers that work on the data you have, and see why.

The names below are the public interface; they are imported when first used, so that `import vitclinic` and the
command line's help stay fast.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitclinic import functional
    from vitclinic._core.callback import Callback
    from vitclinic._core.records import Measurement
    from vitclinic.data import Dataset, open_data
    from vitclinic.exam import Exam, Exams
    from vitclinic.exam.examine import examine  # from where it is: mypy takes the package's name for the module
    from vitclinic.exam.reporting import report
    from vitclinic.experiments.prescribe import Prescription
    from vitclinic.experiments.prescribe.prescribe import prescribe
    from vitclinic.experiments.study.conduct import study
    from vitclinic.models import create_model
    from vitclinic.training import Recipe, Run, build_recipe, load_model
    from vitclinic.training.train import resume, train
    from vitclinic.treatments import treat

__version__ = version("vitclinic")

_HOMES = {
    "Exam": "vitclinic.exam",
    "Exams": "vitclinic.exam",
    "examine": "vitclinic.exam",
    "report": "vitclinic.exam.reporting",
    "Measurement": "vitclinic._core.records",
    "Dataset": "vitclinic.data",
    "open_data": "vitclinic.data",
    "create_model": "vitclinic.models",
    "Prescription": "vitclinic.experiments.prescribe",
    "prescribe": "vitclinic.experiments.prescribe",
    "study": "vitclinic.experiments.study.conduct",
    "Callback": "vitclinic._core.callback",
    "Recipe": "vitclinic.training",
    "Run": "vitclinic.training",
    "build_recipe": "vitclinic.training",
    "load_model": "vitclinic.training",
    "resume": "vitclinic.training",
    "train": "vitclinic.training",
    "treat": "vitclinic.treatments",
}

_PACKAGES = frozenset({"functional"})
"""Packages that are public by themselves, such as `vitclinic.functional.cka`."""

__all__ = [
    "Callback",
    "Dataset",
    "Exam",
    "Exams",
    "Measurement",
    "Prescription",
    "Recipe",
    "Run",
    "__version__",
    "build_recipe",
    "create_model",
    "examine",
    "functional",
    "load_model",
    "open_data",
    "prescribe",
    "report",
    "resume",
    "study",
    "train",
    "treat",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"vitclinic.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'vitclinic' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
