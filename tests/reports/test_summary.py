"""Which numbers stand in the summary, and which of them is called better."""

import math

import pytest

from tests.reports.made import HOSTILE, estimate, exact, measurement, several
from vitclinic._core.records import Scalar
from vitclinic.reports.figure import ExamView
from vitclinic.reports.summary import find_best, group_probes, summarize


def compared(*values, probe="accuracy", scalar="accuracy", **differences):
    """The one row of networks that differ in this scalar, and the last of them in something else."""
    made = [measurement(probe, scalars={scalar: value}) for value in values]
    made[-1] = made[-1].model_copy(update=differences)
    (row,) = summarize([ExamView(str(place), {probe: one}) for place, one in enumerate(made)])
    return row


def best(row):
    return [place for place, cell in enumerate(row.cells) if cell.best]


def test_the_better_value_is_marked_by_its_direction():
    assert best(compared(estimate(0.5), estimate(0.9))) == [1]
    assert best(compared(estimate(0.5), estimate(0.9), scalar="nll")) == [0]
    assert best(compared(estimate(0.5), estimate(0.9), probe="sparsity", scalar="active")) == []
    assert best(compared(estimate(-9.0), estimate(5.0), probe="sharpness", scalar="lambda_max")) == [1]


def test_overlapping_intervals_mark_nothing():
    assert best(compared(estimate(0.5, 0.1), estimate(0.65, 0.1))) == []
    assert best(compared(estimate(0.5, 0.1), estimate(0.71, 0.1))) == [1]
    assert best(compared(estimate(0.5), estimate(0.9), estimate(0.91))) == []


def test_a_number_without_an_interval_is_exact():
    assert best(compared(exact(5), exact(4), probe="cost", scalar="parameters")) == [1]
    assert best(compared(exact(5), exact(5), probe="cost", scalar="parameters")) == []
    assert best(compared(estimate(0.5, 0.1), exact(0.55))) == []


@pytest.mark.parametrize("difference", [{"data": "other images"}, {"config": {"bins": 3}}, {"conditions": {"a": 1}}])
def test_what_was_not_measured_alike_is_not_compared(difference):
    row = compared(estimate(0.5), estimate(0.9), **difference)
    assert best(row) == []
    assert not row.alike


def test_what_has_not_converged_is_not_compared():
    row = compared(estimate(0.5), estimate(0.9), status="not_converged", reason="Too few.")
    assert best(row) == []
    assert [cell.converged for cell in row.cells] == [True, False]


def test_one_network_or_a_value_that_is_no_number_wins_nothing():
    assert find_best([exact(1), None], "higher") is None
    assert find_best([exact(1), Scalar(value=math.nan)], "higher") is None
    assert find_best([exact(1), Scalar(value=math.inf)], "lower") == 0


def test_a_plugin_s_numbers_are_in_the_summary_too():
    rows = summarize(several())
    assert [row.scalar for row in rows if row.probe == "my.own probe"] == ["odd_one", HOSTILE]
    assert group_probes(several())["Other"] == ["my.own probe"]
    assert [cell.scalar for cell in rows[-1].cells] == [None, None, exact(3)]
