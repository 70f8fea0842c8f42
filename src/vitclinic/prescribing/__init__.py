"""Prescribing: which treatments help on the user's own data, with evidence."""

from vitclinic.prescribing.prescribe import prescribe
from vitclinic.prescribing.prescription import Prescription
from vitclinic.prescribing.watching import Watcher

__all__ = ["Prescription", "Watcher", "prescribe"]
