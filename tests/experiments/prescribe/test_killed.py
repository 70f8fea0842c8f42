"""The command itself: killed, it goes on to the same table; interrupted, it says one sentence."""

import json
import os
import shutil
import signal
import time

import pytest

from tests.processes import Command, run_command
from vitclinic.experiments.prescribe import plan
from vitclinic.experiments.prescribe.conduct import prescribe
from vitclinic.treatments.treatment import TREATMENTS

from .made import RECIPE, louder


def with_few_seeds():
    """Prepare the command: a trial here is mostly the making of its directory."""
    TREATMENTS.register(louder("tenfold", 10.0))
    plan.SELECTION_SEEDS, plan.FINAL_SEEDS, plan.LARGEST_UNSEEN = 1, (3, 3), 1.0


@pytest.fixture
def command(tmp_path):
    """`vitclinic prescribe`, with a recipe that learns too slowly and two remedies that go together."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({**RECIPE, "steps": 20}))
    options = ["--budget", "10m", "--treatments", "tenfold", "--try", "optimizer.lr=0.001"]

    def make(out):
        return Command(["prescribe", str(recipe), *options, "--out", str(tmp_path / out)], before=with_few_seeds)

    return make


def kill_when(process, out, runs, how):
    """Send a signal as soon as so many trials have begun, and return what the command said."""
    while process.poll() is None and len(list(out.glob("runs/*/metrics.jsonl"))) < runs:
        time.sleep(0.01)
    assert process.poll() is None
    os.killpg(process.pid, how)
    return process.communicate(timeout=120)[1]


def answer(folder):
    found = json.loads((folder / "prescription.json").read_text())
    del found["timing"]
    return found


def finish(command, tmp_path, out):
    """Let the interrupted command go on, and compare it with a call that was not, by the same measured costs."""
    assert not (out / "prescription.json").exists()
    said, _ = command(out.name).communicate()
    assert "Selection (optimistic)" in said
    assert "fresh seeds" in said
    (tmp_path / "whole").mkdir()
    shutil.copy(out / "plan.json", tmp_path / "whole" / "plan.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TREATMENTS._known, "tenfold", louder("tenfold", 10.0))
        patch.setattr(plan, "SELECTION_SEEDS", 1)
        patch.setattr(plan, "FINAL_SEEDS", (3, 3))
        patch.setattr(plan, "LARGEST_UNSEEN", 1.0)
        asked = {"budget": "10m", "treatments": ["tenfold"], "remedies": ["optimizer.lr=0.001"]}
        prescribe(tmp_path / "recipe.yaml", **asked, out=tmp_path / "whole")
    assert answer(out) == answer(tmp_path / "whole")
    assert [rung["name"] for rung in answer(out)["rungs"]] == ["rung 1", "growth 1"]


# Trials 1 to 3 are the rung's, 4 is the growth's (the others of it have been trained), 5 to 10 are the final's.


def test_killed_it_goes_on_to_the_table_that_it_would_have_had(command, tmp_path):
    out = tmp_path / "killed"
    # In the middle of a trial: the ones before have ended, and a checkpoint may be half written.
    kill_when(command("killed"), out, 4, signal.SIGKILL)
    finish(command, tmp_path, out)


@pytest.mark.slow
def test_killed_in_every_trial_it_goes_on_to_the_table_that_it_would_have_had(command, tmp_path):
    for runs in range(1, 9):
        kill_when(command("killed"), tmp_path / "killed", runs, signal.SIGKILL)
    error = kill_when(command("killed"), tmp_path / "killed", 9, signal.SIGINT)
    assert error.strip() == "interrupted; every trial that has ended is stored; run the same command to resume"
    finish(command, tmp_path, tmp_path / "killed")


def test_without_data_it_asks_for_it():
    done = run_command("prescribe")
    assert done.returncode == 2
    assert done.stderr.strip() == "error: Which data? Give --data D, or a recipe that names it."
