"""What findings suggest comes first."""

import pytest

from vitclinic._core.errors import RunError
from vitclinic._core.records import Finding, Measurement, Suggestion
from vitclinic.experiments.prescribe import plan
from vitclinic.training import train

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
        numbers={},
        threshold="t",
        basis="heuristic",
        suggestions=suggestions,
    )


def test_treatments_of_findings_in_their_order_and_nothing_else(run, monkeypatch):
    from vitclinic.exam import examine

    examine(run.path, probes=["norms"])
    seen = {}

    def find(measurements, training):
        seen.update(measurements)
        assert training == run.metrics
        return [finding("problem", "sam", "data.augment=deit"), finding("notice", "gap_head", "sam")]

    monkeypatch.setattr(plan, "find", find)
    assert plan.suggest_treatments(run.path) == ["sam", "gap_head"]
    assert list(seen) == ["norms"]
    assert isinstance(seen["norms"], Measurement)


def test_a_run_without_an_exam_is_a_sentence(run):
    with pytest.raises(RunError, match="has not been examined"):
        plan.suggest_treatments(run.path)


def test_an_exam_is_read_as_its_report_reads_it(run, monkeypatch, caplog):
    """A damaged file is left out, and a later failure, or another checkpoint, does not hide what was measured."""
    from vitclinic.exam import examine

    exam = examine(run.path, probes=["norms", "cost"], limit=10)
    exam.files["cost"].write_text("{")
    failed = exam["norms"].model_copy(update={"status": "failed", "reason": "broke", "scalars": {}, "units": []})
    failed.write(exam.folder / "norms-zzz.json")
    seen = {}
    monkeypatch.setattr(plan, "find", lambda measurements, training: seen.update(measurements) or [])
    assert plan.suggest_treatments(run.path) == []
    assert {name: found.status for name, found in seen.items()} == {"norms": "ok"}
    assert "It is left out" in caplog.text
