"""Many runs: each once, in any number of processes, whatever becomes of one of them."""

import os
import signal
import subprocess
import sys
import time

import pytest

from vitclinic.studies import Pool, Watcher, run_all
from vitclinic.training.metrics import without_timing

from .networks import long, tiny

DIVERGING = {"optimizer": {"name": "sgd", "lr": 1e9}, "schedule": {"warmup": 0}, "clip": None}


class Listening(Watcher):
    def __init__(self):
        self.told, self.outcomes = [], []

    def on_progress(self, done, total):
        self.told.append((done, total))

    def on_outcome(self, outcome):
        self.outcomes.append(outcome)


def test_outcomes_are_in_order_and_a_recipe_listed_twice_is_trained_once(tmp_path):
    watcher = Listening()
    recipes = [tiny(seed=1), tiny(seed=0), tiny(seed=1)]
    outcomes = run_all(recipes, Pool(tmp_path), watcher=watcher)
    assert [outcome.run.recipe.seed for outcome in outcomes] == [1, 0, 1]
    assert len(watcher.outcomes) == 2
    assert watcher.told[0] == (0, 2)
    assert watcher.told[-1] == (2, 2)
    assert [done for done, _ in watcher.told] == sorted(done for done, _ in watcher.told)


def test_a_divergence_is_data_and_a_failure_does_not_stop_the_others(tmp_path):
    recipes = [tiny(treatments=["spatial_smoothing"]), tiny(**DIVERGING), tiny()]  # the first is for CNNs
    failed, diverged, finished = run_all(recipes, Pool(tmp_path))
    assert (failed.status, diverged.status, finished.status) == ("failed", "diverged", "finished")
    assert "spatial_smoothing" in failed.reason
    assert diverged.reason == diverged.run.status["reason"]
    assert failed.path is None


def test_two_processes_give_the_numbers_of_one(tmp_path):
    recipes = [tiny(seed=0), tiny(**DIVERGING), tiny(treatments=["spatial_smoothing"]), tiny(seed=1)]
    alone = run_all(recipes, Pool(tmp_path / "alone"))
    watcher = Listening()
    together = run_all(recipes, Pool(tmp_path / "together"), processes=2, threads=1, watcher=watcher)
    assert [outcome.status for outcome in together] == ["finished", "diverged", "failed", "finished"]
    assert watcher.told[-1] == (4, 4)
    for one, other in zip(alone, together, strict=True):
        assert (one.status, one.reason, one.recipe) == (other.status, other.reason, other.recipe)
        if one.path is not None:
            assert without_timing(one.run.metrics) == without_timing(other.run.metrics)
            assert one.run.results == other.run.results


def test_a_signal_that_comes_too_late_to_stop_one_run_stops_those_after_it(tmp_path):
    class Late(Watcher):
        def on_progress(self, done, total):
            if done == 1:  # the last step of the first run
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_all([tiny(seed=0), tiny(seed=1)], Pool(tmp_path), watcher=Late())
    pool = Pool(tmp_path)
    assert pool.find(tiny(seed=0)).status["status"] == "finished"
    assert not pool.path(tiny(seed=1)).exists()


LEADER = """
import sys
from tests.studies.networks import long
from vitclinic.studies import Pool, run_all
if __name__ == "__main__":
    recipes = [long(seed) for seed in (0, 1)]
    print([outcome.status for outcome in run_all(recipes, Pool(sys.argv[1]), processes=2, threads=1)])
"""


def started(tmp_path):
    """Two long runs in two processes, and their leader, once both have made some steps."""
    script = tmp_path / "leader.py"
    script.write_text(LEADER)
    path = os.pathsep.join([os.getcwd(), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, str(script), str(tmp_path / "pool")]
    process = subprocess.Popen(command, env=environment, process_group=0, stderr=subprocess.DEVNULL)
    runs = [Pool(tmp_path / "pool").path(long(seed)) for seed in (0, 1)]
    while process.poll() is None and not all(_steps(run) >= 10 for run in runs):
        time.sleep(0.02)
    assert process.poll() is None
    return process, runs


def _steps(run):
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_with_two_processes_the_runs_are_saved_and_go_on(tmp_path, number):
    process, runs = started(tmp_path)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.kill()  # the leader alone: its workers notice, save and stop
    process.wait(timeout=60)
    assert process.returncode != 0
    deadline = time.monotonic() + 60
    while any(_status(run) == "running" for run in runs) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [_status(run) for run in runs] == ["interrupted", "interrupted"]
    pool = Pool(tmp_path / "pool")
    for seed in (0, 1):
        whole = Pool(tmp_path / "whole").trained(long(seed))
        assert without_timing(pool.trained(long(seed)).metrics) == without_timing(whole.metrics)


def _status(run):
    import json

    return json.loads((run / "status.json").read_text())["status"]
