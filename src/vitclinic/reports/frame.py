"""Templates, style, script and content security policy that all pages share."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from vitclinic._core.io import write_bytes, write_errors
from vitclinic.reports.embedding import Drawings, checksum, compress_plotly, plotly_checksum
from vitclinic.reports.theme import template


def fill_template(name: str, drawings: Drawings, **contents: Any) -> str:
    """Return the page that a template makes of its contents, with the figures in it."""
    page = _environment().get_template(name)
    return page.render(**contents, **_programs(), version=version("vitclinic"), packed=_embed(drawings))


def write_page(path: str | Path, page: str) -> Path:
    """Write a page whole or not at all, and make its folder."""
    path = Path(path)
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
    folder = files("vitclinic.reports") / "templates"
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("style.css", "page.js"))
    themes = json.dumps({name: template(name == "dark") for name in ("light", "dark")})
    policy = (
        f"default-src 'none'; script-src '{checksum(script)}' '{plotly_checksum()}' 'unsafe-eval';"
        " style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return {
        "style": Markup(style),
        "script": Markup(script),
        "themes": Markup(themes.replace("<", "\\u003c")),
        "policy": Markup(policy),
    }


def _embed(drawings: Drawings) -> dict[str, Markup]:
    """Return what the page carries as base64, with plotly's script where there is something to draw."""
    program = {"plotly": compress_plotly()} if any(name.startswith("plot-") for name in drawings.packed) else {}
    return {name: Markup(content) for name, content in {**program, **drawings.packed}.items()}
