"""The clinic: where networks, data and probes meet."""

from vitclinic.clinic.examine import Exam, Examination, Watcher, examine
from vitclinic.clinic.targets import Target, resolve

__all__ = ["Exam", "Examination", "Target", "Watcher", "examine", "resolve"]
