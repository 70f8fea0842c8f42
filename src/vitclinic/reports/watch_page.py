"""The live page of some runs: a shell that asks its server for what it shows."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from markupsafe import Markup

from vitclinic.reports.figure import template
from vitclinic.reports.frame import fill_shell, read_plotly

POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-eval'; style-src 'unsafe-inline'; img-src 'self' data: blob:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the browser may load: nothing but from the page's own server. plotly makes functions, hence `unsafe-eval`."""


def render_watch_page(folder: str) -> str:
    """Return the page for the runs in a folder, whose name is escaped."""
    styles = Markup("\n".join(_read(name) for name in ("style.css", "watch.css")))
    themes = Markup(json.dumps({name: template(name == "dark") for name in ("light", "dark")}).replace("<", "\\u003c"))
    return fill_shell("watch.html", folder=folder, style=styles, themes=themes)


@cache
def read_script(name: str) -> str:
    """Return a script of the page: `watch.js`, or `plotly.js` of the installed package."""
    return read_plotly() if name == "plotly.js" else _read(name)


@cache
def _read(name: str) -> str:
    return (files("vitclinic.reports") / "templates" / name).read_text(encoding="utf-8")
