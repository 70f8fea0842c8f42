"""Names of a probe's numbers, read from its source, so that a typo is reported before hours of training.

A scalar or a value of units is named by a text in the code, by a text with parts that are filled in (`f"drop_{band}"`),
or by a keyword (`unit_row(unit, entropy=...)`). Texts are taken from the modules of the class and its bases, and from
the modules of ours that these import, so that every name that a probe gives is found, and most others are not.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType

from vitclinic._core.errors import did_you_mean
from vitclinic.probes.probe import Probe

_NAME = re.compile(r"[\w.,-]+")
_ANYTHING = r"[\w.,-]+"


def find_typo(probe: type[Probe], name: str) -> str | None:
    """Return a sentence if the probe never gives a number this name, else None.

    Args:
        probe: The class of the probe.
        name: The name of a scalar, or of a value of units.

    Example:
        >>> from vitclinic.probes import MissingRate
        >>> find_typo(MissingRate, "missing_rate") is None
        True
        >>> find_typo(MissingRate, "mising_rate")
        "missing_rate has no number 'mising_rate'. Did you mean 'missing_rate'?"
    """
    words, patterns = _stated_names(probe)
    if not words or name in words or any(pattern.fullmatch(name) for pattern in patterns):
        return None
    declared = [*probe.key_scalars, *(value for figure in probe.figures for value in figure.values)]
    known = f" It has {', '.join(dict.fromkeys(declared))}." if declared else ""
    hint = did_you_mean(name, declared) or did_you_mean(name, words) or known
    return f"{probe.name} has no number '{name}'.{hint}"


@cache
def _stated_names(probe: type[Probe]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Return the names in the source of a probe, and the patterns of those with parts that are filled in."""
    words: set[str] = set()
    patterns: set[str] = set()
    for module in _modules(probe):
        try:
            tree = ast.parse(inspect.getsource(module))
        except (OSError, SyntaxError, TypeError):  # defined in a session, or shipped without its source
            return frozenset(), ()
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value):
                words.add(node.value)
            elif isinstance(node, ast.keyword) and node.arg is not None:
                words.add(node.arg)
            elif isinstance(node, ast.JoinedStr):
                patterns.add(_pattern(node))
    return frozenset(words), tuple(re.compile(pattern) for pattern in patterns)


def _pattern(text: ast.JoinedStr) -> str:
    parts = [re.escape(str(part.value)) if isinstance(part, ast.Constant) else _ANYTHING for part in text.values]
    return "".join(parts)


def _modules(probe: type[Probe]) -> Iterator[ModuleType]:
    """Yield the modules of a probe's class and bases, then those of all probes that these take functions from."""
    own = [sys.modules[cls.__module__] for cls in probe.__mro__ if issubclass(cls, Probe) and cls is not Probe]
    homes = {getattr(value, "__module__", None) for module in own for value in vars(module).values()}
    shared = [home for home in homes if isinstance(home, str) and home.startswith("vitclinic.probes.")]
    yield from {module.__name__: module for module in [*own, *(sys.modules[home] for home in sorted(shared))]}.values()
