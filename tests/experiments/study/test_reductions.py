"""One number of many: what a measure makes of a run's units and of a run that diverged, and a slope's yardstick."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vitclinic._core.errors import RecipeError
from vitclinic._core.records import Measurement, Scalar, UnitRow
from vitclinic.data import DataConfig
from vitclinic.experiments.study import measures
from vitclinic.experiments.study.expectations import Measure
from vitclinic.experiments.study.measures import (
    first_kept_epoch,
    measure_run,
    read_measurement,
    reduce_stages,
    reduce_units,
)
from vitclinic.experiments.study.schema import parse_study
from vitclinic.experiments.study.verdicts import judge
from vitclinic.training import Run


def test_lower_and_upper_are_the_means_of_the_halves() -> None:
    assert reduce_units([1.0, 2.0, 5.0, 7.0], "lower") == 1.5
    assert reduce_units([1.0, 2.0, 5.0, 7.0], "upper") == 6.0
    assert reduce_units([1.0, 2.0, 6.0], "lower") == 1.5, "the middle one is in both halves"
    assert reduce_units([1.0, 2.0, 6.0], "upper") == 4.0


def test_a_peak_at_stage_ends_is_a_rise_within_and_a_fall_across() -> None:
    numbers, stages = [1.0, 2.0, 3.0, 1.0, 5.0], [0, 0, 0, 1, 1]
    assert reduce_stages(numbers, stages, "stage_rise") == 3.0
    assert reduce_stages(numbers, stages, "stage_step") == -2.0


def test_a_network_of_one_stage_has_no_step_and_single_units_no_rise() -> None:
    assert math.isnan(reduce_stages([1.0, 2.0], [0, 0], "stage_step"))
    assert math.isnan(reduce_stages([1.0, 2.0], [0, 1], "stage_rise"))


def _row(depth: int, stage: int, value: float) -> UnitRow:
    values = {name: Scalar(value=value) for name in ("variance", "lambda_max", "delta_log_amplitude")}
    return UnitRow(name=f"u{depth}", kind="conv", stage=stage, depth=depth, values=values)


def test_stages_come_from_the_units_in_the_order_of_depth_and_signs_can_be_dropped() -> None:
    rows = [_row(3, 1, 6.0), _row(0, 0, 1.0), _row(2, 1, -4.0), _row(1, 0, -3.0)]
    found = cast(Measurement, SimpleNamespace(status="ok", units=rows, scalars={}))
    rise = {"probe": "variance", "value": "variance", "over_units": "stage_rise"}
    assert read_measurement(found, Measure(**rise)) == 3.0
    assert read_measurement(found, Measure(**rise, magnitude=True)) == 2.0


def test_the_sign_is_dropped_of_units_and_not_of_their_trend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eigenvalues of falling magnitude have tau = -1, which was stored as 1 (C4)."""
    falling = Measurement.model_construct(
        probe="sharpness",
        status="ok",
        scalars={},
        units=[_row(depth, 0, value) for depth, value in enumerate((-9.0, 5.0, -2.0))],
    )
    monkeypatch.setattr(measures, "examine", lambda *_, **__: {"sharpness": falling})
    tau = Measure(probe="sharpness", value="lambda_max", over_units="trend", magnitude=True)
    run = _run("finished", at=lambda checkpoint: None)
    assert measure_run(run, DataConfig(), {"tau": tau}).numbers == {"tau": -1.0}


@pytest.mark.parametrize(
    ("losses", "end"),
    [([2.3] * 30, "stalled"), ([2.3] * 10 + [2.0] * 20, "learns"), ([2.3] * 10 + [2.28] * 20, "stalled")],
)
def test_a_run_that_has_learned_nothing_has_stalled(losses: list[float], end: str) -> None:
    rows = [{"kind": "train", "loss": loss} for loss in losses]
    ends = {name: Measure(result=name) for name in ("diverged", "stalled", "learns")}
    told = {name: float(name == end) for name in ends}
    assert measure_run(_run("finished", metrics=rows), DataConfig(), ends).numbers == told
    assert measure_run(_run("diverged", metrics=rows), DataConfig(), ends).numbers["diverged"] == 1.0


def test_first_units_can_be_left_out() -> None:
    measurement = Measurement.model_construct(
        probe="fourier",
        status="ok",
        scalars={},
        units=[_row(depth, 0, value) for depth, value in enumerate((9.0, 1.0, 3.0))],
    )
    assert read_measurement(measurement, Measure(probe="fourier", value="delta_log_amplitude", skip=1)) == 2.0


def _run(status: str, **more: Any) -> Run:
    facts = {"classes": ["a", "b", "c", "d"]}
    return cast(Run, SimpleNamespace(status={"status": status}, results={}, data_facts=facts, **more))


def test_a_run_that_diverged_counts_as_chance_where_the_measure_says_so() -> None:
    measures = {
        "accuracy": Measure(result="test.accuracy", when_diverged="chance"),
        "nll": Measure(result="test.nll", when_diverged=9.0),
        "plain": Measure(result="test.accuracy"),
    }
    found = measure_run(_run("diverged"), DataConfig(source="digits"), measures).numbers
    assert found["accuracy"] == 0.25
    assert found["nll"] == 9.0
    assert math.isnan(found["plain"])
    finished = measure_run(_run("finished"), DataConfig(source="digits"), measures).numbers
    assert math.isnan(finished["accuracy"]), "a finished run has its own number or none"


def test_early_is_the_first_epoch_kept_after_the_start() -> None:
    def keeping(*epochs: int) -> Run:
        recipe = SimpleNamespace(checkpoint=SimpleNamespace(keep_epochs=list(epochs)))
        return _run("finished", recipe=recipe, path=Path("run"))

    assert first_kept_epoch(keeping(0, 5, 3)) == 3
    with pytest.raises(RecipeError, match="keeps no early weights"):
        first_kept_epoch(keeping(0))


@pytest.mark.parametrize(
    ("than", "status"), [(0.0, "as claimed"), (-0.2, "as claimed"), (-0.5, "undecided"), (-0.8, "opposite")]
)
def test_a_slope_is_judged_against_the_number_it_should_be_below(than: float, status: str) -> None:
    plain = {
        "claim": "X",
        "title": "a law",
        "paper": "none",
        "source": "none",
        "base": {},
        "axes": {"batch_size": [1, 4]},
        "measures": {"ape": {"result": "test.nll"}},
        "expectations": [
            {
                "says": "it falls",
                "measure": "ape",
                "power": True,
                "than": than,
                "falls": {1: "batch_size=1", 4: "batch_size=4"},
            }
        ],
    }
    jitter = [0.02, -0.02, 0.01, -0.01, 0.0]
    values = {
        "batch_size=1": {seed: {"ape": 1.0} for seed in range(5)},
        "batch_size=4": {seed: {"ape": 4 ** (-0.5 + jitter[seed])} for seed in range(5)},
    }
    (comparison,) = judge(parse_study(plain, "a test"), values, range(5)).comparisons
    assert comparison.status == status
    assert comparison.mean == pytest.approx(-0.5), "the number reported is the exponent itself"


def test_than_without_a_trend_is_refused() -> None:
    plain = {
        "claim": "X",
        "title": "t",
        "paper": "none",
        "source": "none",
        "base": {},
        "arms": {"a": {}, "b": {}},
        "measures": {"m": {"result": "test.nll"}},
        "expectations": [{"says": "s", "measure": "m", "less": ["a", "b"], "than": 0.1}],
    }
    with pytest.raises(RecipeError, match="than is for trends"):
        parse_study(plain, "a test")
