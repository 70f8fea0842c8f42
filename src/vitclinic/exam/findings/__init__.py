"""Findings: what rules say of the measurements of a network and of the metrics of its training.

A rule is a small pure function, and abstains where its numbers were not measured. `known_rules()` has them all, and
docs/findings.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitclinic._core.records import Finding, Measurement
from vitclinic.exam.findings.rule import Evidence, Rule, Verdict, known_rules, rule
from vitclinic.exam.findings.training import healthy

# Each import registers a group of rules, in the order in which their findings are told.
# isort: off
import vitclinic.exam.findings.training
import vitclinic.exam.findings.behaviour
import vitclinic.exam.findings.curvature
import vitclinic.exam.findings.representation  # noqa: F401
# isort: on

__all__ = ["Evidence", "Rule", "Verdict", "find", "known_rules", "rule"]

_ORDER = ("problem", "notice", "healthy")


def find(
    measurements: Mapping[str, Measurement],
    training: Sequence[Mapping[str, Any]] = (),
    reference: Mapping[str, Measurement] | None = None,
) -> list[Finding]:
    """Apply all rules to a network: problems first, then notices, then that it is healthy, if it is.

    `measurements` are by probe, `training` the rows of a run's metrics.jsonl. With the measurements of a `reference`
    network, numbers are also compared with its own, where both were measured alike on the same images.

    Example:
        >>> find({})
        []
    """
    evidence = Evidence(measurements, training, reference or {})
    found = [finding for rule in known_rules().values() if (finding := rule(evidence)) is not None]
    if (well := healthy(evidence, found)) is not None:
        found.append(well)
    return sorted(found, key=lambda finding: _ORDER.index(finding.severity))
