"""Findings: what rules say of the measurements of a network and of the metrics of its training.

A rule is a small pure function, and abstains where its numbers were not measured. `known_rules()` has them all, and
docs/findings.md lists them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from vitclinic._core.records import Finding, Measurement
from vitclinic.exam.findings.rule import Evidence, Rule, Verdict, known_rules, rule
from vitclinic.exam.findings.training import healthy

# Each import registers a group of rules, in the order in which their findings are told.
# isort: off
import vitclinic.exam.findings.training
import vitclinic.exam.findings.behaviour
import vitclinic.exam.findings.network  # noqa: F401
# isort: on

__all__ = ["Evidence", "Rule", "Verdict", "find", "known_rules", "rule"]

log = logging.getLogger(__name__)

_ORDER = ("problem", "notice", "healthy")


def find(
    measurements: Mapping[str, Measurement],
    training: Sequence[Mapping[str, Any]] = (),
    reference: Mapping[str, Measurement] | None = None,
) -> list[Finding]:
    """Apply all rules to a network: problems first, then notices, then that it is healthy, if it is.

    Args:
        measurements: Of the network, by probe.
        training: The rows of a run's metrics.jsonl.
        reference: Measurements of another network, by probe; numbers are also compared with its own, where
            both were measured alike on the same images.

    Example:
        >>> find({})
        []
    """
    evidence = Evidence(measurements, training, reference or {})
    found: list[Finding] = []
    rules: list[Rule] = []
    for one in known_rules().values():
        try:
            finding = one(evidence)
        except Exception as error:  # of another package, or of numbers that nobody thought of: the others go on
            log.info("the rule %s failed", one.name, exc_info=error)
            log.warning("The rule %s is left out: %s: %s", one.name, type(error).__name__, error)
            continue
        rules.append(one)
        found += [] if finding is None else [finding]
    if (well := healthy(evidence, found, rules)) is not None:
        found.append(well)
    return sorted(found, key=lambda finding: _ORDER.index(finding.severity))
