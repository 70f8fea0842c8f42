"""Numbers as a page writes them."""

from __future__ import annotations

import math
from typing import Any

from vitclinic.measurement import Scalar

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float) -> str:
    """Four digits; a count in full.

    Example:
        >>> number(0.123456), number(5717416.0), number(3.2e9), number(math.nan), number(-4e-05)
        ('0.1235', '5,717,416', '3.2 × 10⁹', 'not a number', '-4 × 10⁻⁵')
    """
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value.is_integer() and abs(value) < 1e9:
        return f"{value:,.0f}"
    digits, _, exponent = f"{value:.4g}".partition("e")
    return f"{digits} × 10{str(int(exponent)).translate(_RAISED)}" if exponent else digits


def interval(scalar: Scalar) -> str:
    """Its interval, or nothing.

    Example:
        >>> interval(Scalar(value=0.5, low=0.44, high=0.56)), interval(Scalar(value=0.5))
        ('0.44 to 0.56', '')
    """
    return "" if scalar.low is None or scalar.high is None else f"{number(scalar.low)} to {number(scalar.high)}"


def seconds(duration: float) -> str:
    """A time that something took.

    Example:
        >>> seconds(0.032), seconds(5.0432), seconds(312.0), seconds(9000.0)
        ('0.03 s', '5.0 s', '5.2 min', '2.5 h')
    """
    if duration < 120:
        return f"{duration:.2f} s" if duration < 1 else f"{duration:.1f} s"
    return f"{duration / 60:.1f} min" if duration < 7200 else f"{duration / 3600:.1f} h"


def setting(value: Any) -> str:
    """An option's value in one line.

    Example:
        >>> setting(True), setting(None), setting([1, 2]), setting(0.05)
        ('yes', 'none', '1, 2', '0.05')
    """
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, list):
        return ", ".join(map(setting, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {setting(item)}" for key, item in value.items())
    return str(value)
