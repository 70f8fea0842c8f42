"""vitclinic: train vision transformers that work on the data you have, and see why.

The names below are the public interface; they are imported when first used, so that `import vitclinic` and the
command line's help stay fast.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from vitclinic._core.lazy import make_lazy

if TYPE_CHECKING:
    from vitclinic import anatomy, data, functional, models, probes, tasks, treatments
    from vitclinic._core.callback import Callback
    from vitclinic._core.errors import VitclinicError
    from vitclinic._core.records import Finding, Measurement
    from vitclinic.data.dataset import Dataset, open_data
    from vitclinic.exam.exam import Exam, Exams
    from vitclinic.exam.examine import examine
    from vitclinic.exam.reporting import report
    from vitclinic.experiments.prescribe.conduct import prescribe
    from vitclinic.experiments.prescribe.prescription import Prescription
    from vitclinic.experiments.study.catalogue import open_study
    from vitclinic.experiments.study.conduct import StudyResult, study
    from vitclinic.experiments.study.schema import Study
    from vitclinic.experiments.study.store import report_studies
    from vitclinic.experiments.study.verdicts import Verdict
    from vitclinic.listing import (
        list_datasets,
        list_models,
        list_probes,
        list_recipes,
        list_studies,
        list_tasks,
        list_treatments,
    )
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
    "Callback",
    "Checkpoint",
    "Comparison",
    "Dataset",
    "Exam",
    "Exams",
    "Finding",
    "Measurement",
    "Prescription",
    "Recipe",
    "Run",
    "RunPlan",
    "Study",
    "StudyResult",
    "Verdict",
    "VitclinicError",
    "__version__",
    "anatomy",
    "build_recipe",
    "create_model",
    "data",
    "examine",
    "functional",
    "list_datasets",
    "list_models",
    "list_probes",
    "list_recipes",
    "list_studies",
    "list_tasks",
    "list_treatments",
    "load_model",
    "models",
    "open_data",
    "open_study",
    "plan_run",
    "prescribe",
    "probes",
    "report",
    "report_studies",
    "resume",
    "study",
    "tasks",
    "train",
    "treat",
    "treatments",
]

make_lazy(__name__)
