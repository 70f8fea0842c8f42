"""Gates: conditions on measurements under which an exam fails, so that a network can be tested as code is.

A gate is `PROBE.SCALAR<NUMBER` (or `<=`, `>`, `>=`), and fails where that is so of the measured value, or where there
is none. With a baseline, a network also fails if it is right on significantly fewer of the same images [McNemar 1947]:

    p = P(X >= lost),  X ~ Binomial(lost + gained, 1/2)

with `lost` the images that only the baseline has right, and `gained` those that only the network has right.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from vitclinic._core.errors import RecipeError, did_you_mean
from vitclinic._core.io import write_bytes, write_errors
from vitclinic.probes.probe import PROBES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vitclinic._core.records import Measurement
    from vitclinic.probes import Subject

SIGNIFICANT = 0.05
_SHOWN = 12
"""Metrics that are named where a gate has another."""
_OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass(frozen=True)
class Gate:
    """A condition on a measured number under which an exam fails.

    Example:
        >>> Gate.parse("accuracy.accuracy<0.9")
        Gate(probe='accuracy', scalar='accuracy', operator='<', number=0.9)
    """

    probe: str
    scalar: str
    operator: str
    number: float

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Parse `PROBE.SCALAR<NUMBER`.

        Raises:
            RecipeError: The text is no condition, or there is no such probe.
        """
        found = re.fullmatch(r"\s*(\w+)\.([^<>=]+?)\s*(<=|>=|<|>)\s*([-+0-9.eE]+)\s*", text)
        try:
            number = float(found[4]) if found else None
        except ValueError:
            number = None
        if found is None or number is None or not math.isfinite(number):  # 1e999 is none that can be missed
            raise RecipeError(f"'{text}' is not a condition; write PROBE.SCALAR<NUMBER, such as accuracy.accuracy<0.9.")
        PROBES.check(found[1])
        return cls(found[1], found[2], found[3], number)

    def __str__(self) -> str:
        return f"{self.probe}.{self.scalar}{self.operator}{self.number:g}"

    def check(self, name: str, measurements: Mapping[str, Measurement]) -> GateResult:
        """Return whether a network passes.

        Args:
            name: The network's name.
            measurements: What was measured of it, by probe.
        """
        measured = measurements.get(self.probe)
        scalar = None if measured is None else measured.scalars.get(self.scalar)
        if typo := self.find_typo(measurements):
            return GateResult(name, str(self), False, typo)
        if scalar is None:
            why = "it was not measured" if measured is None else measured.reason or "it has no metrics"
            return GateResult(name, str(self), False, f"{self.probe}.{self.scalar} is unknown: {why.rstrip('.')}.")
        if math.isnan(scalar.value):  # no comparison with it holds
            return GateResult(
                name, str(self), False, f"{self.probe}.{self.scalar}: what was measured is not a number (NaN)."
            )
        failed = bool(_OPERATORS[self.operator](scalar.value, self.number))
        interval = "" if scalar.low is None else f", 95% interval {scalar.low:.4g} to {scalar.high:.4g}"
        return GateResult(name, str(self), not failed, f"measured {scalar.value:.4g}{interval}.")

    def find_typo(self, measurements: Mapping[str, Measurement]) -> str | None:
        """Return what is wrong if the probe was measured and has other metrics than the one that is named."""
        measured = measurements.get(self.probe)
        if measured is None or not measured.scalars or self.scalar in measured.scalars:
            return None
        known = list(measured.scalars)
        shown = ", ".join(known[:_SHOWN]) + (f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else "")
        return f"{self.probe} has no metric '{self.scalar}'; available: {shown}.{did_you_mean(self.scalar, known)}"


@dataclass(frozen=True)
class GateResult:
    """The outcome of a gate for a network, and the number behind it."""

    network: str
    gate: str
    passed: bool
    statement: str


def mcnemar(lost: int, gained: int) -> float:
    """Return the one-sided p value of McNemar's exact test: that a network got no worse.

    Example:
        >>> mcnemar(5, 0), mcnemar(0, 0)
        (0.03125, 1.0)
    """
    from scipy.stats import binom  # takes a while, and only this needs it

    return float(binom.sf(lost - 1, lost + gained, 0.5)) if lost else 1.0


def find_correct(subject: Subject) -> NDArray[np.bool_]:
    """Return which images of a subject its network classifies correctly, in their order."""
    import numpy as np

    from vitclinic.probes.behaviour.predictions import is_correct

    correct = np.zeros(len(subject), np.bool_)
    for batch in subject.batches():
        correct[batch.indices.numpy()] = is_correct(subject, batch.images, batch.targets)
    return correct


def compare(subject: Subject, baseline: Subject) -> GateResult:
    """Return whether a network is right on no significantly fewer of the same images than the baseline.

    Args:
        subject: The network.
        baseline: The other network, on the same images.

    Raises:
        RecipeError: The two have not the same images.
    """
    from vitclinic._core.statistics import paired_share_interval

    if subject.data_digest != baseline.data_digest:
        raise RecipeError(
            f"'{subject.name}' and '{baseline.name}' are measured on different images, so they cannot be compared;"
            " give `data` that both take."
        )
    before, after = find_correct(baseline), find_correct(subject)
    lost, gained = int((before & ~after).sum()), int((after & ~before).sum())
    p, count = mcnemar(lost, gained), len(before)
    low, high = paired_share_interval(gained, lost, count)
    statement = (
        f"accuracy differs by {(gained - lost) / count:+.2%} ({low:+.2%} to {high:+.2%}) from {baseline.name} on the"
        f" same {count} images: {lost} lost, {gained} gained, p = {p:.3g} (McNemar, one-sided)."
    )
    return GateResult(subject.name, "no worse than the baseline", p >= SIGNIFICANT, statement)


def to_json(results: Sequence[GateResult]) -> list[dict[str, Any]]:
    """Return results as JSON data."""
    return [asdict(result) for result in results]


def write_junit(path: Path, results: Sequence[GateResult], errors: Mapping[str, str] | None = None) -> None:
    """Write results as JUnit's XML, which CI services show as tests; the folder is made.

    Args:
        path: The file.
        results: What passed and failed.
        errors: Why networks could not be examined, by name.
    """
    errors = errors or {}
    failures = sum(not result.passed for result in results)
    counts = {"tests": len(results) + len(errors), "failures": failures, "errors": len(errors)}
    suite = ElementTree.Element(
        "testsuite", {"name": "vitclinic"} | {name: str(count) for name, count in counts.items()}
    )
    for result in results:
        name = result.gate if " " in result.gate else f"fail-on {result.gate}"
        case = ElementTree.SubElement(suite, "testcase", classname=_printable(result.network), name=name)
        if result.passed:
            ElementTree.SubElement(case, "system-out").text = _printable(result.statement)
        else:
            ElementTree.SubElement(case, "failure", message=_printable(result.statement))
    for network, why in errors.items():
        case = ElementTree.SubElement(suite, "testcase", classname=_printable(network), name="examine")
        ElementTree.SubElement(case, "error", message=_printable(why))
    ElementTree.indent(suite)
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True) + b"\n")


def _printable(text: str) -> str:
    """Return a text without the characters that XML has no place for, such as those that colour a terminal."""
    return re.sub("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)
