"""Exams: where networks, data and probes meet."""

from typing import TYPE_CHECKING

from vitclinic._core import make_lazy

if TYPE_CHECKING:
    from vitclinic.exam.exam import Exam, Exams
    from vitclinic.exam.examination import Examination
    from vitclinic.exam.examine import examine
    from vitclinic.exam.findings import find
    from vitclinic.exam.findings.rule import Evidence, Verdict, known_rules, rule

__all__ = ["Evidence", "Exam", "Examination", "Exams", "Verdict", "examine", "find", "known_rules", "rule"]

make_lazy(__name__)
