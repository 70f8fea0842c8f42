"""Selection of probes: those that are known, those by default, and those that a list names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitclinic._core.errors import RecipeError
from vitclinic.probes.probe import PROBES, Probe


def known_probes() -> dict[str, type[Probe]]:
    """Return all probe classes by name: built-in, registered in this process, and from installed packages.

    Example:
        >>> known_probes()["norms"].title
        'Norms'
    """
    return PROBES.all()


def default_probes() -> list[str]:
    """Return the names of the probes that run if none is named: those that take seconds.

    Example:
        >>> "accuracy" in default_probes()
        True
    """
    return [name for name, probe in known_probes().items() if probe.by_default]


def parse_probes(entries: Sequence[Any] | None) -> list[Probe]:
    """Turn `["norms", {"cost": {"repeats": 20}}]` into probes, in order.

    Args:
        entries: Names, `{name: {option: value}}` or probes; None means the default ones.

    Raises:
        RecipeError: If the list is empty, or a name or an option is not known.

    Example:
        >>> [probe.name for probe in parse_probes(["norms", {"cost": {"repeats": 20}}])]
        ['norms', 'cost']
    """
    entries = default_probes() if entries is None else entries
    if not entries:
        raise RecipeError("'probes' is empty. Name some probes (see `vitclinic list probes`), or leave it out.")
    return PROBES.parse(entries)
