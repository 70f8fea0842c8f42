"""Commands beside findings: they name what was examined, and they work."""

import html
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import vitclinic
from tests.processes import run_command
from vitclinic._core.records import Finding, Scalar, Suggestion
from vitclinic.cli.common import recipe_and_changes
from vitclinic.exam.commands import Origin, add_commands
from vitclinic.exam.display import show_exams, to_json
from vitclinic.training import build_recipe
from vitclinic.training.run import find_run

NASTY = "my $(touch x) 'photos' #1: \"a\"/"


def finding(*treatments, numbers=("accuracy.ece", "accuracy.accuracy", "sharpness.lambda_max"), severity="problem"):
    return Finding(
        rule="made",
        title="Made",
        severity=severity,
        statement="It is so.",
        numbers={name: Scalar(value=0.5) for name in numbers},
        threshold="ours.",
        basis="heuristic",
        suggestions=tuple(Suggestion(treatment=name, paper="P", why="W.") for name in treatments),
    )


def commands(origin, *treatments, **options):
    (found,) = add_commands([finding(*treatments, **options)], origin)
    return [one.command for one in found.suggestions], found.again


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run in a folder with an odd name."""
    monkeypatch.chdir(tmp_path)
    recipe = {"data": "digits", "data.limit": 40, "steps": 1, "batch_size": 8, "model": "vit_tiny_fitted"}
    small = {"model.depth": 1, "model.embed_dim": 12, "model.num_heads": 2, "treatments": ["gap_head"]}
    words = [f"{key}={json.dumps(value)}" for key, value in {**recipe, **small}.items()]
    return vitclinic.train(None, [*words, "out=my runs/a"])


def test_a_run_is_trained_again_with_each_suggestion_and_measured_beside_it(run):
    origin = Origin("my runs/a", run=run)
    treat, again = commands(origin, "sam", "data.augment.smoothing=0.1")
    assert treat == [
        "vitclinic train 'my runs/a/recipe.yaml' 'treatments=[gap_head, sam]' 'out=my runs/a-sam'",
        "vitclinic train 'my runs/a/recipe.yaml' data.augment.smoothing=0.1 'out=my runs/a-data.augment.smoothing-0.1'",
    ]
    both = "'my runs/a-sam' 'my runs/a-data.augment.smoothing-0.1'"
    assert again == f"vitclinic examine 'my runs/a' {both} --probes accuracy,sharpness"
    for command, out in zip(treat, ("my runs/a-sam", "my runs/a-data.augment.smoothing-0.1"), strict=True):
        recipe, changes = recipe_and_changes(shlex.split(command)[2:])
        built = build_recipe(recipe, changes)
        assert Path(built.out) == Path(out)
        assert built.model.name == run.recipe.model.name
    assert [one.name for one in build_recipe(*recipe_and_changes(shlex.split(treat[0])[2:])).treatments] == [
        "gap_head",
        "sam",
    ]


def test_what_the_network_has_already_is_not_a_command(run):
    treat, again = commands(Origin("my runs/a", run=run), "gap_head")
    assert treat == [None]
    assert again == "vitclinic examine 'my runs/a' --probes accuracy,sharpness"


def test_what_is_about_training_alone_is_seen_in_the_report(run):
    _, again = commands(Origin("my runs/a", run=run), "sam", numbers=("training.loss",))
    assert again == "vitclinic report 'my runs/a' 'my runs/a-sam'"


def test_a_network_of_a_library_starts_from_its_weights():
    origin = Origin("timm:resnet18", data=NASTY, options={"split": "val", "limit": 100})
    (treat,), again = commands(origin, "sam")
    words = shlex.split(treat)
    assert words[:2] == ["vitclinic", "train"]
    assert words[3:] == ["init=timm:resnet18", "treatments=[sam]", "out=runs/timm-resnet18-sam"]
    recipe, changes = recipe_and_changes(words[2:])
    assert build_recipe(recipe, changes).data.source == NASTY
    assert shlex.split(again)[2:] == [
        *("timm:resnet18", "runs/timm-resnet18-sam", "--data", NASTY, "--split", "val", "--limit", "100"),
        *("--probes", "accuracy,sharpness"),
    ]
    untrained = Origin("timm:resnet18", data="digits", options={"random_weights": True})
    (treat,), again = commands(untrained, "sam")
    assert treat == "vitclinic train data=digits model=resnet18 'treatments=[sam]' out=runs/timm-resnet18-sam"
    assert "--random-weights --probes" in again


def test_a_function_of_ones_own_can_be_measured_again_but_not_trained():
    assert commands(Origin("nets:build", data="digits"), "sam") == (
        [None],
        "vitclinic examine nets:build --data digits --probes accuracy,sharpness",
    )


def test_of_a_module_and_a_loader_the_commands_are_python():
    treat, again = commands(Origin(None, named=False, options={"limit": 9}), "conv_stem", "sam", "data.augment=deit")
    assert treat == ['model = vitclinic.treat(model, "conv_stem")', None, None]
    assert again == 'vitclinic.examine(model, data=loader, limit=9, probes=["accuracy", "sharpness"])'
    assert commands(Origin(None, data="digits"))[1].startswith('vitclinic.examine(model, data="digits", probes=')


def test_they_are_in_terminal_json_notebook_and_page(tmp_path, capsys):
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    loader = [(torch.rand(40, 3, 2, 2), torch.arange(40) % 2)]
    exam = vitclinic.examine(network, data=loader, probes=["accuracy"], out=tmp_path)
    (found,) = [one for one in exam.findings if one.rule == "guessing"]
    assert found.again == 'vitclinic.examine(model, data=loader, probes=["accuracy"])'
    show_exams([exam], Console(width=60))
    assert f"  then measure again: {found.again}\n" in capsys.readouterr().out  # in one line, to be copied
    assert found.again in [one["again"] for one in to_json(exam)["findings"]]
    assert "vitclinic.examine(model, data=loader" in exam._repr_html_()
    page = exam.report(tmp_path / "page.html").read_text()
    assert "vitclinic.examine(model, data=loader, probes=[&#34;accuracy&#34;])" in page


def test_the_report_of_a_stored_run_has_them_too(run):
    exam = vitclinic.examine("my runs/a", probes=["accuracy"])
    assert exam.findings[0].again.startswith("vitclinic examine 'my runs/a'")
    assert "vitclinic examine &#39;my runs/a&#39;" in Path(vitclinic.report("my runs/a")).read_text()


def test_the_report_repeats_the_data_and_options_of_the_exam(run):
    vitclinic.examine("my runs/a", "digits", probes=["accuracy"], split="train", limit=30)
    page = html.unescape(Path(vitclinic.report("my runs/a")).read_text())
    assert " --data digits --split train --limit 30 --probes accuracy" in page


def test_the_report_of_an_exam_without_a_run_has_the_commands_of_the_exam(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = "timm:vit_tiny_patch16_224?img_size=8&patch_size=2&depth=1&num_classes=10"
    exam = vitclinic.examine(target, "digits", probes=["accuracy"], random_weights=True, limit=40)
    wanted = [finding.again for finding in exam.findings]
    assert wanted
    page = html.unescape(Path(vitclinic.report(exam.folder)).read_text())
    assert all(command in page for command in wanted)


@pytest.mark.parametrize("here", ["/", "elsewhere"])
def test_the_commands_on_a_page_lead_to_the_run_from_where_it_was_written(here, run, tmp_path, monkeypatch):
    vitclinic.examine("my runs/a", probes=["accuracy"])
    (tmp_path / "elsewhere").mkdir()
    place = run.path.absolute()
    monkeypatch.chdir(tmp_path / here)
    page = html.unescape(Path(vitclinic.report(place, tmp_path / "page.html")).read_text())
    commands = re.findall(r"<code>(vitclinic [^<]+)</code>", page)
    assert commands
    for command in commands:
        assert find_run(shlex.split(command)[2].removesuffix("/recipe.yaml"))[0].samefile(place)


def test_of_images_that_are_normalized_the_command_says_so(tmp_path):
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    loader = [(2 * torch.rand(40, 3, 2, 2) - 1, torch.arange(40) % 2)]
    how = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "normalized": True, "output": lambda found: found}
    exam = vitclinic.examine(network, data=loader, probes=["accuracy"], out=tmp_path, **how)
    (again,) = {found.again for found in exam.findings}
    halves = "[0.5, 0.5, 0.5]"
    assert again == (
        f"vitclinic.examine(model, data=loader, mean={halves}, std={halves}, normalized=True, output=output,"
        ' probes=["accuracy"])'
    )
    names = {"vitclinic": vitclinic, "model": network, "loader": loader, "output": how["output"]}
    assert eval(again, names)["accuracy"].status == "ok"  # noqa: S307 (our own text)


@pytest.mark.slow
def test_the_printed_commands_of_a_finding_train_and_measure_again(run):
    """What a reader copies from the terminal: every suggestion is trained, then all are measured beside the run."""
    printed = run_command(
        "examine", "my runs/a", "--probes", "accuracy,norms,attention_entropy", cwd=run.path.parents[1]
    )
    assert printed.returncode == 0, printed.stderr
    lines = [line.strip() for line in printed.stdout.splitlines()]
    commands = list(dict.fromkeys(found[1] for line in lines if (found := re.search(r": (vitclinic .*)$", line))))
    trained = [command for command in commands if command.startswith("vitclinic train")]
    measured = [command for command in commands if command.startswith("vitclinic examine")]
    assert trained
    assert measured
    for command in [*trained, *measured]:
        done = run_command(*shlex.split(command)[1:], cwd=run.path.parents[1])
        assert done.returncode == 0, (command, done.stderr)
    outs = {shlex.split(command)[-1].removeprefix("out=") for command in trained}
    assert len(outs) == len(trained)
    assert outs <= {word for command in measured for word in shlex.split(command)}
