"""Rules about a training: what diverged, jumped, stood still or turned, and what did none of it."""

import math

import pytest

from tests.exam.findings.made import exam, steps, validations
from vitclinic.exam.findings import find

GOOD = [2.3 * math.exp(-i / 60) + 0.1 * (i % 3) for i in range(100)]


def rules_of(rows):
    return [finding.rule for finding in find({}, rows)]


def test_a_training_that_goes_well_has_no_finding():
    assert rules_of(steps(GOOD) + validations([2.0, 1.5, 1.2, 1.3])) == []


@pytest.mark.parametrize("loss", [None, math.nan, math.inf, 40.0], ids=str)
def test_a_divergence(loss):
    (finding,) = find({}, steps([*GOOD[:50], loss]))
    assert (finding.rule, finding.severity) == ("unstable_training", "problem")
    assert "diverged" in finding.statement


def test_a_validation_that_is_not_finite_is_a_divergence():
    assert "unstable_training" in rules_of(steps(GOOD) + validations([2.0, None]))


def test_a_divergence_at_the_first_step():
    assert rules_of(steps([None])) == ["unstable_training"]


@pytest.mark.parametrize(("spike", "expected"), [(2.0, ["unstable_training"]), (0.8, [])])
def test_a_jump_of_the_loss(spike, expected):
    losses = [*GOOD[:60], GOOD[59] + spike, *GOOD[60:]]
    assert rules_of(steps(losses)) == expected


def test_the_noise_of_a_small_loss_is_no_jump():
    """Twice a loss of 0.01 is still nothing."""
    assert rules_of(steps([*GOOD, 0.01, 0.01, 0.05, 0.01, 0.08])) == []


def test_the_rate_to_try_comes_from_the_run():
    (finding,) = find({}, steps([2.3, None], lr=0.3))
    assert finding.suggestions[0].treatment == "optimizer.lr=0.03"
    (finding,) = find({}, steps([2.3, None], lr=0.0))
    assert finding.suggestions[0].treatment == "schedule.warmup=10%"


@pytest.mark.parametrize(("last", "expected"), [(2.3, ["stalled_training"]), (2.1, [])])
def test_a_loss_that_ends_where_it_began(last, expected):
    assert rules_of(steps([2.3, *[last] * 99])) == expected
    assert rules_of(steps([2.3, *[last] * 20])) == []  # too short to tell


@pytest.mark.parametrize(("last", "expected"), [(2.4, ["data_starved"]), (1.6, [])])
def test_a_validation_loss_that_turned(last, expected):
    assert rules_of(validations([2.3, 1.5, last])) == expected


def test_one_finding_for_one_illness():
    starved = exam(train_nll={"nll": (0.0, 0.02)}, accuracy={"nll": (2.9, 3.1)})
    (finding,) = find(starved, validations([2.3, 1.5, 3.0]))
    assert "accuracy.nll" in finding.numbers


def test_rows_without_what_is_looked_for_are_passed_over():
    assert rules_of([{"kind": "train"}, {}, {"kind": "val", "loss": 1.0}]) == []
