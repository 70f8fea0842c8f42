"""Studies as jobs of SLURM, on submitit's own stand-in: processes of this machine."""

import importlib.util
import json
import os
import signal
import threading
import time

import pytest

from vitclinic._core.errors import RecipeError, RunError
from vitclinic.experiments.slurm import Task, parse_options
from vitclinic.experiments.study.conduct import study
from vitclinic.training import Run

from .networks import STUDY, TINY, tiny_study
from .test_conduct import IMPOSSIBLE, table

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("submitit") is None, reason="the extra [slurm] is not installed"
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("auto", {}),
        ("local", {}),
        ("partition=gpu, time=90m", {"slurm_partition": "gpu", "timeout_min": 90}),
        ("memory=16,jobs=4,account=a-b", {"mem_gb": 16, "slurm_array_parallelism": 4, "slurm_account": "a-b"}),
        ("time=10s", {"timeout_min": 1}),
    ],
)
def test_options_are_submitit_s(text, found):
    assert parse_options(text) == found


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("partitoin=gpu", "slurm: 'partitoin=gpu' is not an option such as partition=gpu. Did you mean 'partition'?"),
        ("gpus=two", "slurm: write a whole number, as in gpus=1 (got 'two')."),
        ("time=long", "slurm: write a time such as 90s, 3m or 1h30m, as in time=8h (got 'long')."),
        ("gpu", "slurm: 'gpu' is not an option such as partition=gpu. Did you mean 'gpus'?"),
        ("partition=", "slurm: 'partition=' is not an option such as partition=gpu. Did you mean 'partition'?"),
    ],
)
def test_a_mistake_in_them_is_one_sentence(text, sentence):
    with pytest.raises(RecipeError) as caught:
        parse_options(text)
    assert str(caught.value) == sentence


def test_no_slurm_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match=r"There is no SLURM here"):
        study(tiny_study(), out=tmp_path / "out", slurm="auto")


@pytest.mark.slow
def test_jobs_give_the_table_of_this_process_and_a_failure_is_told(tmp_path):
    asked = tiny_study(arms={**STUDY["arms"], "impossible": IMPOSSIBLE})
    found = study(asked, out=tmp_path / "jobs", slurm="local", seeds=1)
    assert table(found) == table(study(asked, out=tmp_path / "here", seeds=1))
    assert list(found.failures) == [("impossible", 0)]


@pytest.mark.slow
def test_a_warned_job_saves_its_run_is_queued_again_and_goes_on(tmp_path):
    """SLURM warns before time is up; submitit starts the job again, as the cluster would."""
    import submitit
    from submitit.core.job_environment import JobEnvironment

    from .networks import tiny

    recipe = tiny(**{**TINY, "steps": 3000, "checkpoint": "1000000 steps", "validation": "100%"})
    executor = submitit.AutoExecutor(folder=tmp_path / "jobs", cluster="local")
    executor.update_parameters(timeout_min=10)
    job = executor.submit(Task(recipe, tmp_path / "pool", 1, None))
    statuses = []

    def warn():
        while not (found := list((tmp_path / "pool").glob("*/metrics.jsonl"))) or len(Run(found[0].parent).metrics) < 5:
            time.sleep(0.05)
        run = Run(found[0].parent)
        os.kill(run.status["process"], JobEnvironment._usr_sig())
        while run.status["status"] == "running":
            time.sleep(0.02)
        statuses.append(run.status)

    thread = threading.Thread(target=warn, daemon=True)
    thread.start()
    outcome = job.result()
    thread.join(timeout=60)
    assert statuses[0]["status"] == "interrupted"
    assert statuses[0]["signal"] == signal.SIGTERM
    assert statuses[0]["step"] >= 5
    assert outcome.status == "finished"
    steps = [row["step"] for row in outcome.run.metrics if row["kind"] == "train"]
    assert steps == sorted(set(steps))
    assert steps[-1] == 3000
    assert json.loads((outcome.run.path / "status.json").read_text())["process"] != statuses[0]["process"]
