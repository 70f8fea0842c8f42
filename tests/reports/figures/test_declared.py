"""Figures that a probe declares, of whatever package, drawn from what its measurement carries."""

import pytest
from pydantic import ValidationError

from tests.reports.made import HOSTILE, estimate, measurement, units
from vitclinic._core.registry import FigureSpec, ProbeFacts
from vitclinic.reports.figure import ExamView
from vitclinic.reports.figures import draw
from vitclinic.reports.page import render
from vitclinic.reports.summary import group_probes, summarize


def spec(kind, values, **parts):
    return FigureSpec(name=f"odd-{kind}", kind=kind, values=values, title="Odd", reading="One. Two.", **parts)


def network(*figures, name="a", value=0.5, **facts):
    """Measured by a probe that vitclinic does not know, with these figures."""
    made = measurement(
        "odd",
        scalars={"oddness": estimate(value), "rest": estimate(0.2)},
        units=units({"oddness": 0.2, "rest": 0.4}),
        facts=ProbeFacts(title="Oddness", figures=list(figures), **facts),
    )
    return ExamView(name, {"odd": made})


@pytest.mark.parametrize("kind", ["states", "units", "layers", "scalars"])
@pytest.mark.parametrize("share", [False, True])
def test_every_kind_is_drawn(kind, share):
    (figure,) = draw("odd", [network(spec(kind, {"oddness": HOSTILE}, share=share, table=["rest"]))])
    assert (figure.name, figure.title, figure.reading) == (f"odd-{kind}", "Odd", "One. Two.")
    text = figure.plot.to_json()
    assert "script>" not in text.replace("&lt;script&gt;", "").replace("&lt;/script&gt;", "")
    assert ("%" in str(figure.plot.layout.yaxis.tickformat or figure.plot.layout.xaxis.tickformat)) == share
    told = [row[1] for row in figure.table.rows] if kind == "scalars" else figure.table.columns
    assert {"oddness", "rest"} <= set(told)


def test_nothing_is_drawn_of_values_that_no_network_has():
    assert draw("odd", [network(spec("layers", {"missing": "x"}), spec("scalars", {"missing": "x"}))]) == []


def test_the_paper_of_the_probe_is_that_of_its_figures_unless_they_name_their_own():
    own = spec("scalars", {"rest": "rest"}, paper="Mine 2027")
    figures = draw("odd", [network(spec("layers", {"oddness": "x"}), own, paper="Theirs 2026")])
    assert [figure.paper for figure in figures] == ["Theirs 2026", "Mine 2027"]


@pytest.mark.parametrize("values", [{}, {"a": "a", "b": "b"}])
def test_states_and_units_show_one_value(values):
    with pytest.raises(ValidationError, match="shows one value"):
        spec("states", values)


def test_a_probe_of_a_package_has_its_own_group_title_order_and_better_value():
    facts = {"group": "Oddities & <more>", "question": "How odd is it?", "key_scalars": {"oddness": "lower"}}
    exams = [network(**facts), network(name="b", value=0.9, **facts)]
    accuracy = measurement("accuracy", scalars={"accuracy": estimate(0.5)})
    exams[0].measurements["accuracy"] = accuracy
    assert group_probes(exams) == {"Behaviour": ["accuracy"], "Oddities & <more>": ["odd"]}
    row = summarize(exams)[-1]
    assert (row.scalar, row.better, [cell.best for cell in row.cells]) == ("oddness", "lower", [True, False])
    page = render(exams)
    assert '<h2 id="group-oddities----more--title">Oddities &amp; &lt;more&gt;</h2>' in page
    assert "<h3>Oddness</h3>" in page
    assert "How odd is it?" in page
