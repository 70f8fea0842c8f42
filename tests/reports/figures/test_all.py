"""What is true of every figure, whatever the probe: the contract of `reports/figure.py`."""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode
from dataclasses import replace

import numpy as np
import pytest

from tests.reports.figures.probed import NAMES, changed, course, pair, renamed
from vitclinic._core.records import Scalar
from vitclinic.probes import known_probes
from vitclinic.reports.figure import DRAWERS, ExamView, Figure
from vitclinic.reports.figures import draw as draw_all

DRAWN = [*NAMES, "training"]
NASTY = "<script>alert(1)</script> & <b>%{x}</b>"


def draw(probe: str, exams: list[ExamView]) -> list[Figure]:
    """The plots; pictures are tested with the probes that have some."""
    return [figure for figure in draw_all(probe, exams) if figure.plot is not None]


def several(count: int) -> list[ExamView]:
    return [renamed(pair()[place % 2], f"network {place}") for place in range(count)]


def content(figure: Figure) -> dict:
    """The plot as the page has it: strict JSON, and arrays that have gaps, but nothing infinite."""
    assert figure.plot is not None
    found = json.loads(figure.plot.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert not any(np.isinf(array).any() for array in arrays(found["data"]))
    return found


def arrays(value) -> list[np.ndarray]:
    """What plotly has packed into base64."""
    if isinstance(value, dict):
        packed = [np.frombuffer(b64decode(value["bdata"]), value["dtype"])] if "bdata" in value else []
        return packed + [array for item in value.values() for array in arrays(item)]
    return [array for item in value for array in arrays(item)] if isinstance(value, list) else []


def texts(value) -> list[str]:
    if isinstance(value, dict):
        return [text for key, item in value.items() if key not in ("bdata", "template") for text in texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in texts(item)]
    return [value] if isinstance(value, str) else []


def test_each_of_the_probes_is_drawn_by_a_function_or_declares_its_figures() -> None:
    declared = {name for name, probe in known_probes().items() if probe.figures}
    assert set(DRAWN) <= set(DRAWERS) | declared
    assert not set(DRAWERS) & declared


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("probe", DRAWN)
def test_any_number_of_networks_is_drawn(probe: str, count: int) -> None:
    figures = draw(probe, several(count))
    assert figures
    assert len({figure.name for figure in figures}) == len(figures)
    for figure in figures:
        assert re.fullmatch(r"[A-Za-z0-9-]+", figure.name)
        assert {row[0] for row in figure.table.rows} == {f"network {place}" for place in range(count)}
        assert all(len(row) == len(figure.table.columns) for row in figure.table.rows)
        assert content(figure)["data"]


@pytest.mark.parametrize("probe", DRAWN)
def test_a_figure_is_explained_in_two_sentences(probe: str) -> None:
    for figure in draw(probe, pair()):
        assert len(re.findall(r"\.(?= [A-Z]|$)", figure.reading)) == 2, figure.reading
        assert figure.title
        assert figure.paper or probe == "anatomy"  # which is in no paper


@pytest.mark.parametrize("probe", DRAWN)
def test_the_page_gives_colours_of_texts_background_and_width(probe: str) -> None:
    for figure in draw(probe, pair()):
        layout = content(figure)["layout"]
        template = layout["template"]["layout"]
        assert template["paper_bgcolor"] == template["plot_bgcolor"] == "rgba(0, 0, 0, 0)"
        assert "width" not in layout
        assert layout["height"] > 0
        assert "color" not in template["font"]
        assert "color" not in layout.get("font", {})


@pytest.mark.parametrize("probe", DRAWN)
def test_what_a_user_named_is_text(probe: str) -> None:
    figures = draw(probe, [renamed(pair()[0], NASTY), renamed(pair()[1], "x" * 500)])
    for figure in figures:
        found = texts(content(figure))
        assert not any("<script" in text or "<b>" in text or "%{x}</b>" in text for text in found)
        assert max(map(len, found)) < 200
        assert {row[0] for row in figure.table.rows} == {NASTY, "x" * 500}  # a CSV has names as they are
    assert any("&lt;script&gt;" in text or "&lt;scr" in text for f in figures for text in texts(content(f)))


@pytest.mark.parametrize("status", ["does_not_apply", "failed"])
@pytest.mark.parametrize("probe", NAMES)
def test_nothing_is_drawn_of_what_was_not_measured(probe: str, status: str) -> None:
    without = changed(pair()[0], probe, status=status, reason="it does not.")
    assert draw(probe, [without]) == []
    assert draw(probe, [replace(pair()[0], measurements={}, training=())]) == []
    for figure in draw(probe, [without, renamed(pair()[1], "other")]):
        assert {row[0] for row in figure.table.rows} == {"other"}


@pytest.mark.parametrize("probe", NAMES)
def test_a_network_keeps_its_colour_when_another_was_not_measured(probe: str) -> None:
    without = changed(pair()[0], probe, status="failed", reason="it did.")
    drawn = json.dumps([content(figure) for figure in draw(probe, [without, pair()[1]])])
    if "#0072B2" in drawn or "#D55E00" in drawn:  # maps have no colours of networks
        assert "#0072B2" not in drawn
        assert "#D55E00" in drawn


@pytest.mark.parametrize("probe", NAMES)
def test_a_measurement_that_has_not_converged_says_so(probe: str) -> None:
    figures = draw(probe, [changed(pair()[0], probe, status="not_converged", reason="for want of time.")])
    assert figures
    for figure in figures:
        if any(trace.showlegend and trace.name for trace in figure.plot.data):
            assert "(not converged)" in figure.plot.to_json()


@pytest.mark.parametrize("probe", NAMES)
def test_old_measurements_may_lack_anything(probe: str) -> None:
    whole = pair()[0].measurements[probe]
    poorer = []
    for name in whole.arrays:
        kept = {key: array for key, array in whole.arrays.items() if key != name}
        poorer.append(changed(pair()[0], probe, arrays=kept))
    for name in whole.scalars:
        kept = {key: scalar for key, scalar in whole.scalars.items() if key != name}
        poorer.append(changed(pair()[0], probe, scalars=kept))
    without_arrays, without_scalars = (changed(pair()[0], probe, **{kind: {}}) for kind in ("arrays", "scalars"))
    bare = changed(pair()[0], probe, scalars={}, arrays={}, units=[])
    for networks in (poorer, [without_arrays], [without_scalars], [bare]):
        for figure in draw(probe, networks):
            content(figure)


@pytest.mark.parametrize("odd", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("probe", NAMES)
def test_numbers_that_are_none_are_gaps(probe: str, odd: float) -> None:
    whole = pair()[0].measurements[probe]

    def spoilt(scalar: Scalar) -> Scalar:
        return Scalar(value=odd, low=scalar.low and odd, high=scalar.high and odd, n=scalar.n)

    def with_gaps(array: np.ndarray, every: int) -> np.ndarray:
        if array.dtype.kind != "f":
            return array
        values = array.copy()
        values.reshape(-1)[::every] = odd
        return values

    scalars = {name: spoilt(scalar) for name, scalar in whole.scalars.items()}
    units = [
        unit.model_copy(update={"values": {name: spoilt(scalar) for name, scalar in unit.values.items()}})
        for unit in whole.units
    ]
    for every, others in ((1, []), (3, [pair()[1]])):
        spoilt_arrays = {name: with_gaps(array, every) for name, array in whole.arrays.items()}
        sick = changed(pair()[0], probe, scalars=scalars, units=units, arrays=spoilt_arrays)
        for figure in draw(probe, [sick, *others]):
            content(figure)


def test_a_run_without_some_metrics_or_with_none_is_drawn_as_far_as_it_goes() -> None:
    one = pair()[0]
    assert draw("training", [replace(one, training=())]) == []
    assert draw("training", [replace(one, training=[{"kind": "train", "step": 1}])]) == []
    bare = [{"kind": "train", "step": row["step"], "loss": row["loss"]} for row in course(20)]
    (figure,) = draw("training", [replace(one, training=bare)])
    content(figure)
