"""The clinic: where networks, data and probes meet."""

from vitclinic.exam.exam import Exam, Exams
from vitclinic.exam.examine import Examination, examine
from vitclinic.exam.schedule import Watcher
from vitclinic.exam.targets import Target, resolve

__all__ = ["Exam", "Examination", "Exams", "Target", "Watcher", "examine", "resolve"]
