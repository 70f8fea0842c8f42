"""What 0.1 computed is computed still, and what it stored still opens.

Numbers may differ from the record by 1e-9 of their size: other processors and libraries add in another order. With the
packages that wrote the record, `MKL_CBWR=COMPATIBLE python -m tests.golden.golden --exact` compares bit by bit. Weights
and directions are drawn in float32; a processor that draws others in the last bits (without AVX2 or MKL) is allowed
1e-3.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.golden import golden
from vitclinic import Measurement, Run, load_model, open_data, report, resume

SAME_DRAWS = golden.draws() == golden.record()["draws"]
EQUAL = {"rtol": 1e-9, "atol": 1e-12} if SAME_DRAWS else {"rtol": 1e-3, "atol": 1e-6}


def as_stored(found: object) -> object:
    """Return what JSON gives back."""
    return json.loads(json.dumps(found, allow_nan=False))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the stored run."""
    return Path(shutil.copytree(golden.RUN, tmp_path / "run-0.1"))


def test_the_record_is_of_all_cases() -> None:
    recorded = golden.record()
    assert list(recorded["probes"]) == list(golden.PROBES)
    assert list(recorded["treatments"]) == list(golden.TREATMENTS)
    for label, networks in recorded["probes"].items():
        assert {told["status"] for told in networks.values()} <= {"ok", "does_not_apply"}, label
        assert networks[golden.STORED]["status"] == "ok", label


@pytest.mark.parametrize("label", golden.PROBES)
def test_a_probe_finds_the_same_numbers(label: str) -> None:
    found = as_stored(golden.numbers_of(label))
    assert golden.differences(found, golden.record()["probes"][label], **EQUAL) == []


@pytest.mark.parametrize("case", golden.TREATMENTS)
def test_a_treatment_leads_to_the_same_weights(case: str) -> None:
    """A weight that a norm behind it cancels has a gradient of rounding errors, which AdamW makes larger."""
    found = as_stored(golden.weights_of(case))
    atol = max(EQUAL["atol"], 1e-11)
    assert golden.differences(found, golden.record()["treatments"][case], EQUAL["rtol"], atol) == []


def test_the_stored_run_opens(run: Path) -> None:
    opened, recorded = Run.open(run), golden.record()["run"]
    assert golden.differences(as_stored(golden.run_facts(run)), recorded, **EQUAL) == []
    assert opened.status["status"] == "finished"
    given = {**golden.RECIPE, "out": opened.recipe.out}
    assert opened.recipe.steps == given["steps"]
    assert opened.recipe.plain()["treatments"] == given["treatments"]
    data = open_data(opened.recipe.data)
    assert data.digest == recorded["data"]
    assert opened.recipe.digest(data.digest) == recorded["digest"]
    with torch.no_grad():
        assert load_model(run)(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_its_measurements_are_read(run: Path) -> None:
    assert as_stored(golden.stored_numbers(run)) == golden.record()["stored"]
    for path in (run / "exams").glob("*.json"):
        before, copied = Measurement.read(path), run / "copy.json"
        before.write(copied)
        assert Measurement.read(copied) == before


def test_an_exam_reuses_them(run: Path) -> None:
    before = files(run / "exams")
    exam = golden.examined(run)
    made_again = golden.OF_THE_MACHINE | golden.REDEFINED
    assert exam.reused | made_again == exam.keys() | made_again
    assert not exam.reused & golden.REDEFINED
    assert {exam[name].subject for name in exam.reused} == {exam.subject}
    kept = {name for name in before if not name.startswith(tuple(golden.OF_THE_MACHINE))}
    after = files(run / "exams")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


def test_an_exam_within_a_budget_keeps_to_its_plan(run: Path) -> None:
    before = files(run / "exams")
    exam = golden.planned(run)
    assert exam.reused == exam.keys() == {"accuracy", "norms", "occlusion"}
    after = files(run / "exams")
    assert {name: after[name] for name in before} == before
    # Plans have another schema since, and what an exam was asked for is kept.
    assert all(name.endswith((".plan", "origins.jsonl")) for name in after.keys() - before.keys())


def test_its_report_is_written(run: Path) -> None:
    page = report(run)
    assert page == run / "report.html"
    text = page.read_text(encoding="utf-8")
    for name in ("context_broadcasting", "vit_tiny_fitted", "Sharpness", "Fourier"):
        assert name in text, name


def test_it_is_not_resumed(run: Path) -> None:
    before = files(run)
    with pytest.raises(Exception, match="is finished; there is nothing to resume"):
        resume(run)
    assert files(run) == before


def test_one_that_was_cut_off_goes_on_to_the_same_weights() -> None:
    """In float32, where other processors differ sooner."""
    assert golden.differences(golden.resumed_weights(), golden.record()["resumed"], rtol=1e-3, atol=1e-4) == []


def test_differences_are_told() -> None:
    recorded = {"a": [1.0, 1e-20], "b": {"c": "ok"}}
    assert golden.differences(recorded, recorded) == []
    assert golden.differences({"a": [1.0, 0.0], "b": {"c": "ok"}}, recorded, rtol=1e-9) == []
    assert golden.differences({"a": [1.0, 0.0], "d": 1}, recorded) == [
        "/a/1: 0.0 instead of 1e-20",
        "/b: 'missing' instead of {'c': 'ok'}",
        "/d: 1 instead of 'missing'",
    ]
