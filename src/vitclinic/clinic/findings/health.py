"""When nothing is wrong, as far as was looked."""

from __future__ import annotations

from collections.abc import Sequence

from vitclinic.clinic.findings.evidence import TRAINING, Evidence, low, shown
from vitclinic.clinic.findings.rule import Rule, known_rules
from vitclinic.finding import Finding
from vitclinic.measurement import Scalar

ENOUGH = 3
"""Probes, the training's metrics counting as one."""
TITLE = "Healthy"
THRESHOLD = (
    f"No rule found a problem, accuracy is above that of guessing, and {ENOUGH} probes or more (the training's metrics "
    "count as one) were looked at: our choice."
)


def healthy(evidence: Evidence, found: Sequence[Finding]) -> Finding | None:
    """That no rule found a problem, with what was looked at; None where too little was."""
    accuracy, guess = evidence.number("accuracy.accuracy"), evidence.number("accuracy.commonest")
    if accuracy is None or guess is None or low(accuracy) <= guess.value:
        return None
    rules = known_rules().values()
    looked = [rule for rule in rules if rule.looks(evidence)]
    names = dict.fromkeys(name for rule in looked for group in rule.needs for name in group if evidence.has(name))
    if any(finding.severity == "problem" for finding in found) or len({_probe(name) for name in names}) < ENOUGH:
        return None
    return Finding(
        rule="healthy",
        title=TITLE,
        severity="healthy",
        statement=_statement(accuracy, looked, [rule for rule in rules if rule not in looked]),
        numbers={name: number for name in names if (number := evidence.number(name)) is not None},
        threshold=THRESHOLD,
        basis="heuristic",
    )


def _statement(accuracy: Scalar, looked: Sequence[Rule], missed: Sequence[Rule]) -> str:
    says = f"Accuracy is {shown(accuracy)}, and no problem was found. Looked for: {_titles(looked)}."
    return f"{says} Not looked for, as its numbers are not there: {_titles(missed)}." if missed else says


def _titles(rules: Sequence[Rule]) -> str:
    return ", ".join(rule.title.lower() for rule in rules)


def _probe(name: str) -> str:
    return "training" if name in TRAINING else name.partition(".")[0]
