"""A measurement on disk is the measurement, whatever its numbers; anything else is a clear error."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from vitclinic._core.errors import RunError
from vitclinic._core.records import Measurement, Provenance, Scalar, UnitRow

PROVENANCE = Provenance(
    seed=0, mode="eval", device="cpu", batch_size=8, duration=0.5, date="2026-01-01T00:00:00Z", versions={}, images=8
)


def measurement(**fields):
    given = {"probe": "norms", "config": {}, "subject": "ab", "data": "cd", "provenance": PROVENANCE}
    return Measurement(**(given | fields))


numbers = st.floats(allow_nan=True, allow_infinity=True)
scalars = st.builds(
    Scalar, value=numbers, low=st.none() | numbers, high=st.none() | numbers, n=st.none() | st.integers(0, 2**40)
)
names = st.text(min_size=1, max_size=8)
tables = st.dictionaries(names, scalars, max_size=3)
units = st.builds(UnitRow, name=names, kind=names, stage=st.integers(0, 9), depth=st.integers(0, 99), values=tables)
array_names = st.sampled_from(["file", "allow_pickle", "a", "a.npy", "a/b", "../a"]) | st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), max_size=8
)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | numbers
    | names
    | st.floats(width=32).map(np.float32)
    | st.integers(0, 9).map(np.int8),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
configs = st.dictionaries(names, plain, max_size=3)
arrays = npst.arrays(
    st.sampled_from([np.float64, np.float32, np.int64, np.uint8, np.bool_]), npst.array_shapes(min_dims=0, min_side=0)
)


@given(
    scalars=tables,
    units=st.lists(units, max_size=3),
    arrays=st.dictionaries(array_names, arrays, max_size=3),
    config=configs,
    conditions=configs,
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_read_is_what_was_written(tmp_path, scalars, units, arrays, config, conditions):
    written = measurement(scalars=scalars, units=units, arrays=arrays, config=config, conditions=conditions)
    written.write(tmp_path / "deep" / "m.json")
    assert Measurement.read(tmp_path / "deep" / "m.json") == written


def test_the_json_is_strict(tmp_path):
    measurement(scalars={"x": Scalar(value=math.nan, low=-math.inf, high=math.inf)}).write(tmp_path / "m.json")

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads((tmp_path / "m.json").read_text(), parse_constant=refuse)
    assert record["scalars"]["x"] == {"value": "nan", "low": "-inf", "high": "inf", "n": None}
    assert record["schema"] == 2


def test_different_measurements_are_different():
    one = measurement(scalars={"x": Scalar(value=1.0)}, arrays={"a": np.zeros(2)})
    assert one != measurement(scalars={"x": Scalar(value=2.0)}, arrays={"a": np.zeros(2)})
    assert one != measurement(scalars={"x": Scalar(value=1.0)}, arrays={"a": np.ones(2)})
    assert one != measurement(scalars={"x": Scalar(value=1.0)}, arrays={"a": np.zeros(2, np.float32)})


def test_whatever_is_not_ok_says_why():
    with pytest.raises(ValueError, match="needs a reason"):
        measurement(status="failed")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 3, "probe": "norms"}', "not a measurement of schema 2; update vitclinic"),
        ('{"probe": "norms"}', "not a measurement of schema 2"),
        ('{"schema": 1, "probe": "norms"}', "not a complete measurement: 'config' is required"),
        ('{"schema": 1', "is damaged .*delete it to measure again"),
        ("[]", "is damaged .*no JSON object.*delete it to measure again"),
    ],
)
def test_what_is_not_a_measurement_is_a_sentence(tmp_path, text, message):
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(RunError, match=message):
        Measurement.read(tmp_path / "m.json")


def test_a_changed_number_is_noticed(tmp_path):
    measurement(scalars={"accuracy": Scalar(value=0.5, low=0.4, high=0.6)}).write(tmp_path / "m.json")
    text = (tmp_path / "m.json").read_text()
    (tmp_path / "m.json").write_text(text.replace("0.5", "0.9", 1))
    with pytest.raises(RunError, match="was changed since it was written; delete it"):
        Measurement.read(tmp_path / "m.json")
    record = json.loads(text)
    del record["digest"]
    (tmp_path / "m.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match="was changed since it was written; delete it"):
        Measurement.read(tmp_path / "m.json")
    (tmp_path / "m.json").write_text(json.dumps({**record, "schema": 1}))  # as earlier versions wrote it
    assert Measurement.read(tmp_path / "m.json").scalars["accuracy"].value == 0.5


def test_arrays_that_do_not_belong_are_noticed(tmp_path):
    measurement(arrays={"a": np.zeros(2)}).write(tmp_path / "m.json")
    measurement(arrays={"a": np.ones(2)}).write(tmp_path / "other.json")
    (tmp_path / "other.npz").replace(tmp_path / "m.npz")
    with pytest.raises(RunError, match=r"does not belong to 'm\.json'"):
        Measurement.read(tmp_path / "m.json")
    (tmp_path / "m.npz").unlink()
    with pytest.raises(RunError, match=r"arrays of .* cannot be read"):
        Measurement.read(tmp_path / "m.json")


def test_nothing_is_pickled(tmp_path):
    with pytest.raises(ValueError, match="Python objects"):
        measurement(arrays={"a": np.array([object()])}).write(tmp_path / "m.json")


def test_arrays_can_be_read_without_vitclinic(tmp_path):
    measurement(arrays={"file": np.arange(3), "allow_pickle": np.ones((2, 2))}).write(tmp_path / "m.json")
    with np.load(tmp_path / "m.npz", allow_pickle=False) as stored:
        assert stored["file"].tolist() == [0, 1, 2]
        assert stored["allow_pickle"].shape == (2, 2)


def test_the_same_arrays_are_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        measurement(arrays={"x": np.arange(9.0)}).write(tmp_path / f"{name}.json")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_options_are_what_json_can_say():
    stored = measurement(config={"a": (1, np.float64(0.5)), "b": math.inf, "c": np.bool_(True), 3: Path("x")})
    assert stored.config == {"a": [1, 0.5], "b": "inf", "c": True, "3": "x"}
    with pytest.raises(ValueError, match=r"'config\.a' is of type set, which cannot be stored"):
        measurement(config={"a": {1}})
    with pytest.raises(ValueError, match="name"):
        measurement(arrays={"a\0b": np.zeros(2)})
