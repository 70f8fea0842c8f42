"""The numbers of a run, against its stored measurements and metrics read by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vitclinic._core.errors import RunError
from vitclinic._core.records import Measurement
from vitclinic.exam import examine
from vitclinic.experiments.study.expectations import Measure
from vitclinic.experiments.study.measures import (
    NoNumberError,
    measure_run,
    read_measurement,
    reduce_units,
    training_seconds,
)
from vitclinic.training import train

from .networks import tiny

MODEL = {"name": "vit_tiny_fitted", "patch_size": 4, "embed_dim": 12, "depth": 3, "num_heads": 2}


def test_what_a_run_saved_before_it_diverged_is_not_what_it_came_to(tmp_path):
    """Of weights that were kept on purpose, on the way, there is a number."""
    crash = {"optimizer": {"name": "sgd", "lr": 300.0}, "schedule": {"warmup": "30 steps"}, "clip": None}
    keeping = {"steps": 40, "checkpoint": {"every": "1 steps", "keep_epochs": [0]}}
    run = train(tiny(**crash, **keeping).model_copy(update={"out": str(tmp_path / "run")}))
    assert run.status["status"] == "diverged"
    assert run.status["step"] > 1
    norm = {"probe": "norms", "scalar": "weight_norm"}
    assert number(run, **norm) == "it diverged before its checkpoint 'last'"
    assert number(run, **norm, checkpoint="epoch-0") > 0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three layers, two epochs, of which the first's weights are kept."""
    recipe = tiny(model=MODEL, checkpoint={"every": 1, "keep_epochs": [1]}, validation="1")
    return train(recipe.model_copy(update={"out": str(tmp_path_factory.mktemp("runs") / "run")}))


def number(run, **measure):
    """Of one measure; a NaN is looked at by its reason."""
    found = measure_run(run, run.recipe.data, {"x": Measure(**measure)})
    assert math.isnan(found.numbers["x"]) == ("x" in found.missing)
    return found.missing.get("x", found.numbers["x"])


def stored(run, probe):
    """The measurements of a probe that are with a run, as they are on disk."""
    return [Measurement.read(file) for file in sorted((run.path / "exams").glob(f"{probe}-*.json"))]


def test_a_scalar_is_the_stored_measurement_s(run):
    found = number(run, probe="norms", scalar="weight_norm")
    assert found in [measurement.scalars["weight_norm"].value for measurement in stored(run, "norms")]
    assert found == examine(f"{run.path}@last", probes=["norms"], limit=1000)["norms"].scalars["weight_norm"].value
    assert number(run, probe="norms", scalar="weight_norm", log=True) == pytest.approx(math.log10(found))


def test_values_of_units_become_one_number(run):
    exam = examine(f"{run.path}@last", probes=["attention_entropy"], limit=40)
    entropies = [row.values["entropy"].value for row in sorted(exam["attention_entropy"].units, key=lambda r: r.depth)]
    assert len(entropies) == 3
    asked = {"probe": "attention_entropy", "value": "entropy", "limit": 40}
    assert number(run, **asked) == pytest.approx(sum(entropies) / 3)
    backwards = exam["attention_entropy"].model_copy(update={"units": exam["attention_entropy"].units[::-1]})
    assert read_measurement(backwards, Measure(**asked, over_units="first")) == entropies[0]
    assert number(run, **asked, over_units="first") == entropies[0]
    assert number(run, **asked, over_units="last") == entropies[2]
    assert number(run, **asked, over_units="trend") == pytest.approx(stats.kendalltau(range(3), entropies).statistic)


def test_a_checkpoint_is_examined_as_its_text_names_it(run):
    named = examine(f"{run.path}@last", probes=["norms"], limit=40)
    handed = examine(run.at("last"), probes=["norms"], limit=40)
    assert (handed.name, handed.subject) == (named.name, named.subject) == (str(run.at("last")), named.subject)
    assert handed.reused == {"norms"}
    with pytest.raises(RunError, match="epoch-99"):
        examine(run.at("epoch-99"), probes=["norms"], limit=40)


