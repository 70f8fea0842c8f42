"""The clinic: where networks, data and probes meet."""

from vitclinic.clinic.exam import Exam, Exams
from vitclinic.clinic.examine import Examination, examine
from vitclinic.clinic.targets import Target, resolve
from vitclinic.clinic.watching import Watcher

__all__ = ["Exam", "Examination", "Exams", "Target", "Watcher", "examine", "resolve"]
