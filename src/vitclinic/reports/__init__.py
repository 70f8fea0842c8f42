"""Reports: measurements -> figures -> one self-contained page. They compute nothing, and know measurements only."""

from vitclinic.reports.figure import Examined, Figure, Picture, Table, draws, measured
from vitclinic.reports.formatting import plain
from vitclinic.reports.page import write_report

__all__ = ["Examined", "Figure", "Picture", "Table", "draws", "measured", "plain", "write_report"]