def test_units_of_one_kind_are_taken_alone(run):
    exam = examine(f"{run.path}@last", probes=["token_similarity"], limit=40)
    rows = [row for row in exam["token_similarity"].units if row.kind == "mlp"]
    assert 0 < len(rows) < len(exam["token_similarity"].units)
    asked = {"probe": "token_similarity", "value": "absolute_cosine", "limit": 40}
    expected = np.mean([row.values["absolute_cosine"].value for row in rows])
    assert number(run, **asked, units="mlp") == pytest.approx(expected)
    reason = "token_similarity has no 'absolute_cosine' for a unit of kind conv"
    assert number(run, **asked, units="conv") == reason


def test_options_and_checkpoints_are_those_asked_for(run):
    early = number(run, probe="norms", scalar="weight_norm", checkpoint="epoch-1")
    assert early == examine(f"{run.path}@epoch-1", probes=["norms"])["norms"].scalars["weight_norm"].value
    assert early != number(run, probe="norms", scalar="weight_norm")
    measures = {
        str(tokens): Measure(
            probe="token_similarity", scalar="absolute_cosine_last", options={"tokens": tokens}, limit=30
        )
        for tokens in (2, 3)
    }
    numbers = measure_run(run, run.recipe.data, measures).numbers
    assert numbers["2"] != numbers["3"]
    for tokens in (2, 3):
        probes = [{"token_similarity": {"tokens": tokens}}]
        exam = examine(f"{run.path}@last", probes=probes, limit=30)
        assert numbers[str(tokens)] == exam["token_similarity"].scalars["absolute_cosine_last"].value


def test_results_and_metrics_are_the_run_s_own(run):
    assert number(run, result="test.accuracy") == run.results["test"]["accuracy"]
    assert number(run, result="diverged") == 0
    first, second = (row for row in run.metrics if row["kind"] == "val")
    assert (first["epoch"], second["epoch"]) == (1, 2)
    assert number(run, result="val.nll@1") == first["nll"]
    assert number(run, result="val.nll@2") == second["nll"]
    assert number(run, result="train.loss@0") == run.metrics[0]["loss"]
    assert number(run, result="val.nll@3") == "there is no val.nll@3: its rows have none"


def test_a_difference_is_the_first_less_the_second(run):
    measures = {
        "twice": Measure(difference=["less", "test"]),
        "less": Measure(difference=["val", "test"]),
        "val": Measure(result="val.nll"),
        "test": Measure(result="test.nll"),
        "lacking": Measure(difference=["val", "nothing"]),
        "nothing": Measure(result="val.nll@9"),
    }
    ordered = {name: measures[name] for name in ("less", "twice", "val", "test", "lacking", "nothing")}
    found = measure_run(run, run.recipe.data, ordered)
    assert list(found.numbers) == list(ordered)
    val, test = run.results["val"]["nll"], run.results["test"]["nll"]
    assert found.numbers["less"] == val - test
    assert found.numbers["twice"] == val - test - test
    assert found.missing["lacking"] == "there is no nothing"


def test_what_has_no_number_says_why(run):
    assert number(run, probe="variance", scalar="variance_change_conv").startswith(
        "variance has no scalar 'variance_change_conv' for this network."
    )
    assert number(run, probe="cb_scale", scalar="mean").startswith("cb_scale does not apply: ")
    assert number(run, result="diverged", log=True) == "0 has no logarithm"


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=12, unique=True))
def test_the_trend_is_kendall_s_tau_with_depth(numbers):
    assert reduce_units(numbers, "trend") == pytest.approx(stats.kendalltau(range(len(numbers)), numbers).statistic)


def test_ties_count_as_no_trend_and_a_nan_makes_all_of_it_one():
    assert reduce_units([1.0, 1.0, 1.0], "trend") == 0
    assert reduce_units([1.0, 2.0, 2.0], "trend") == pytest.approx(
        2 / 3
    )  # tau-a: a tied pair is half for, half against
    assert all(math.isnan(reduce_units([1.0, math.nan], how)) for how in ("mean", "first", "last", "trend"))
    with pytest.raises(NoNumberError):
        reduce_units([1.0], "trend")


def test_training_takes_what_its_steps_took(run):
    rates = [row["timing"]["images_per_second"] for row in run.metrics if row["kind"] == "train"]
    assert training_seconds(run) == pytest.approx(sum(20 / rate for rate in rates))
