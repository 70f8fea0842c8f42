"""The strip of units: a box a unit in its kind's colour, stages beneath, doubts below."""

from __future__ import annotations

import numpy as np

from tests.reports.made import HOSTILE, exact, measurement
from vitclinic._core.records import UnitRow
from vitclinic.reports.figure import KIND_MARKS, ExamView
from vitclinic.reports.figures import draw
from vitclinic.reports.page import render


def made(name="mine", notes=(), **scalars):
    """A stem and two stages of a conv and an attention, the second on half the grid."""
    shapes = [("stem", 0, 16), ("conv", 0, 16), ("msa", 0, 16), ("pool", 1, 8), ("msa", 1, 8), ("head", 1, None)]
    rows = []
    for depth, (kind, stage, side) in enumerate(shapes):
        values = {"parameters": 100 * (depth + 1), "channels": 32, "attention_map": kind == "msa"}
        values |= {"residual": kind in ("conv", "msa")} | ({"heads": 4} if kind == "msa" else {})
        values |= {} if side is None else {"grid_height": side, "grid_width": side, "prefix_tokens": 2 * stage}
        found = {key: exact(value) for key, value in values.items()}
        note = "branch set to zero" if kind == "msa" else None
        rows.append(UnitRow(name=f"{kind}.{depth}", kind=kind, stage=stage, depth=depth, values=found, note=note))
    arrays = {"network": np.array("Net"), "family": np.array("a family"), "notes": np.array(notes, dtype=np.str_)}
    return ExamView(name, {"anatomy": measurement("anatomy", units=rows, arrays=arrays, scalars=scalars)})


def test_a_box_a_unit_in_the_colour_of_its_kind_and_as_high_as_its_grid():
    (figure,) = draw("anatomy", [made()])
    boxes, bars, dots = figure.plot.data[:3]
    assert list(boxes.marker.color) == [KIND_MARKS[kind] for kind in ("stem", "conv", "msa", "pool", "msa", "head")]
    assert boxes.y[0] == boxes.y[1] == boxes.y[2] > boxes.y[3] == boxes.y[4] > boxes.y[5] > 0
    centres = [base + height / 2 for base, height in zip(boxes.base, boxes.y, strict=True)]
    assert np.ptp(centres) < 1e-12
    assert np.allclose(np.array(bars.y) / bars.y[0], np.arange(1, 7))  # parameters
    assert list(dots.x) == [2, 4]
    solid = [opacity == 1 for opacity in boxes.marker.opacity]
    assert solid == [False, True, True, False, True, False]
    assert boxes.customdata[4] == (
        "4 msa.4 (MSA, stage 1)<br>8 × 8 + 2<br>32 channels<br>500 parameters<br>4 heads<br>attention map<br>residual"
        "<br>removed by: branch set to zero"
    )


def test_stages_are_parted_and_described():
    (figure,) = draw("anatomy", [made()])
    axis = figure.plot.layout.xaxis
    assert list(axis.tickvals) == [1.0, 4.0]
    assert list(axis.ticktext) == ["stage 0<br>16 × 16<br>32 ch.", "stage 1<br>8 × 8 + 2<br>32 ch."]
    assert [shape.x0 for shape in figure.plot.layout.shapes] == [2.5]
    entries = [trace.name for trace in figure.plot.data if trace.name]
    assert entries == ["stem", "MSA", "conv", "pooling", "head", "attention map"]


def test_a_stage_without_room_has_no_label():
    one = made()
    rows = one.measurements["anatomy"].units
    rows = [*rows[:4], *(row.model_copy(update={"stage": 2}) for row in rows[4:] for _ in range(20))]
    crowded = ExamView("mine", {"anatomy": one.measurements["anatomy"].model_copy(update={"units": rows})})
    (figure,) = draw("anatomy", [crowded])
    assert [text.replace("<br>", "").strip() for text in figure.plot.layout.xaxis.ticktext][:2] == ["", ""]


def test_the_title_says_how_the_units_were_found():
    for scalars, how in (({}, "a family"), ({"observed": exact(1)}, "observed"), ({"observed": exact(0)}, "a family")):
        (figure,) = draw("anatomy", [made(**scalars)])
        assert figure.plot.layout.annotations[0].text == f"mine<br>Net, {how}, 6 units"


def test_doubts_are_on_the_page_as_text_and_with_their_network_if_there_are_several():
    doubt = f"the attention of {HOSTILE} is none."
    (figure,) = draw("anatomy", [made(notes=[doubt])])
    assert figure.notes == [f"The attention of {HOSTILE} is none."]
    page = render([made("first"), made("second", [doubt])])
    assert "second: the attention of &lt;script&gt;alert(1)&lt;/script&gt; is none." in page
    assert HOSTILE not in page


def test_the_table_has_every_unit_with_how_it_is_removed():
    (figure,) = draw("anatomy", [made()])
    rows = [dict(zip(figure.table.columns, row, strict=True)) for row in figure.table.rows]
    assert len(rows) == 6
    assert (rows[4]["rows"], rows[4]["prefix tokens"], rows[4]["heads"], rows[4]["removed by"]) == (
        *(8, 2, 4),
        "branch set to zero",
    )
    assert rows[5]["rows"] is None
