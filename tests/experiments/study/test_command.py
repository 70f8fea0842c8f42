"""`vitclinic study` and `vitclinic list studies`, as a user meets them."""

import io
import json
import re

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from vitclinic._core.errors import RecipeError
from vitclinic.cli import app
from vitclinic.experiments.display import StudyDisplay, TimeLeft, show_result, statement
from vitclinic.experiments.runner import Outcome
from vitclinic.experiments.study.catalogue import shipped_studies
from vitclinic.experiments.study.conduct import study
from vitclinic.reports.study_result import read_result

from .networks import STUDY, tiny, tiny_study
from .test_conduct import DIVERGING, IMPOSSIBLE


def command(*words):
    done = CliRunner().invoke(app, list(words))
    if isinstance(done.exception, Exception) and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture
def file(tmp_path):
    """A study in which one arm diverges and another cannot be trained."""
    path = tmp_path / "study.yaml"
    arms = {**STUDY["arms"], "absurd": DIVERGING, "impossible": IMPOSSIBLE}
    path.write_text(yaml.safe_dump({**STUDY, "arms": arms}, sort_keys=False))
    return path


def test_the_verdict_is_first_then_the_tables_then_what_failed(file, tmp_path):
    done = command("study", str(file), "--out", str(tmp_path / "out"))
    lines = done.stdout.splitlines()
    assert done.exit_code == 7
    assert lines[0].startswith("T1: ")
    assert lines[0].endswith("a larger rate learns more (exploratory: 2 seeds with all numbers; a verdict needs 5)")
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in lines}
    assert rows["arm"] == ["runs", "accuracy", "norm", "diverged"]
    assert rows["absurd"] == ["2, 2 diverged", "-", "-", "2 of 2"]
    assert rows["impossible"] == ["2, 2 failed", "-", "-", "0 of 0"]
    assert rows["claim"] == ["measure", "mean", "interval", "p", "seeds", "status"]
    assert rows["fast weights grow"][0] == "norm"
    failed = [line for line in lines if line.startswith("failed: ")]
    assert len(failed) == 1
    assert failed[0].startswith("failed: impossible, seed 0, 1: spatial_smoothing does not fit")
    assert lines[-2] == f"all numbers: {tmp_path / 'out' / 'T1.json'}; runs: {tmp_path / 'out' / 'pool'}"
    assert lines[-1] == f"report: {tmp_path / 'out' / 'T1.html'}"


def test_json_is_the_stored_result_and_nothing_else(file, tmp_path):
    done = command("study", str(file), "--out", str(tmp_path / "out"), "--seeds", "1", "--json")
    stored = tmp_path / "out" / "T1.json"
    assert json.loads(done.stdout) == json.loads(stored.read_text())
    assert read_result(stored).command == "vitclinic study study.yaml --data digits --seeds 1"


def test_a_dry_run_trains_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("study", "C6", "--dry-run")
    assert done.exit_code == 0
    assert "10 runs (2 arms x 5 seeds)" in done.stdout
    assert "on two cores for training alone (an estimate)" in done.stdout
    assert [line.split("\t")[0] for line in done.stdout.splitlines()[2:5]] == ["arm", "ViT", "ViT + SAM"]
    plan = json.loads(command("study", "C6", "--dry-run", "--json", "--seeds", "1").stdout)
    assert (plan["claim"], plan["runs"], len(plan["arms"])) == ("C6", 2, 2)
    assert not list(tmp_path.iterdir())


def test_a_study_must_be_named_and_known():
    with pytest.raises(RecipeError, match="Which study"):
        command("study", "epochs=1")
    with pytest.raises(RecipeError, match=r"There is no study 'C66' .* Did you mean 'C6'\?"):
        command("study", "C66")


def test_the_catalogue_is_listed_with_command_time_and_what_was_seen():
    rows = json.loads(command("list", "studies", "--json").stdout)
    assert [row["name"] for row in rows] == list(shipped_studies())
    c6 = next(row for row in rows if row["name"] == "C6")
    assert c6["paper"] == "chen2022"
    assert re.fullmatch(r"about \d+", c6["minutes on two cores"])
    assert c6["command"] == "vitclinic study C6 --data cifar10/"
    assert c6.keys() == {"name", "title", "paper", "source", "command", "minutes on two cores", "seen here"}


def test_what_a_comparison_lacks_is_said_with_its_reason(tmp_path):
    measures = {"conv": {"probe": "variance", "scalar": "variance_change_conv"}}
    says = {"says": "s", "measure": "conv", "greater": ["fast", 0]}
    result = study(tiny_study(measures=measures, expectations=[says]), out=tmp_path, seeds=1)
    console = Console(file=io.StringIO(), width=200)
    show_result(result, console)
    told = [line for line in console.file.getvalue().splitlines() if line.startswith("no number: ")]
    (sentence,) = told
    assert sentence.startswith(
        "no number: conv of slow, seed 0: variance has no scalar 'variance_change_conv' for this"
    )
    assert statement(result).startswith("undecided: a larger rate learns more (exploratory: 0 seeds")


def test_progress_is_shown_on_a_terminal_only():
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
        with StudyDisplay(console) as display:
            display.on_progress("runs", 0, 3)
            display.on_run(Outcome(tiny(), "diverged"))
            display.on_progress("runs", 1.5, 3)
            display.bar.refresh()
        assert ("run 2 of 3, 1 diverged" in console.file.getvalue()) == terminal
        assert terminal or not console.file.getvalue()


def test_runs_that_were_found_do_not_shorten_the_time_left():
    left = TimeLeft()
    for done in range(11):  # ten found in a second
        assert left.update(done, 20, done / 10) is None
    assert left.update(10.5, 20, 61.0) == pytest.approx(60 / 0.5 * 9.5)
