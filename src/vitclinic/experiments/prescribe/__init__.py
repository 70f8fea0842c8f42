"""Prescribing: which treatments help on the user's own data, with evidence."""

from vitclinic.experiments.prescribe.callback import Watcher
from vitclinic.experiments.prescribe.prescribe import prescribe
from vitclinic.experiments.prescribe.prescription import Prescription

__all__ = ["Prescription", "Watcher", "prescribe"]
