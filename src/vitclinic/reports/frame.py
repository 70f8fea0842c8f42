"""The frame that all pages share: templates, style, script, policy; and the figures that a page carries.

A plot is compressed JSON, its numbers are CSV, pictures are PNG.
"""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import io
import json
import logging
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from vitclinic._core.io import PAGE_ENDINGS, require_ending, write_bytes, write_errors
from vitclinic.reports.figure import ExamView, Figure, Picture, Table, template

if TYPE_CHECKING:
    import plotly.graph_objects as go

log = logging.getLogger(__name__)

DEFAULT_HEIGHT = 420


def compress(text: str) -> str:
    """Return a text as base64 of gzip, the same whenever it is made."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 9, mtime=0)).decode("ascii")


@cache
def compress_plotly() -> str:
    """Return the script of the installed plotly package, compressed."""
    return compress(read_plotly())


def checksum(script: str) -> str:
    """Return the checksum by which a content security policy recognizes a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode('ascii')}"


@cache
def plotly_checksum() -> str:
    """Return the checksum of plotly's script."""
    return checksum(read_plotly())


def read_plotly() -> str:
    """Return the script of the installed plotly package."""
    from plotly.offline import get_plotlyjs  # it takes a while, and only a page needs it

    script: str = get_plotlyjs()
    return script


def serialize_plot(plot: go.Figure, images: bool = True) -> str:
    """Return a plot as JSON without its template, since the page has themes of its own; perhaps without images."""
    figure: dict[str, Any] = json.loads(plot.to_json(validate=False))
    layout = figure.get("layout", {})
    layout.pop("template", None)
    if not images:
        layout.pop("images", None)
        figure["data"] = [trace for trace in figure.get("data", []) if trace.get("type") != "image"]
    return json.dumps({"data": figure.get("data", []), "layout": layout}, separators=(",", ":"))


def format_csv(table: Table) -> str:
    """Return a figure's numbers as CSV (RFC 4180), with empty cells where there is none.

    A text that a spreadsheet would take for a formula gets an apostrophe in front, which such programs hide.

    Example:
        >>> format_csv(Table(("class", "accuracy"), [("=1+1", 0.5), ("cat", None)])).split("\\r\\n")
        ['class,accuracy', "'=1+1,0.5", 'cat,', '']
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    for row in (table.columns, *table.rows):
        writer.writerow([_cell(value) for value in row])
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


@dataclass
class Drawings:
    """The figures of one page, with what the page carries of them by name."""

    images: bool
    packed: dict[str, str] = field(default_factory=dict)
    left_out: int = 0
    """How many pictures are not in the page, because nobody wants them there."""
    _names: set[str] = field(default_factory=set)

    def of(self, probe: str, exams: Sequence[ExamView]) -> list[dict[str, Any]]:
        """Return the views of a probe's figures; where one cannot be drawn, of every value by depth, with a message."""
        from vitclinic.reports.figures import draw, draw_by_depth  # which makes all figures known, with plotly

        for attempt in (draw, draw_by_depth):
            try:
                return [self.view(figure) for figure in attempt(probe, exams)]
            except Exception as error:  # a measurement of another version may lack what its figure shows
                log.info("%s cannot be drawn", probe, exc_info=error)
                log.warning("The figures of %s cannot be drawn: %s: %s", probe, type(error).__name__, error)
        return []

    def view(self, figure: Figure) -> dict[str, Any]:
        """Return what the templates show of a figure, and carry it in the page."""
        name = self._own(figure.name)
        if figure.plot is not None:
            self.packed[f"plot-{name}"] = compress(serialize_plot(figure.plot, self.images))
        self.packed[f"csv-{name}"] = compress(format_csv(figure.table))
        pictures = figure.pictures if self.images else ()
        album = figure.album if figure.album is None or self.images else figure.album.without_images()
        if album is not None and album.thumbnails:
            self.packed[f"album-{name}"] = compress(album.pack())
        missing = len(figure.pictures) - len(pictures)
        if figure.album is not None and album is not None:
            missing += len(figure.album.thumbnails) - len(album.thumbnails)
        self.left_out += missing
        return {
            "name": name,
            "title": figure.title,
            "reading": figure.reading,
            "paper": figure.paper,
            "heavy": figure.heavy,
            "plotted": figure.plot is not None,
            "peeks": figure.plot is not None and album is not None and bool(album.thumbnails),
            "height": DEFAULT_HEIGHT if figure.plot is None else int(figure.plot.layout.height or DEFAULT_HEIGHT),
            "rows": len(figure.table.rows),
            "pictures": [_picture(picture) for picture in pictures],
            "album": None if album is None else album.view(),
            "notes": list(figure.notes),
            "left_out": _left_out(missing),
        }

    def _own(self, wanted: str) -> str:
        """Return a name of letters, digits and hyphens that no other figure of the page has."""
        base = re.sub(r"[^A-Za-z0-9]+", "-", wanted).strip("-") or "figure"
        candidates = (base if number == 1 else f"{base}-{number}" for number in range(1, len(self._names) + 2))
        name = next(candidate for candidate in candidates if candidate not in self._names)
        self._names.add(name)
        return name


