"""Faults of every kind, drawn: a few in the default tests, more in the slow ones, thousands in benchmarks/fuzz.py."""

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.cases import KINDS, is_closed_to_others, try_case
from tests.fuzz.damage import BYTES, change_value
from tests.fuzz.holding import find_losses, photograph, run_command
from tests.fuzz.world import build

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it needs signals, limits and /proc of Linux")


@pytest.fixture(scope="module")
def world():
    """The undamaged files, and a place for copies; what a case changes of this process is undone."""
    before = os.getcwd(), dict(os.environ)
    folder = Path(tempfile.mkdtemp(prefix="vitclinic-fuzz-"))  # pytest's own is closed to an ordinary user
    folder.chmod(0o755)
    os.environ["HF_HUB_OFFLINE"] = "1"
    build(folder / "world")
    yield folder
    os.chdir(before[0])
    os.environ.clear()
    os.environ.update(before[1])
    shutil.rmtree(folder, ignore_errors=True)


def hold(kind, number, world):
    if "ordinary user" in kind and os.geteuid() == 0 and is_closed_to_others():
        pytest.skip("an ordinary user cannot read the packages here")
    ended = try_case(kind, number, world / "world", world / "case")
    told = f"{kind}, case {number}: vitclinic {' '.join(ended.words)} ({ended.damage})\n{ended.err}"
    assert not ended.faults, "\n".join([told, *ended.faults])


cases = {
    "database": None,
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@pytest.mark.parametrize("kind", KINDS)
@given(number=st.integers(0, 2**32))
@settings(max_examples=2, **cases)
def test_a_fault_is_one_sentence_and_nothing_is_lost(kind, number, world):
    hold(kind, number, world)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_faults(kind, world, record_property):
    tried = 0

    @given(number=st.integers(0, 2**32))
    @settings(max_examples=20, **cases)
    def every(number):
        nonlocal tried
        tried += 1
        hold(kind, number, world)

    every()
    record_property("cases", tried)
    print(f"{kind}: {tried} cases")


def test_the_judge_sees_what_is_wrong(world, monkeypatch):
    """A harness that finds nothing must be able to find something."""
    from vitclinic.training import overrides

    def run(action):
        monkeypatch.setattr(overrides, "parse_word", lambda word: action())
        return run_command(["train", "steps=1"], world).faults

    assert "ZeroDivisionError" in run(lambda: 1 / 0)[0]
    assert run(lambda: os.kill(os.getpid(), signal.SIGALRM)) == ["hang"]
    assert run(lambda: sys.exit(99)) == ["exit code 99"]
    assert run(lambda: sys.exit(2)) == ["no sentence"]
    (world / "kept").mkdir()
    (world / "kept" / "a").write_text("1")
    before = photograph(world / "kept")
    (world / "kept" / "a").write_text("2")
    assert find_losses(before, photograph(world / "kept"), lambda name: False) == ["loss: a"]
    assert find_losses(before, photograph(world / "kept"), lambda name: True) == []


@given(content=st.binary(min_size=1, max_size=200), number=st.randoms(use_true_random=False))
@settings(max_examples=30, **cases)
def test_damage_changes_bytes_and_never_fails(content, number):
    for change in BYTES.values():
        assert isinstance(change(content, number), bytes)
    change_value({"a": [1, {"b": 2}]}, number)
