"""The demo: what the papers say is judged by intervals, on either side; and it goes on where it was stopped."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

import pytest

from tests.exam.findings.made import changed, exam
from vitclinic._core.errors import RunError
from vitclinic.cli import main
from vitclinic.experiments import demo as demonstration
from vitclinic.experiments.demo import CLAIMS, compare, judge_claims, train_both
from vitclinic.training import read_shipped_recipes

SMALL = """
model: {name: vit_tiny_fitted, patch_size: 8, embed_dim: 24, depth: 2, num_heads: 2}
data: {source: "shapes:60", augment: none}
steps: 4
batch_size: 20
workers: 0
"""


def network(accuracy):
    return exam(accuracy={"accuracy": accuracy})


PLAIN = network((0.40, 0.46))


def test_what_is_expected_is_of_numbers_and_recipes_that_there_are():
    assert {claim.number for claim in CLAIMS} == {"accuracy.accuracy"}
    assert set(demonstration.RECIPES) <= set(read_shipped_recipes())


def test_changes_as_the_papers_say():
    (accurate,) = judge_claims(PLAIN, network((0.50, 0.56)))
    assert accurate.title == "Higher accuracy, as published"
    assert accurate.severity == "healthy"
    assert accurate.statement == (
        "The accuracy is 0.43 (0.4 to 0.46) plain and 0.53 (0.5 to 0.56) cured, "
        "as wang2022, Table 1; park2022, Fig. 12 says."
    )
    assert accurate.numbers["accuracy.accuracy"].value == pytest.approx(0.53)
    assert accurate.numbers["plain accuracy.accuracy"].value == pytest.approx(0.43)


def test_changes_against_the_papers_are_said_to_be():
    (accurate,) = judge_claims(PLAIN, network((0.30, 0.36)))
    assert accurate.title == "Accuracy changes against the paper"
    assert accurate.severity == "notice"
    assert "against what wang2022, Table 1; park2022, Fig. 12 says" in accurate.statement


@pytest.mark.parametrize("cured", [network((0.45, 0.5)), network((0.3, 0.40)), PLAIN])
def test_intervals_that_meet_say_nothing(cured):
    (finding,) = judge_claims(PLAIN, cured)
    assert finding.title == "No clear change in accuracy"
    assert finding.severity == "notice"
    assert "the two intervals overlap" in finding.statement


@pytest.mark.parametrize(
    "cured",
    [
        {},
        changed(network((0.5, 0.56)), status="failed", reason="Why."),
        changed(network((0.5, 0.56)), data="c" * 64),
        network(math.nan),
    ],
    ids=["no time", "failed", "other images", "not a number"],
)
def test_what_was_not_measured_is_said_to_be_untested(cured):
    for plain, other in ((PLAIN, cured), (cured, PLAIN)):
        (found,) = judge_claims(plain, other)
        assert found.title == "No comparison of accuracy"
        assert found.severity == "notice"


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The demo on a network of seconds, in a folder with a name that YAML would read otherwise."""
    (tmp_path / "plain.yaml").write_text(SMALL)
    (tmp_path / "cure.yaml").write_text(SMALL + "treatments: [conv_stem]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demonstration, "RECIPES", (str(tmp_path / "plain.yaml"), str(tmp_path / "cure.yaml")))
    monkeypatch.setattr(demonstration, "LENGTH", {})
    monkeypatch.setattr(demonstration, "BUDGET", "6s")
    return Path("my: demo #1")


def test_both_are_trained_once_where_they_are_wanted(small, monkeypatch):
    plain, cured = train_both(small)
    assert (plain.path, cured.path) == (small / "plain", small / "cure")
    assert (plain.recipe.treatments.written, cured.recipe.treatments.written) == ([], ["conv_stem"])

    def never(*parts, **more):
        raise AssertionError("trained again")

    monkeypatch.setattr(demonstration, "train", never)
    monkeypatch.setattr(demonstration, "resume", never)
    assert [run.path for run in train_both(small)] == [plain.path, cured.path]


def test_a_training_that_was_stopped_goes_on(small, monkeypatch):
    whole = train_both(small / "whole")
    run, _ = train_both(small)
    (run.path / "metrics.jsonl").write_text("")
    run.write_status("interrupted", step=0, signal=2)
    shutil.rmtree(run.path / "checkpoints")
    again, _ = train_both(small)
    assert again.status["status"] == "finished"
    assert again.results["test"] == whole[0].results["test"]

    monkeypatch.setattr(demonstration, "resume", lambda path, **more: run)
    run.write_status("interrupted", step=0, signal=2)
    with pytest.raises(KeyboardInterrupt):
        train_both(small)


def test_somebody_elses_folder_is_left_alone(small):
    (small / "plain").mkdir(parents=True)
    (small / "plain" / "letters.txt").write_text("dear")
    with pytest.raises(RunError, match="not empty"):
        train_both(small)


def test_ctrl_c_says_how_to_go_on(small, monkeypatch, capsys):
    def stopped(*parts, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(demonstration, "train_both", stopped)
    monkeypatch.setattr(sys, "argv", ["vitclinic", "demo", "--out", str(small)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "interrupted; go on with: vitclinic demo --out 'my: demo #1'\n"


@pytest.mark.slow
def test_the_whole_story_in_one_page(small, monkeypatch, capsys):
    for _ in range(2):  # the second time everything is there
        monkeypatch.setattr(sys, "argv", ["vitclinic", "demo", "--out", str(small)])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0
        said = capsys.readouterr().out
        assert f"report: {small / 'report.html'}" in said
    text = (small / "report.html").read_text()
    done = compare(*train_both(small), small / "again.html")
    assert done.headline.endswith("with the recipe cure: test accuracy in as many steps")
    assert done.headline in text
    assert done.headline in said
    assert [one.name for one in done.exams] == [str(small / "plain"), str(small / "cure")]
    for one in done.exams:
        assert one.reused == {name for name, found in one.items() if found.status in ("ok", "not_converged")}
    for finding in done.expected:
        assert finding.title in said
        assert finding.title.replace("'", "&#39;") in text
    assert str(Path.cwd()) not in text
