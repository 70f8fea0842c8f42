"""Reports from what is stored: the right measurements of the right network, with its training, findings and facts."""

import re
import shutil

import pytest

import vitclinic
from tests.probes.subjects import noise, vit
from tests.reports.made import measurement, provenance
from vitclinic._core.errors import RecipeError, RunError
from vitclinic.cli import main
from vitclinic.exam.reporting import choose_measurements, report, view_exam
from vitclinic.training import Run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small run that was examined."""
    out = tmp_path_factory.mktemp("runs") / "a"
    vitclinic.train(
        "shapes",
        {"epochs": None, "schedule.warmup": 0, "optimizer.lr": 0.05, "checkpoint.keep_epochs": [0]},
        data="shapes:60",
        model={"name": "vit_tiny_patch16_224", "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2},
        steps=3,
        batch_size=20,
        out=out,
    )
    vitclinic.examine(str(out), probes=["norms", "cost"], limit=10)
    return out


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A copy of it, which a test may change, in the current directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "runs" / "a")
    return tmp_path / "runs" / "a"


def at(date, **parts):
    return measurement(parts.pop("probe", "accuracy"), provenance=provenance(date=date), **parts)


def test_the_newest_of_several_measurements_is_shown():
    old, new = at("2026-01-01T00:00:00Z"), at("2026-02-01T00:00:00Z")
    assert choose_measurements([[new, old]]) == [{"accuracy": new}]


def test_a_usable_measurement_is_shown_before_a_newer_failure():
    well = at("2026-01-01T00:00:00Z")
    assert choose_measurements([[well, at("2026-02-01T00:00:00Z", status="failed", reason="broke")]]) == [
        {"accuracy": well}
    ]


def test_networks_are_compared_on_the_images_that_most_probes_saw():
    first = [
        at("2026-01-01T00:00:00Z"),
        at("2026-01-01T00:00:00Z", probe="norms"),
        at("2026-02-01T00:00:00Z", data="fog"),
    ]
    second = [at("2026-01-01T00:00:00Z"), at("2026-03-01T00:00:00Z", data="fog")]
    assert [one["accuracy"].data for one in choose_measurements([first, second])] == ["test images", "test images"]


def test_the_page_of_a_run_lies_in_it_and_shows_what_it_is(run):
    page = report("runs/a")
    assert page.resolve() == run / "report.html"
    text = page.read_text()
    for shown in (
        "Report: runs/a",
        "vit_tiny_patch16_224",
        "shapes:60, 10 classes, 32 x 32",
        "Test accuracy",
        "3 steps",
    ):
        assert shown in text
    assert str(run.parent) not in text
    assert 'id="training"' in text
    assert 'id="probe-norms"' in text


def test_several_targets_are_one_page_here(run, tmp_path):
    exam = vitclinic.examine(vit(), noise(), probes=["norms"])
    page = report(["runs/a", exam.folder], title="Both")
    assert page.resolve() == tmp_path / "report.html"
    text = page.read_text()
    assert "<title>Both</title>" in text
    assert "runs/a" in text
    assert re.search(r"VisionTransformer(?!-[0-9a-f]{8})", text)


def test_another_checkpoint_is_another_network(run, caplog):
    with pytest.raises(RunError, match="Nothing is stored for 'runs/a@epoch-0'; measure it first"):
        report("runs/a@epoch-0")
    exam = vitclinic.examine("runs/a@epoch-0", probes=["norms"], limit=10)
    norm = f"{exam['norms'].scalars['weight_norm'].value:.4g}"
    assert norm in report("runs/a@epoch-0", "other.html").read_text()
    assert norm not in report("runs/a", "best.html").read_text()  # though it was measured later
    assert not caplog.records


def test_a_run_without_its_weights_is_still_reported_on(run, caplog):
    shutil.rmtree(run / "checkpoints")
    assert 'id="probe-norms"' in report("runs/a").read_text()
    assert "was measured last" in caplog.text


def test_a_run_that_was_only_trained_has_its_curves(run):
    shutil.rmtree(run / "exams")
    text = report("runs/a").read_text()
    assert 'id="training"' in text
    assert "Nothing measured yet" in text


def test_a_run_that_diverged_at_once_has_its_curves_and_the_finding(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    recipe = {
        "model": {"name": "vit_tiny_fitted", "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2},
        "data": {"source": "digits", "limit": 100, "augment": "none"},
        "optimizer": {"name": "sgd", "lr": 1e9},
        "schedule": {"name": "constant", "warmup": 0},
        **{"clip": None, "steps": 20, "workers": 0, "out": "runs/broken"},
    }
    run = vitclinic.train(recipe)
    assert run.status["status"] == "diverged"
    assert not list(run.path.glob("checkpoints/*"))
    text = report("runs/broken").read_text()
    assert 'id="training"' in text
    assert "Training diverged" in text
    assert "on its training only" in caplog.text
    with pytest.raises(RunError, match="no checkpoint 'last'"):
        report("runs/broken@last")


def test_a_damaged_measurement_is_left_out_with_a_message(run, caplog):
    next((run / "exams").glob("cost-*.json")).write_text("{")
    text = report("runs/a").read_text()
    assert 'id="probe-norms"' in text
    assert 'id="probe-cost"' not in text
    assert "It is left out" in caplog.text


def test_what_holds_no_measurements_is_a_sentence(tmp_path):
    with pytest.raises(RecipeError, match="neither a run directory nor a folder with measurements"):
        report(tmp_path / "nothing")


def test_findings_compare_with_the_reference(run):
    stored = {"accuracy": measurement("accuracy")}
    network = view_exam("a", stored, Run.open(run))
    assert len(network.training) == len(Run.open(run).metrics)
    assert network.facts["Treatments"] == "none"
    assert view_exam("a", stored).training == []


def test_the_verb(run, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["vitclinic", "report", "runs/a", "--out", "x/page.html", "--no-images", "--title", "T"]
    )
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert "report: x/page.html" in capsys.readouterr().out
    text = (run.parents[1] / "x" / "page.html").read_text()
    assert "<title>T</title>" in text
    assert "Pictures of the data were left out" in text
