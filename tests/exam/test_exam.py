"""What an exam gives in Python: figures, findings, a page and something to look at in a notebook."""

from __future__ import annotations

import pickle
from pathlib import Path

import plotly.graph_objects as go
import pytest

import vitclinic
from tests.exam.test_planning import network
from tests.probes.subjects import noise
from vitclinic._core.errors import RecipeError
from vitclinic._core.records import Measurement


@pytest.fixture(scope="module")
def exams(tmp_path_factory: pytest.TempPathFactory) -> vitclinic.Exams:
    probes = ["accuracy", "fourier", "norms", "attention_entropy"]
    folder = tmp_path_factory.mktemp("exams")
    return vitclinic.examine([network(), network("resnet")], noise(), probes=probes, out=folder)


def test_exams_are_a_list_of_which_the_first_is_the_reference(exams: vitclinic.Exams) -> None:
    assert isinstance(exams, list)
    assert [exam.reference for exam in exams] == [None, exams[0]]
    one, other = exams
    assert one.name != other.name
    assert list(one) == ["accuracy", "fourier", "norms", "attention_entropy"]


def test_a_measurement_of_an_exam_is_the_one_that_is_stored(exams: vitclinic.Exams) -> None:
    for probe, measurement in exams[0].items():
        stored = Measurement.read(exams[0].files[probe])
        assert measurement == stored
        assert stored == measurement
        assert measurement.plain() == stored.plain()
    again = pickle.loads(pickle.dumps(exams[0]["fourier"]))  # noqa: S301 (our own, from this line)
    assert again == exams[0]["fourier"]


def test_a_figure_of_one_network_and_of_all(exams: vitclinic.Exams) -> None:
    alone, both = exams[0]["fourier"].figure(), exams.figure("fourier")
    assert isinstance(alone, go.Figure)
    assert len(both.data) > len(alone.data) > 0
    assert exams[0].name in alone.to_json()
    assert all(exam.name in both.to_json() for exam in exams)


def test_a_figure_that_there_is_not_is_a_sentence(exams: vitclinic.Exams) -> None:
    with pytest.raises(RecipeError, match=r"'fourier' has no figure 'pie'; it has fourier-"):
        exams[0]["fourier"].figure("pie")
    with pytest.raises(RecipeError, match=r"nothing to draw of 'attention_entropy': .* has no attention maps"):
        exams[1]["attention_entropy"].figure()
    with pytest.raises(RecipeError, match="nothing to draw of 'landscape': it was not measured"):
        exams.figure("landscape")


def test_findings_rest_on_the_measurements_and_on_the_reference(exams: vitclinic.Exams) -> None:
    assert exams[0].findings
    ranks = [("problem", "notice", "healthy").index(finding.severity) for finding in exams[0].findings]
    assert ranks == sorted(ranks)
    assert exams[1].findings == exams[1].view.findings


def test_a_page_of_one_and_of_several(exams: vitclinic.Exams, tmp_path: Path) -> None:
    one, all_ = exams[0].report(tmp_path / "one.html"), exams.report(str(tmp_path / "all.html"), images=False)
    assert one.read_text().lstrip().lower().startswith("<!doctype html>")
    assert '<span class="name">ResNet</span>' in all_.read_text()
    assert '<span class="name">ResNet</span>' not in one.read_text()


def test_a_notebook_shows_findings_and_numbers_and_escapes_names(exams: vitclinic.Exams) -> None:
    html = exams._repr_html_()
    assert all(finding.title in html for exam in exams for finding in exam.findings)
    assert "<td>accuracy.accuracy</td>" in html
    assert "<script" not in exams[0]._repr_html_()

    class Odd(vitclinic.Exam):
        pass

    odd = Odd(name="<script>alert(1)</script>", subject="", folder=Path(), measurements=exams[0].measurements)
    assert "<script" not in odd._repr_html_()
    assert "&lt;script&gt;" in odd._repr_html_()


def test_any_measurement_can_be_drawn(exams: vitclinic.Exams) -> None:
    stored = Measurement.read(exams[0].files["fourier"])
    assert stored.figure() == exams[0]["fourier"].with_name("network").figure()
    assert stored.figure() != exams[0]["fourier"].figure()  # which has the network's name
    assert exams[0]["fourier"] == stored
    with pytest.raises(RecipeError, match="has no figure 'pie'"):
        stored.figure("pie")
