"""vitclinic: train vision transformers that work on the data you have, and see why.

The names below are the public interface; they are imported when first used, so that `import vitclinic` and the
command line's help stay fast. `list_models` and its like name what there is, without torch; `vitclinic list` prints the
facts about each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from importlib.metadata import version
from typing import TYPE_CHECKING

from vitclinic._core import make_lazy

if TYPE_CHECKING:
    from vitclinic import anatomy, data, exam, functional, models, probes, reports, tasks, training, treatments
    from vitclinic._core.callback import Callback
    from vitclinic._core.errors import VitclinicError
    from vitclinic._core.records import Finding, Measurement
    from vitclinic.data.dataset import Dataset, open_data
    from vitclinic.deployment.annotate import Boxes, FoundObjects, Masks
    from vitclinic.deployment.answers import Answers
    from vitclinic.deployment.card import push_to_hub
    from vitclinic.deployment.export import export
    from vitclinic.deployment.predict import Predictions, predict
    from vitclinic.exam.exam import Exam, Exams
    from vitclinic.exam.examine import examine
    from vitclinic.exam.features import Features, features
    from vitclinic.exam.reporting import report
    from vitclinic.experiments.prescribe.conduct import prescribe
    from vitclinic.experiments.prescribe.prescription import Prescription
    from vitclinic.experiments.study.catalogue import open_study
    from vitclinic.experiments.study.conduct import StudyResult, study
    from vitclinic.experiments.study.schema import Study
    from vitclinic.experiments.study.store import report_studies
    from vitclinic.experiments.study.verdicts import Verdict
    from vitclinic.experiments.transfer import Transfer, transfer
    from vitclinic.models.factory import create_model
    from vitclinic.reports.study_result import Comparison
    from vitclinic.training.network import load_model
    from vitclinic.training.overrides import build_recipe
    from vitclinic.training.plan import RunPlan, plan_run
    from vitclinic.training.recipe import Recipe
    from vitclinic.training.run import Checkpoint, Run
    from vitclinic.training.train import resume, train
    from vitclinic.treatments.surgery import treat

__version__ = version("vitclinic")

__all__ = [
    "Answers",
    "Boxes",
    "Callback",
    "Checkpoint",
    "Comparison",
    "Dataset",
    "Exam",
    "Exams",
    "Features",
    "Finding",
    "FoundObjects",
    "Masks",
    "Measurement",
    "Predictions",
    "Prescription",
    "Recipe",
    "Run",
    "RunPlan",
    "Study",
    "StudyResult",
    "Transfer",
    "Verdict",
    "VitclinicError",
    "__version__",
    "anatomy",
    "build_recipe",
    "create_model",
    "data",
    "exam",
    "examine",
    "export",
    "features",
    "functional",
    "list_datasets",
    "list_models",
    "list_probes",
    "list_recipes",
    "list_remedies",
    "list_studies",
    "list_tasks",
    "list_treatments",
    "load_model",
    "models",
    "open_data",
    "open_study",
    "plan_run",
    "predict",
    "prescribe",
    "probes",
    "push_to_hub",
    "report",
    "report_studies",
    "reports",
    "resume",
    "study",
    "tasks",
    "train",
    "training",
    "transfer",
    "treat",
    "treatments",
]


def list_models(pattern: str | None = None) -> list[str]:
    """Return every name that `create_model` and `model=` take: timm's, and ours.

    Args:
        pattern: Only names like this, as in timm: `"vit_tiny*"`.

    Example:
        >>> list_models("alternet5*")
        ['alternet50']
    """
    if "timm" in sys.modules:  # others may have added to its registry
        import timm.models

        import vitclinic.models  # noqa: F401  (adds our networks)

        return _matching(timm.models.list_models(), pattern)
    from vitclinic._core.sources import read_model_names

    return _matching(read_model_names(), pattern)


def list_probes(pattern: str | None = None) -> list[str]:
    """Return the names of all probes: ours and those of installed packages.

    Args:
        pattern: Only names like this: `"attention*"`.

    Example:
        >>> list_probes("attention*")
        ['attention_distance', 'attention_entropy', 'attention_maps']
    """
    from vitclinic.probes.probe import PROBES

    return _matching(PROBES.names(), pattern)


def list_treatments(pattern: str | None = None) -> list[str]:
    """Return the names of all treatments: ours and those of installed packages.

    Args:
        pattern: Only names like this: `"*attention"`.

    Example:
        >>> list_treatments("*attention")
        ['local_attention']
    """
    from vitclinic.treatments.treatment import TREATMENTS

    return _matching(TREATMENTS.names(), pattern)


def list_remedies(pattern: str | None = None) -> list[str]:
    """Return the names of the remedies that `prescribe` knows, in the order in which it tries them.

    Args:
        pattern: Only names like this: `"lr*"`.

    Example:
        >>> list_remedies("lr*")
        ['lr x 3', 'lr / 3']
    """
    from vitclinic.experiments.prescribe.remedies import describe_remedies

    return _matching((row["name"] for row in describe_remedies()), pattern)


def list_tasks(pattern: str | None = None) -> list[str]:
    """Return the names of all tasks: ours and those of installed packages.

    Args:
        pattern: Only names like this.

    Example:
        >>> "classification" in list_tasks()
        True
    """
    from vitclinic.tasks.task import TASKS

    return _matching(TASKS.names(), pattern)


def list_datasets(pattern: str | None = None) -> list[str]:
    """Return what `data=` takes: the embedded sets by name, and forms such as `hf:NAME`.

    Args:
        pattern: Only names like this.

    Example:
        >>> list_datasets("d*")
        ['digits']
    """
    from vitclinic.data.config import DATASETS

    return _matching(DATASETS, pattern)


def list_recipes(pattern: str | None = None) -> list[str]:
    """Return the names of the shipped recipes; those that begin with a paper's key are at that paper's scale.

    Args:
        pattern: Only names like this: `"chen2022*"`.

    Example:
        >>> list_recipes("wang2022*")
        ['wang2022-deit-s', 'wang2022-deit-s-convstem']
    """
    from vitclinic.training.overrides import read_shipped_recipes

    return _matching(read_shipped_recipes(), pattern)


def list_studies(pattern: str | None = None) -> list[str]:
    """Return the claims of the papers that there is a study of, in the papers' order.

    Args:
        pattern: Only names like this: `"C*"`.

    Example:
        >>> list_studies("C6")
        ['C6']
    """
    from vitclinic.experiments.study.catalogue import shipped_studies

    return _matching(shipped_studies(), pattern)


def _matching(names: Iterable[str], pattern: str | None) -> list[str]:
    return [name for name in names if pattern is None or fnmatch(name, pattern)]


make_lazy(__name__)
