"""Which probes there are, and probes from what a user wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from vitclinic.config import validate
from vitclinic.errors import RecipeError, did_you_mean
from vitclinic.plugins import load_entry_points
from vitclinic.probes.probe import OwningProbe, Probe, StreamingProbe

ENTRY_POINTS = "vitclinic.probes"

_REGISTRY: dict[str, type[Probe]] = {}

P = TypeVar("P", bound=type[Probe])


def register(probe: P) -> P:
    """Class decorator: make a probe known by its `name`."""
    if not isinstance(probe, type) or not issubclass(probe, OwningProbe | StreamingProbe):
        raise TypeError(f"{getattr(probe, '__name__', repr(probe))} is neither an OwningProbe nor a StreamingProbe")
    _REGISTRY[probe.name] = probe
    return probe


def known_probes() -> dict[str, type[Probe]]:
    """All probes by name: ours, those registered in this process, and those of installed packages."""
    load_entry_points(ENTRY_POINTS, register)
    return dict(sorted(_REGISTRY.items()))


def usual_probes() -> list[str]:
    """The names of the probes that are meant where none is named: those that take seconds."""
    return [name for name, probe in known_probes().items() if probe.by_default]


def parse_probes(entries: Sequence[Any] | None) -> list[Probe]:
    """`["norms", {"cost": {"repeats": 20}}]` as probes, in order; None means the usual ones."""
    if entries is None:
        entries = usual_probes()
    if not entries:
        raise RecipeError("'probes' is empty; name some of `vitclinic list probes`, or leave it out.")
    probes = [_parse(entry) for entry in entries]
    names = [probe.name for probe in probes]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"'probes': '{name}' is listed twice.")
    return probes


def _parse(entry: Any) -> Probe:
    if isinstance(entry, Probe):
        return entry
    if isinstance(entry, str):
        entry = {entry: {}}
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise RecipeError(f"'probes': write a name or {{name: {{option: value}}}} (got {entry!r}).")
    ((name, options),) = entry.items()
    known = known_probes()
    if name not in known:
        hint = did_you_mean(str(name), known) or f" There are {', '.join(known)}."
        raise RecipeError(f"There is no probe '{name}'.{hint}")
    if options and not known[name].model_fields:
        raise RecipeError(f"The probe '{name}' has no options (got {', '.join(map(repr, options))}).")
    return validate(known[name], options or {}, where=f"probes.{name}")