def _picture(picture: Picture) -> dict[str, Any]:
    width, height = struct.unpack(">II", picture.png[16:24])  # where a PNG file says it
    return {
        "caption": picture.caption,
        "data": base64.b64encode(picture.png).decode("ascii"),
        "width": width,
        "height": height,
        "shape": round(width / height, 3),
    }


def _left_out(count: int) -> str:
    return f"{count} picture{'s' * (count != 1)} left out, as asked for." if count else ""


def fill_template(name: str, drawings: Drawings, **contents: Any) -> str:
    """Return the page that a template makes of its contents, with the figures in it."""
    page = _environment().get_template(name)
    return page.render(**contents, **_programs(), version=version("vitclinic"), packed=_embed(drawings))


def fill_shell(name: str, **contents: Any) -> str:
    """Return a page that carries no figures, as a template makes it of its contents."""
    return _environment().get_template(name).render(**contents, version=version("vitclinic"))


def write_page(path: str | Path, page: str) -> Path:
    """Write a page whole or not at all, and make its folder."""
    path = Path(path)
    require_ending(path, "A report is a page", *PAGE_ENDINGS)
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, page.encode("utf-8", "replace"))
    return path


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("vitclinic.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    return environment


def breakable(name: str) -> Markup:
    """Return a name that may break after an underscore or a dot, as a narrow screen needs.

    Example:
        >>> breakable("nep_<b>")
        Markup('nep_<wbr>&lt;b&gt;')
    """
    return Markup(re.sub("([_.])", r"\1<wbr>", str(escape(name))))


@cache
def _programs() -> dict[str, Markup]:
    """Return our own style and script, and the policy by which the browser runs nothing else."""
    style, script = _read("style.css"), _read("page.js")
    policy = (
        f"default-src 'none'; script-src '{checksum(script)}' '{plotly_checksum()}' 'unsafe-eval';"
        " style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return {
        "style": Markup(style),
        "script": Markup(script),
        "themes": _themes(),
        "policy": Markup(policy),
    }


def _embed(drawings: Drawings) -> dict[str, Markup]:
    """Return what the page carries as base64, with plotly's script where there is something to draw."""
    program = {"plotly": compress_plotly()} if any(name.startswith("plot-") for name in drawings.packed) else {}
    return {name: Markup(content) for name, content in {**program, **drawings.packed}.items()}


WATCH_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-eval'; style-src 'unsafe-inline'; img-src 'self' data: blob:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the browser may load for the live page: nothing but from its own server. plotly makes functions, hence
`unsafe-eval`."""


def render_watch_page(folder: str) -> str:
    """Return the live page of the runs in a folder, whose name is escaped: a shell that asks its server."""
    styles = Markup("\n".join(_read(name) for name in ("style.css", "watch.css")))
    return fill_shell("watch.html", folder=folder, style=styles, themes=_themes())


@cache
def read_script(name: str) -> str:
    """Return a script of the live page: `watch.js`, or `plotly.js` of the installed package."""
    return read_plotly() if name == "plotly.js" else _read(name)


def _themes() -> Markup:
    """Return both themes of plots as JSON that can stand in a script."""
    themes = json.dumps({name: template(name == "dark") for name in ("light", "dark")})
    return Markup(themes.replace("<", "\\u003c"))


@cache
def _read(name: str) -> str:
    return (files("vitclinic.reports") / "templates" / name).read_text(encoding="utf-8")
