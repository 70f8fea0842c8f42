"""`kill -9` before a file is made, renamed or removed: the next call goes on to the same bits."""

import os
import random
import shutil
import signal
import sys
import time
from functools import partial

import pytest

from tests.fuzz.holding import photograph
from tests.fuzz.world import final_weights
from tests.processes import Command, run_command
from tests.rows import drop_timing
from vitclinic._core.records import Measurement
from vitclinic.training import Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it needs signals of Linux")

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
FEW, MANY = 2, 20
"""Kills in the default and in the slow tests, at places of their own each time."""


def kill_before(number, folder, tally, by=signal.SIGKILL):
    """Let this process be stopped before its change `number` of files below a folder; a dot in `tally` for each."""
    counter = os.open(tally, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    seen = 0

    def notice(event, given):
        nonlocal seen
        writes = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)
        if not (writes or event in CHANGES) or not isinstance(given[0], str | os.PathLike):
            return
        if os.path.abspath(given[0]).startswith(folder):
            os.write(counter, b".")
            seen += 1
            if seen == number:
                os.kill(os.getpid(), by)

    sys.addaudithook(notice)


def trained(place):
    run = Run(place / "new")
    assert run.status["status"] == "finished"
    return final_weights(place / "new"), drop_timing(run.metrics), run.results


def examined(place):
    found = [Measurement.read(file) for file in sorted((place / "run" / "exams").rglob("*.json"))]
    return {(each.probe, name): scalar for each in found for name, scalar in each.scalars.items()}


def copied(place):
    return {name: digest for name, digest in photograph(place / "copies").items() if not name.endswith(".lock")}


TRAIN = ["train", "recipe.yaml", "out=new", "-q"]
COMMANDS = {
    "train": (TRAIN, trained),
    "examine": (["examine", "run", "--probes", "norms,accuracy,variance", "--device", "cpu", "-q"], examined),
    "corrupt": (["corrupt", "photos", "--out", "copies", "--severity", "1,3", "--corruption", "fog,contrast"], copied),
}


def go_on(words, place, variables):
    """Run the command that goes on: the same, or `--resume` once there is a run, unless it is finished."""
    if words == TRAIN and (place / "new" / "recipe.yaml").exists():
        if Run(place / "new").status["status"] == "finished":
            return
        words = ["train", "--resume", "new", "-q"]
    done = run_command(*words, cwd=place, environment=variables)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("verb", COMMANDS)
def test_the_next_call_goes_on_to_the_same_bits(verb, count, world, tmp_path):
    words, outcome = COMMANDS[verb]

    def fresh(name):
        place = shutil.copytree(world, tmp_path / name)
        for made in ("run/exams", "cache"):
            shutil.rmtree(place / made)
        return place, {"VITCLINIC_CACHE": str(place / "cache")}

    def start(place, variables, number):
        hook = partial(kill_before, number, str(place), str(tmp_path / "tally"))
        process = Command(words, place, variables, hook)
        return process.wait(120), process.communicate()[1]

    place, variables = fresh("whole")
    code, said = start(place, variables, 0)
    assert code == 0, said
    wanted, total = outcome(place), (tmp_path / "tally").stat().st_size
    assert wanted
    assert total >= 10
    for number in random.Random(time.time()).sample(range(1, total + 1), count):
        place, variables = fresh(f"killed-{number}")
        code, said = start(place, variables, number)
        assert code == -signal.SIGKILL, (number, said)
        go_on(words, place, variables)
        assert outcome(place) == wanted, number
        shutil.rmtree(place)
    print(f"{verb}: killed before {count} of {total} changes of files")


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (["examine", "run", "--probes", "norms,accuracy,variance", "--device", "cpu"], "run/exams"),
        (["corrupt", "photos", "--out", "copies", "--corruption", "fog"], "copies"),
        (["study", "study.yaml", "--out", "studied"], "studied"),
        (["prescribe", "--data", "shapes:600", "--budget", "20s", "--out", "tried"], "tried"),
    ],
    ids=lambda words: words[0],
)
def test_sigterm_is_one_sentence_and_its_own_code(words, made, world, tmp_path):
    place = shutil.copytree(world, tmp_path / "world")
    shutil.rmtree(place / "run" / "exams")
    hook = partial(kill_before, 3, str(place / made), str(tmp_path / "tally"), signal.SIGTERM)
    process = Command(words, place, {"VITCLINIC_CACHE": str(place / "cache")}, hook)
    _, said = process.communicate(120)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "Traceback" not in said
    assert "interrupted" in said
