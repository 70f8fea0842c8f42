"""All findings together: their order, health, what they suggest and what the docs say of them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exam.findings.made import exam, layers, steps, transformer
from tests.exam.findings.test_rules import CASES
from vitclinic.exam.findings import find, known_rules
from vitclinic.training.overrides import build_recipe
from vitclinic.treatments import known_treatments

ROOT = Path(__file__).parents[3]
ACCURATE = {"accuracy": (0.69, 0.71), "commonest": 0.1, "confidence": (0.69, 0.71)}
SMOOTH = transformer((0.4, 0.42), (0.1, 0.12))
ACTIVE = layers("mlp", "active", (0.4, 0.5))


def test_problems_come_first():
    measurements = exam(
        accuracy={"accuracy": (0.69, 0.70), "confidence": (0.76, 0.77), "commonest": 0.1},
        token_similarity=transformer((0.8, 0.82), (0.3, 0.32)),
    )
    assert [finding.severity for finding in find(measurements)] == ["problem", "notice"]


def test_healthy_says_what_was_looked_at():
    (finding,) = find(exam(accuracy=ACCURATE, token_similarity=SMOOTH, sparsity=ACTIVE))
    assert (finding.rule, finding.severity) == ("healthy", "healthy")
    looked, missed = finding.statement.split("Not looked for")
    assert "over-smoothed patches" in looked
    assert "sharp minimum" in missed
    assert "sharp minimum" not in looked
    assert {"accuracy.accuracy", "token_similarity.absolute_cosine_last"} <= set(finding.numbers)


def test_training_counts_as_a_probe():
    rows = steps([2.0 - i / 100 for i in range(100)])
    assert [finding.rule for finding in find(exam(accuracy=ACCURATE, sparsity=ACTIVE), rows)] == ["healthy"]


@pytest.mark.parametrize(
    "measurements",
    [
        exam(accuracy=ACCURATE, sparsity=ACTIVE),
        exam(sparsity=ACTIVE, token_similarity=SMOOTH, attention_entropy=layers("msa", "ratio", (0.8, 0.81))),
        exam(accuracy={"accuracy": (0.69, 0.71)}, token_similarity=SMOOTH, sparsity=ACTIVE),
    ],
    ids=["too little", "no accuracy", "nothing to compare accuracy with"],
)
def test_nobody_is_called_healthy_unseen(measurements):
    assert find(measurements) == []


def test_a_network_that_guesses_is_not_healthy():
    guessing = {"accuracy": (0.08, 0.12), "commonest": 0.1, "confidence": (0.10, 0.12)}
    found = find(exam(accuracy=guessing, token_similarity=SMOOTH, sparsity=ACTIVE))
    assert [finding.rule for finding in found] == ["guessing"]


def test_a_notice_does_not_exclude_health_and_a_problem_does():
    measurements = exam(accuracy=ACCURATE, token_similarity=SMOOTH, sparsity=ACTIVE)
    dense = exam(attention_entropy=layers("msa", "ratio", (0.96, 0.97)))
    noticed, health = find(measurements | dense)
    assert (noticed.severity, health.severity) == ("notice", "healthy")
    looked, worth_a_look = health.statement.split("Worth a look: ")
    assert noticed.title.lower() not in looked
    assert noticed.title.lower() in worth_a_look.partition(".")[0]
    uniform = exam(attention_entropy=layers("msa", "ratio", (0.995, 0.997)))
    assert [finding.severity for finding in find(measurements | uniform)] == ["problem"]


@pytest.mark.parametrize("rule", known_rules().values(), ids=lambda rule: rule.name)
def test_what_is_suggested_exists(rule):
    for suggestion in rule.suggestions:
        if "=" in suggestion.treatment:
            build_recipe(None, [suggestion.treatment])
        else:
            assert suggestion.treatment in known_treatments()


def test_suggestions_made_from_the_exam_exist():
    (finding,) = find({}, steps([2.3, None], lr=0.3))
    build_recipe(None, [finding.suggestions[0].treatment])


@pytest.mark.parametrize("rule", known_rules().values(), ids=lambda rule: rule.name)
def test_a_rule_says_where_its_line_comes_from(rule):
    assert rule.threshold
    if rule.basis == "published range":
        assert re.search(r"\[\w+20\d\d (Table|Sec|Fig)", rule.source)
    else:
        assert re.search(r"\bours?\b|no paper draws a line|docs/results|Geirhos", rule.source)


def test_numbers_exist_where_the_rules_look_for_them():
    """Probes are known by name; what they call their numbers is tested on networks made sick on purpose."""
    from vitclinic.probes import known_probes

    for rule in known_rules().values():
        for group in rule.needs:
            assert {name.partition(".")[0] for name in group} <= {*known_probes(), "training"}


def test_findings_are_strict_json_also_where_a_number_is_not_finite():
    found = [finding for sick, _, _ in CASES.values() for finding in find(sick)] + find({}, steps([None]))
    assert len(found) > len(CASES)
    for finding in found:
        json.loads(finding.model_dump_json(), parse_constant=pytest.fail)


def test_the_page_lists_the_rules_as_they_are():
    done = subprocess.run(
        [sys.executable, "docs/make_findings.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
