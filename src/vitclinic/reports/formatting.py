"""Numbers and names as text: formatted for the page, and escaped for plotly, whose labels are a kind of HTML.

The page's templates escape for themselves; plotly's texts (legends, axis labels, hover boxes, annotations) go through
`escape_plotly`. Tables, captions and titles stay as the user wrote them.
"""

from __future__ import annotations

import math
import re
from typing import Any

from vitclinic._core.records import Scalar

_MEANT_BY_PLOTLY = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;", "%": "&#37;"}
"""Entities and tags; formulas between dollars; `%{...}` in hover templates."""


def escape_plotly(text: object) -> str:
    """Return a text in one line that plotly shows as it is, also inside a hover template.

    Example:
        >>> escape_plotly("<b>%{x}</b> & more")
        '&lt;b&gt;&#37;{x}&lt;/b&gt; &amp; more'
    """
    line = " ".join(str(text).encode("utf-8", "replace").decode().split())
    visible = "".join(character for character in line if character == " " or character.isprintable())
    return re.sub("[&<>$%]", lambda found: _MEANT_BY_PLOTLY[found[0]], visible)


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def format_number(value: float) -> str:
    """Return a number with four digits, a count in full.

    Example:
        >>> [format_number(value) for value in (0.123456, 5717416.0, 3.2e9, math.nan, -4e-05)]
        ['0.1235', '5,717,416', '3.2 × 10⁹', 'not a number', '-4 × 10⁻⁵']
    """
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value.is_integer() and abs(value) < 1e9:
        return f"{value:,.0f}"
    digits, _, exponent = f"{value:.4g}".partition("e")
    return f"{digits} × 10{str(int(exponent)).translate(_RAISED)}" if exponent else digits


def format_interval(scalar: Scalar) -> str:
    """Return a scalar's interval, or an empty text.

    Example:
        >>> format_interval(Scalar(value=0.5, low=0.44, high=0.56)), format_interval(Scalar(value=0.5))
        ('0.44 to 0.56', '')
    """
    return (
        ""
        if scalar.low is None or scalar.high is None
        else f"{format_number(scalar.low)} to {format_number(scalar.high)}"
    )


def format_setting(value: Any) -> str:
    """Return an option's value in one line.

    Example:
        >>> format_setting(True), format_setting(None), format_setting([1, 2]), format_setting(0.05)
        ('yes', 'none', '1, 2', '0.05')
    """
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, list):
        return ", ".join(map(format_setting, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {format_setting(item)}" for key, item in value.items())
    return str(value)
