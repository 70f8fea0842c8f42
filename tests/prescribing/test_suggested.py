"""What findings suggest comes first."""

import pytest

from vitclinic.errors import RunError
from vitclinic.finding import Finding, Suggestion
from vitclinic.measurement import Measurement
from vitclinic.prescribing import suggested
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
    from vitclinic.clinic import examine

    examine(run.path, probes=["norms"])
    seen = {}

    def find(measurements, training):
        seen.update(measurements)
        assert training == run.metrics
        return [finding("problem", "sam", "data.augment=deit"), finding("notice", "gap_head", "sam")]

    monkeypatch.setattr(suggested, "find", find)
    assert suggested.suggested_treatments(run.path) == ["sam", "gap_head"]
    assert list(seen) == ["norms"]
    assert isinstance(seen["norms"], Measurement)


def test_a_run_without_an_exam_is_a_sentence(run):
    with pytest.raises(RunError, match="has not been examined"):
        suggested.suggested_treatments(run.path)
