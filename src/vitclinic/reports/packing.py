"""What a page carries besides its text: numbers as CSV, figures as JSON, plotly's program; each compressed.

The browser unpacks what it needs (`DecompressionStream`). Base64 of gzip holds nothing that HTML could misread.
"""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import io
import json
from functools import cache
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from vitclinic.reports.figure import Table


def packed(text: str) -> str:
    """`text` as base64 of gzip: the same for the same text, whenever it is made."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 9, mtime=0)).decode("ascii")


@cache
def packed_plotly() -> str:
    """The program that draws, as the installed plotly package has it."""
    return packed(get_plotlyjs())


def checksum(script: str) -> str:
    """By which a content security policy knows a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode('ascii')}"


@cache
def plotly_checksum() -> str:
    return checksum(get_plotlyjs())


def plot_json(plot: go.Figure, images: bool = True) -> str:
    """What plotly draws, without its colours for the page, which are the page's theme; perhaps without images."""
    figure: dict[str, Any] = json.loads(plot.to_json(validate=False))
    layout = figure.get("layout", {})
    layout.pop("template", None)
    if not images:
        layout.pop("images", None)
        figure["data"] = [trace for trace in figure.get("data", []) if trace.get("type") != "image"]
    return json.dumps({"data": figure.get("data", []), "layout": layout}, separators=(",", ":"))


def as_csv(table: Table) -> str:
    """A figure's numbers, as RFC 4180 has it; empty where there is none.

    A text that a spreadsheet would take for a formula gets an apostrophe in front, which such programs hide.

    Example:
        >>> as_csv(Table(("class", "accuracy"), [("=1+1", 0.5), ("cat", None)])).split("\\r\\n")
        ['class,accuracy', "'=1+1,0.5", 'cat,', '']
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    for row in (table.columns, *table.rows):
        writer.writerow([_cell(value) for value in row])
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
