"""Reports: measurements -> figures -> one self-contained page. They compute nothing, and know measurements only."""

from typing import TYPE_CHECKING

from vitclinic._core import make_lazy

if TYPE_CHECKING:
    from vitclinic.reports.figure import ExamView, Figure, Picture, Table, draws, escape_plotly, select_usable
    from vitclinic.reports.page import write_report

__all__ = ["ExamView", "Figure", "Picture", "Table", "draws", "escape_plotly", "select_usable", "write_report"]

make_lazy(__name__)
