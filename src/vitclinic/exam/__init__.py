"""Exams: where networks, data and probes meet."""

from vitclinic.exam.exam import Exam, Exams
from vitclinic.exam.examine import Examination, examine

__all__ = ["Exam", "Examination", "Exams", "examine"]
