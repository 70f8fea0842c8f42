"""The command itself: killed, it goes on to the same table; interrupted, it says one sentence."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from .made import RECIPE

PROGRAM = """
from vitclinic.experiments.prescribe import plan
plan.SELECTION_SEEDS, plan.FINAL_SEEDS = 1, (3, 3)
from vitclinic.cli import main
main()
"""
"""The command with few seeds: a trial here is mostly the making of its directory."""


@pytest.fixture
def command(tmp_path):
    """`vitclinic prescribe`, with a recipe of four steps."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({**RECIPE, "steps": 4, "optimizer": {"name": "sgd", "lr": 0.1}}))
    options = ["--budget", "10m", "--treatments", "gap_head,{context_broadcasting: {scaled: true}}"]

    def make(out):
        return [sys.executable, "-c", PROGRAM, "prescribe", str(recipe), *options, "--out", str(tmp_path / out)]

    return make


def start(command):
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)


def wait_for(condition, process):
    while process.poll() is None and not condition():
        time.sleep(0.01)
    assert process.poll() is None


def answer(folder):
    found = json.loads((folder / "prescription.json").read_text())
    del found["timing"]
    return found


def test_killed_it_goes_on_to_the_table_that_it_would_have_had(command, tmp_path):
    out = tmp_path / "killed"
    process = start(command("killed"))
    # In the middle of the second trial: the first has ended, and a checkpoint of the second may be half written.
    wait_for(lambda: len(list(out.glob("runs/*/metrics.jsonl"))) >= 2, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (out / "prescription.json").exists()

    process = start(command("killed"))
    wait_for(lambda: len(list(out.glob("runs/*/metrics.jsonl"))) >= 4, process)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.strip() == "interrupted; every trial that has ended is stored, and the same command goes on"

    done = subprocess.run(command("killed"), capture_output=True, text=True, check=True)
    assert "Selection (optimistic)" in done.stdout
    assert "fresh seeds" in done.stdout

    # Without any interruption, by the same measured costs.
    (tmp_path / "whole").mkdir()
    shutil.copy(out / "plan.json", tmp_path / "whole" / "plan.json")
    subprocess.run(command("whole"), capture_output=True, check=True)
    assert answer(out) == answer(tmp_path / "whole")


def test_without_data_it_asks_for_it():
    done = subprocess.run([sys.executable, "-m", "vitclinic", "prescribe"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: Which data? Give --data D, or a recipe that names it."
