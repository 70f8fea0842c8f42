"""Gates: a network's regression test, with exit code, JUnit and JSON; the paired test on the same images."""

import json
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import scipy.stats

import vitclinic
from tests.training.conftest import TINY
from vitclinic._core.errors import RecipeError
from vitclinic._core.records import Scalar
from vitclinic.exam.gates import Gate, GateResult, find_correct, mcnemar, write_junit


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (0, 4), (5, 0), (7, 7), (20, 8), (3, 1)])
def test_p_is_scipy_s_exact_binomial_test(lost, gained):
    if lost + gained:
        wanted = scipy.stats.binomtest(lost, lost + gained, alternative="greater").pvalue
        assert mcnemar(lost, gained) == pytest.approx(wanted)
    else:
        assert mcnemar(lost, gained) == 1


@pytest.mark.parametrize(
    "text", ["accuracy", "accuracy.accuracy", "accuracy.accuracy=1", "accuracy.accuracy<x", "accuracy.nll>1e999", "<1"]
)
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(RecipeError, match="is not a condition"):
        Gate.parse(text)


def test_names_of_users_are_text_in_junit(tmp_path):
    results = [GateResult('<b>&"', "a.b<1", False, "a.b is 0 <i>."), GateResult("c", "d", True, "")]
    write_junit(tmp_path / "x.xml", results)
    suite = ElementTree.parse(tmp_path / "x.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert suite[0].get("classname") == '<b>&"'
    assert suite[0][0].get("message") == "a.b is 0 <i>."


def test_characters_that_xml_cannot_hold_are_left_out_and_the_folder_is_made(tmp_path):
    write_junit(tmp_path / "ci" / "x.xml", [GateResult("a\x1b[31m\udce9ü漢", "a.b<1", False, "is\x00 0.")])
    case = ElementTree.parse(tmp_path / "ci" / "x.xml").getroot()[0]
    assert (case.get("classname"), case[0].get("message")) == ("a?[31m?ü漢", "is? 0.")


@pytest.mark.parametrize("operator", ["<", "<=", ">", ">="])
def test_what_is_not_a_number_passes_no_gate(operator):
    measured = SimpleNamespace(scalars={"nll": Scalar(value=float("nan"))}, reason="")
    result = Gate.parse(f"accuracy.nll{operator}2").check("runs/a", {"accuracy": measured})
    assert not result.passed
    assert "not a number" in result.statement


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that has learned something, and one that has not."""
    folder = tmp_path_factory.mktemp("gates")
    good = vitclinic.train({**TINY, "steps": 60}, out=folder / "good")
    bad = vitclinic.train({**TINY, "steps": 1}, out=folder / "bad")
    return good, bad


@pytest.fixture
def examine(monkeypatch, capsys):
    def call(*words):
        from vitclinic.cli import main

        monkeypatch.setattr(sys, "argv", ["vitclinic", "examine", *map(str, words), "--no-report"])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().out

    return call


def test_a_gate_fails_where_its_condition_holds(runs, examine, tmp_path):
    good, _ = runs
    code, printed = examine(good.path, "--fail-on", "accuracy.accuracy<0.2", "--json")
    assert code == 0
    (gate,) = json.loads(printed)["gates"]
    assert gate["passed"]
    code, printed = examine(good.path, "--fail-on", "accuracy.nll>0", "--junit", tmp_path / "x.xml")
    assert code == 9
    assert "failed: fail-on accuracy.nll>0 (" in printed
    assert "; measured " in printed
    assert ElementTree.parse(tmp_path / "x.xml").getroot().get("failures") == "1"
    code, printed = examine(good.path, "--fail-on", "accuracy.acuracy<0")
    assert code == 2  # a mistake in the command, not in the network
    assert "accuracy has no metric 'acuracy'; available: accuracy, " in printed


def test_a_target_that_cannot_be_examined_is_an_error_in_junit(runs, examine, tmp_path):
    good, _ = runs
    code, _ = examine(good.path, "nosuch", "--fail-on", "accuracy.accuracy<0.2", "--junit", tmp_path / "x.xml")
    assert code == 2
    suite = ElementTree.parse(tmp_path / "x.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "0", "1")
    case = suite[-1]
    assert (case.get("classname"), case.get("name"), case[0].tag) == ("nosuch", "examine", "error")
    assert suite[0].get("name") == "fail-on accuracy.accuracy<0.2"


def test_a_baseline_that_cannot_be_compared_leaves_what_gates_say(runs, examine, tmp_path):
    good, _ = runs
    other = vitclinic.train({**TINY, "data": {"source": "digits", "split_seed": 1}, "steps": 1}, out=tmp_path / "other")
    code, printed = examine(
        good.path, "--baseline", other.path, "--fail-on", "accuracy.accuracy<0.2", "--junit", tmp_path / "x.xml"
    )
    assert code == 2
    assert "passed: fail-on accuracy.accuracy<0.2 (" in printed
    suite = ElementTree.parse(tmp_path / "x.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "0", "1")
    assert suite[-1].get("classname") == str(other.path)
    assert "different images" in suite[-1][0].get("message")


def test_curves_of_a_target_that_cannot_be_opened_are_not_those_of_the_baseline(runs, examine, tmp_path):
    good, _ = runs
    curves = tmp_path / "summary.csv"
    curves.write_text("epoch,train_loss\n0,1.5\n")
    target = "timm:resnet18@nosuch.pth"
    code, printed = examine(target, "--baseline", good.path, "--data", "digits", "--curves", curves, "--json")
    assert code == 2
    assert len(json.loads(printed)) == 1  # the baseline was measured, which has curves of its own


def test_a_baseline_alone_measures_no_more_than_accuracy(runs, examine):
    good, bad = runs
    _, printed = examine(bad.path, "--baseline", good.path, "--json")
    assert [list(exam["measurements"]) for exam in json.loads(printed)["exams"]] == [["accuracy"], ["accuracy"]]


def test_a_baseline_is_compared_on_the_same_images(runs, examine):
    good, bad = runs
    code, printed = examine(bad.path, "--probes", "accuracy", "--baseline", good.path, "--json")
    assert code == 9
    (result,) = json.loads(printed)["gates"]
    assert result["network"] == str(bad.path)
    assert "on the same 180 images" in result["statement"]
    code, _ = examine(good.path, "--probes", "accuracy", "--baseline", bad.path)
    assert code == 0


def test_correct_images_add_up_to_the_accuracy(runs):
    from vitclinic.exam import Examination

    good, _ = runs
    correct = find_correct(Examination(probes=["accuracy"]).open(good))
    assert (int(correct.sum()), len(correct)) == (good.results["test"]["correct"], good.results["test"]["count"])
