"""Many runs: each once, in any number of processes, whatever becomes of one of them."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from threading import Timer

import pytest

from tests.processes import holding
from tests.rows import drop_timing
from vitclinic._core.callback import Callback
from vitclinic.experiments import runner
from vitclinic.experiments.runner import Pool, run_all

from .networks import long, tiny

DIVERGING = {"optimizer": {"name": "sgd", "lr": 1e9}, "schedule": {"warmup": 0}, "clip": None}


class Listening(Callback):
    def __init__(self):
        self.told, self.outcomes = [], []

    def on_progress(self, what, done, total):
        self.told.append((done, total))

    def on_run(self, outcome):
        self.outcomes.append(outcome)


def test_outcomes_are_in_order_and_a_recipe_listed_twice_is_trained_once(tmp_path):
    listener = Listening()
    recipes = [tiny(seed=1), tiny(seed=0), tiny(seed=1)]
    outcomes = run_all(recipes, Pool(tmp_path), callbacks=[listener])
    assert [outcome.run.recipe.seed for outcome in outcomes] == [1, 0, 1]
    assert len(listener.outcomes) == 2
    assert listener.told[0] == (0, 2)
    assert listener.told[-1] == (2, 2)
    assert [done for done, _ in listener.told] == sorted(done for done, _ in listener.told)


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
    listener = Listening()
    together = run_all(recipes, Pool(tmp_path / "together"), processes=2, threads=1, callbacks=[listener])
    assert [outcome.status for outcome in together] == ["finished", "diverged", "failed", "finished"]
    assert listener.told[-1] == (4, 4)
    for one, other in zip(alone, together, strict=True):
        assert (one.status, one.reason, one.recipe) == (other.status, other.reason, other.recipe)
        if one.path is not None:
            assert drop_timing(one.run.metrics) == drop_timing(other.run.metrics)
            assert one.run.results == other.run.results


def test_a_signal_that_comes_too_late_to_stop_one_run_stops_those_after_it(tmp_path):
    class Late(Callback):
        def on_progress(self, what, done, total):
            if done == 1:  # the last step of the first run
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_all([tiny(seed=0), tiny(seed=1)], Pool(tmp_path), callbacks=[Late()])
    pool = Pool(tmp_path)
    assert pool.find(tiny(seed=0)).status["status"] == "finished"
    assert not pool.path(tiny(seed=1)).exists()


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_another_process_is_at_comes_last_and_is_ours_when_that_dies(tmp_path, monkeypatch, processes):
    monkeypatch.setattr(runner, "LOOK_AGAIN", 0.05)
    pool = Pool(tmp_path)

    class Killing(Listening):
        def on_run(self, outcome):
            super().on_run(outcome)
            other.kill()

    listener = Killing()
    with holding(pool.path(tiny(seed=0))) as other:
        outcomes = run_all([tiny(seed=0), tiny(seed=1)], pool, processes=processes, threads=1, callbacks=[listener])
    assert [outcome.status for outcome in outcomes] == ["finished", "finished"]
    assert [outcome.recipe.seed for outcome in listener.outcomes] == [1, 0]


@pytest.fixture
def heard():
    """Ctrl-C as in a terminal; in the background of a shell it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_workers_of_a_study_may_have_workers_for_their_data(tmp_path, processes):
    recipe = tiny(steps=2, workers=1, data={"source": "digits", "limit": 60, "augment": "deit"})
    outcomes = run_all([recipe, recipe.model_copy(update={"seed": 1})], Pool(tmp_path), processes=processes, threads=1)
    assert [outcome.status for outcome in outcomes] == ["finished"] * 2


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("processes", [1, 2])
def test_waiting_for_another_process_can_be_interrupted(tmp_path, processes):
    pool = Pool(tmp_path)
    recipes = [tiny(seed=0), tiny(seed=1)]

    class Stopping(Callback):
        def on_progress(self, what, done, total):
            Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    with holding(pool.path(recipes[0])), holding(pool.path(recipes[1])), pytest.raises(KeyboardInterrupt):
        run_all(recipes, pool, processes=processes, threads=1, callbacks=[Stopping()])


@pytest.mark.slow
def test_a_worker_that_dies_while_another_speaks_loses_its_own_run_only(tmp_path):
    pool = Pool(tmp_path)

    class Killing(Listening):
        def on_progress(self, what, done, total):
            status = pool.path(long(1)) / "status.json"
            found = json.loads(status.read_text()) if status.exists() else {}
            workers = {worker.pid: worker for worker in multiprocessing.active_children()}
            if found.get("status") == "running" and found["process"] in workers:
                workers[found["process"]].kill()
                workers[found["process"]].join()

    outcomes = run_all([long(0), long(1)], pool, processes=2, threads=1, callbacks=[Killing()])
    assert [outcome.status for outcome in outcomes] == ["finished", "failed"]
    assert outcomes[1].reason.startswith("its process died (exit code -9)")


LEADER = """
import sys
from tests.experiments.study.networks import long
from vitclinic.experiments.runner import Pool
from vitclinic.experiments.runner import run_all
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
        whole = Pool(tmp_path / "whole").train(long(seed))
        assert drop_timing(pool.train(long(seed)).metrics) == drop_timing(whole.metrics)


def _status(run):
    return json.loads((run / "status.json").read_text())["status"]
