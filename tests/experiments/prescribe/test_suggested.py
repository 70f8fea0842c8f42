"""What findings suggest comes first."""

import pytest

from vitclinic._core.errors import RunError
from vitclinic._core.records import Finding, Measurement, Scalar, Suggestion
from vitclinic.experiments.prescribe import arms
from vitclinic.training import build_recipe, train

from .made import RECIPE


@pytest.fixture
def run(tmp_path):
    return train({**RECIPE, "steps": 1, "out": str(tmp_path / "run")})


def finding(severity, *treatments):
    suggestions = tuple(Suggestion(treatment=name, paper="p", why="w") for name in treatments)
    return Finding(
        rule="r",
        title="t",
        severity=severity,
        statement="s",
        numbers={"training.gap": Scalar(value=0.25), "other": Scalar(value=1.0)},
        threshold="t",
        basis="heuristic",
        suggestions=suggestions,
    )


def test_remedies_of_findings_in_their_order_with_the_numbers(run, monkeypatch):
    from vitclinic.exam import examine

    examine(run.path, probes=["norms"])
    seen = {}

    def find(measurements, training):
        seen.update(measurements)
        assert training == run.metrics
        return [
            finding("problem", "sam", "data.augment=deit", "data.augment=none", "unheard_of"),
            finding("notice", "gap_head", "sam", "model.depth=3", "epochs=100", "model.num_heads=4"),
        ]

    monkeypatch.setattr(arms, "find", find)
    recipe = build_recipe({**RECIPE, "treatments": ["gap_head"]})
    found = arms.read_reasons(run.path, recipe)
    # Not what the recipe has already, what nobody knows, nor what all arms have in common; the table's names.
    names = ["sam", "deit augmentation", "sam", "model.depth=3", "model.num_heads=4"]
    assert [remedy.name for remedy, _ in found] == [reason.remedy for _, reason in found] == names
    assert found[3][0].apply(recipe).model.depth == 3
    _, reason = found[0]
    assert (reason.finding, reason.severity, reason.statement, reason.why) == ("t", "problem", "s", "w")
    assert next(iter(reason.numbers.items())) == ("training.gap", 0.25)
    assert list(seen) == ["norms"]
    assert isinstance(seen["norms"], Measurement)


def test_a_run_without_an_exam_is_a_sentence(run):
    with pytest.raises(RunError, match="has not been examined"):
        arms.read_reasons(run.path, build_recipe(RECIPE))


def test_an_exam_is_read_as_its_report_reads_it(run, monkeypatch, caplog):
    """A damaged file is left out, and a later failure, or another checkpoint, does not hide what was measured."""
    from vitclinic.exam import examine

    exam = examine(run.path, probes=["norms", "cost"], limit=10)
    exam.files["cost"].write_text("{")
    failed = exam["norms"].model_copy(update={"status": "failed", "reason": "broke", "scalars": {}, "units": []})
    failed.write(exam.folder / "norms-zzz.json")
    seen = {}
    monkeypatch.setattr(arms, "find", lambda measurements, training: seen.update(measurements) or [])
    assert arms.read_reasons(run.path, build_recipe(RECIPE)) == []
    assert {name: found.status for name, found in seen.items()} == {"norms": "ok"}
    assert "It is left out" in caplog.text
