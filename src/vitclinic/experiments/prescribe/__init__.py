"""Prescribing: which treatments help on the user's own data, with evidence."""

from typing import TYPE_CHECKING

from vitclinic._core.lazy import make_lazy

if TYPE_CHECKING:
    from vitclinic.experiments.prescribe.callback import Watcher
    from vitclinic.experiments.prescribe.prescribe import prescribe
    from vitclinic.experiments.prescribe.prescription import Prescription

__all__ = ["Prescription", "Watcher", "prescribe"]

make_lazy(__name__)
