"""What the findings of a run's exam suggest to try."""

from __future__ import annotations

from pathlib import Path

from vitclinic.clinic.findings import find
from vitclinic.clinic.reporting import stored_exam
from vitclinic.errors import RunError
from vitclinic.training import Run
from vitclinic.treatments import known_treatments


def suggested_treatments(path: str | Path) -> list[str]:
    """The treatments that the findings of a run's stored exam name, those of problems first, each once.

    Suggestions that change the recipe in another way, such as its augmentation, are not treatments and not among them.
    """
    run = Run.open(path)
    measurements = stored_exam(run)
    if not measurements:
        raise RunError(f"'{path}' has not been examined; `vitclinic examine {path}` does it.")
    suggestions = (suggestion for finding in find(measurements, run.metrics) for suggestion in finding.suggestions)
    names = dict.fromkeys(suggestion.treatment for suggestion in suggestions)
    return [name for name in names if name in known_treatments()]
