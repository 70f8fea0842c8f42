"""Reports: measurements -> figures -> one self-contained page. They compute nothing, and know measurements only."""

from vitclinic.reports.figure import ExamView, Figure, Picture, Table, draws, escape_plotly, select_usable
from vitclinic.reports.page import write_report

__all__ = ["ExamView", "Figure", "Picture", "Table", "draws", "escape_plotly", "select_usable", "write_report"]
