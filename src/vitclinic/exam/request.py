"""Requests for exams, checked without torch: targets, probes, time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitclinic._core.errors import RecipeError, did_you_mean
from vitclinic._core.io import expand_path, refuse_to_replace, require_ending
from vitclinic._core.sources import LIBRARIES, check_model_name, read_model_names
from vitclinic._core.time import parse_budget
from vitclinic.probes.probe import PROBES
from vitclinic.probes.selection import default_probes, known_probes, parse_probes
from vitclinic.training.run import find_run, suggest_run

if TYPE_CHECKING:
    from vitclinic.probes import Probe

BUDGET = "5m"
"""Unless the user gives one: what an exam of all targets together may take."""

SPLITS = ("train", "val", "test")


def check_target(text: str) -> None:
    """Raise a RecipeError, with advice, where a text cannot be a target."""
    library, colon, rest = text.partition(":")
    if find_run(text) is None and library not in LIBRARIES and not (colon and library and rest):
        raise RecipeError(f"'{text}' is not a target: {advise(text)}")
    name = rest.partition("@")[0].partition("?")[0]
    if library == "timm" and name:
        check_model_name(name)


def check_stored(text: str) -> None:
    """Raise a RecipeError where a text names neither a run nor a folder with measurements."""
    if find_run(text) is None and not any(expand_path(text, RecipeError).glob("*.json")):
        raise nothing_stored(text)


def nothing_stored(text: str) -> RecipeError:
    """Return the error for a text that names neither a run nor a folder with measurements."""
    return RecipeError(
        f"'{text}' is neither a run directory nor a folder with measurements; write RUN, RUN@CHECKPOINT or, of"
        " another network that was examined, exams/NAME-DIGEST."
    )


def advise(text: str) -> str:
    """Return what to write instead of a text that is not a target."""
    if text.partition(".")[0] in read_model_names():
        return f"write timm:{text}."
    if Path(text).suffix == ".py":
        return f"write {Path(text).stem}:FUNCTION, a function in it that returns a network."
    if Path(text).exists():
        return "it has no recipe.yaml, so it is not a run directory; for a file of weights write timm:NAME@FILE."
    if run := suggest_run(text):
        return f"there is no such run.{run}"
    prefix, colon, rest = text.partition(":")
    close = did_you_mean(prefix, LIBRARIES).replace("'?", f":{rest}'?") if colon else ""
    return f"write a run directory, timm:NAME[@FILE], torchvision:NAME[@FILE], hf:NAME or module:function.{close}"


def check_request(
    probes: Sequence[Any] | None,
    budget: str | float | None,
    quick: bool,
    full: bool,
    settings: Mapping[str, Mapping[str, Any]],
) -> None:
    """Raise a RecipeError for names, options or a budget that are wrong or contradict each other.

    No probe is imported; `parse_request` has the same arguments.
    """
    if sum((probes is not None, quick, full)) > 1:
        raise RecipeError("Give only one of probes, quick and full.")
    if budget is not None and (quick or full):
        raise RecipeError(f"A budget cannot be combined with {'quick' if quick else 'full'}.")
    if budget is not None:
        parse_budget(budget)
    for name in probes or ():
        if isinstance(name, str):
            PROBES.check(name)
    for name, options in settings.items():
        PROBES.check(name, options)
    if probes is not None and all(isinstance(name, str) for name in probes):
        _check_settings(settings, probes)


def _check_settings(settings: Iterable[str], probes: Sequence[str]) -> None:
    """Raise a RecipeError if options are set of a probe that is not among `probes`."""
    for name in settings:
        if name not in probes:
            hint = did_you_mean(name, probes) or f" The probes are {', '.join(probes)}."
            raise RecipeError(f"'{name}' is not among the probes, so its options cannot be set.{hint}")


def check_split(split: str) -> None:
    """Raise a RecipeError for a split that no data has."""
    if split not in SPLITS:
        raise RecipeError(f"There is no split '{split}': choose {', '.join(SPLITS[:-1])} or {SPLITS[-1]}.")


def check_count(name: str, count: Any) -> None:
    """Raise a RecipeError for a number of images or pixels that is none."""
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, Integral):
        raise RecipeError(f"'{name}' must be a whole number (got {count!r}).")
    if int(count) < 1:
        raise RecipeError(f"'{name}' must be at least 1 (got {count}).")


def check_features_file(path: str) -> None:
    """Raise a RecipeError unless embeddings can be written to a file of that name."""
    require_ending(path, "Embeddings are written as parquet", ".parquet")
    refuse_to_replace(Path(path))


def parse_request(
    probes: Sequence[Any] | None,
    budget: str | float | None,
    quick: bool,
    full: bool,
    settings: Mapping[str, Mapping[str, Any]],
) -> tuple[list[Probe], float | None]:
    """Return the probes that may be measured, and within how many seconds (None: however long it takes).

    `settings` are options of some of these probes; a probe whose options the user sets comes first.
    """
    check_request(probes, budget, quick, full, settings)
    if probes is None:
        names = default_probes() if quick else [name for name, probe in known_probes().items() if not probe.asked_for]
        probes = sorted(names, key=lambda name: (name not in settings, known_probes()[name].rank))
        budget = budget if budget is not None or quick or full else BUDGET
    chosen = parse_probes(probes)
    _check_settings(settings, [probe.name for probe in chosen])
    entries = [
        {probe.name: {**given_options(probe), **settings[probe.name]}} if probe.name in settings else probe
        for probe in chosen
    ]
    return parse_probes(entries), None if budget is None else parse_budget(budget)


def given_options(probe: Probe) -> dict[str, Any]:
    """Return the options that were given explicitly; none of them is changed to save time."""
    return {name: getattr(probe, name) for name in sorted(probe.model_fields_set)}
