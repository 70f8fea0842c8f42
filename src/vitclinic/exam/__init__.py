"""Exams: where networks, data and probes meet."""

from vitclinic.exam.exam import Exam, Exams
from vitclinic.exam.examine import Examination, examine
from vitclinic.exam.findings import Evidence, Verdict, find, known_rules, rule

__all__ = ["Evidence", "Exam", "Examination", "Exams", "Verdict", "examine", "find", "known_rules", "rule"]
