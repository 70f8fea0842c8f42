"""The loss around the network's weights: sections, contour maps, surfaces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitclinic.measurement import Measurement
from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, Table, draws, measured
from vitclinic.reports.figures.compared import Measured
from vitclinic.reports.figures.drawing import PANEL_LONGEST, Floats, canvas, finite, label, line, number, scale_for
from vitclinic.reports.figures.planes import contours, surfaces

_PAPER = "Chen et al. 2022, Fig. 1; Park and Kim 2022, Fig. 1a (C1, P15)"
_DIRECTIONS = {"random": "random direction", "eigenvectors": "eigenvector", "trajectory": "direction of the training"}


@draws("landscape")
def landscape(examined: Sequence[Examined]) -> list[Figure]:
    found = [each for each in measured(examined, "landscape") if {"x", "losses"} <= each[2].arrays.keys()]
    planes = [each for each in found if each[2].arrays["losses"].ndim == 2 and "y" in each[2].arrays]
    return [*(_sections(found) if found else []), *(_planes(planes) if planes else [])]


def losses(measurement: Measurement) -> Floats:
    """What was evaluated and is finite, NaN elsewhere."""
    found = finite(measurement.arrays["losses"])
    evaluated = measurement.arrays.get("evaluated")
    return found if evaluated is None else np.where(evaluated, found, np.nan)


def section(measurement: Measurement, direction: int) -> tuple[Floats, Floats] | None:
    """Places and losses on the line through the network along one of the directions; None if it is not a plane's."""
    found = losses(measurement)
    if direction >= found.ndim or "xy"[direction] not in measurement.arrays:
        return None
    middle = [size // 2 for size in found.shape]
    along = tuple(slice(None) if axis == direction else at for axis, at in enumerate(middle))
    return measurement.arrays["xy"[direction]], found[along]


def _sections(found: Measured) -> list[Figure]:
    directions = max(one.arrays["losses"].ndim for _, _, one in found)
    figure = canvas(340, 1, directions, legend=2 * len(found), shared_yaxes=True, horizontal_spacing=0.04)
    rows = []
    everything: list[float] = []
    for direction in range(directions):
        for place, name, one in found:
            cut = section(one, direction)
            if cut is None:
                continue
            x, y = cut
            text = label(name, one, f"loss {number(one.scalars.get('loss'))}")
            curve = line(place, text, x, y, shown=direction == 0, hovertemplate="%{x:.2f}: loss %{y:.4g}")
            figure.add_trace(curve, 1, direction + 1)
            everything += y.tolist()
            rows += [(name, direction + 1, *row) for row in zip(x.tolist(), y.tolist(), strict=True)]
        figure.update_xaxes(title_text=_direction_title(found, direction), row=1, col=direction + 1)
    figure.update_yaxes(**scale_for(everything, "loss, nats"))
    figure.update_yaxes(title_text=None, col=2)
    return [
        Figure(
            name="landscape-sections",
            title="Loss along each direction",
            reading="The loss on straight lines through the network's weights, which are at 0. A wide, shallow valley"
            " is a flat minimum; compare networks only where directions, normalisation and span are the same.",
            paper=_PAPER,
            table=Table(("network", "direction", "place", "loss"), rows),
            plot=figure,
        )
    ]


def _direction_title(found: Measured, direction: int) -> str:
    kinds = {_DIRECTIONS.get(str(one.config.get("directions")), "direction") for _, _, one in found}
    return f"{kinds.pop() if len(kinds) == 1 else 'direction'} {direction + 1}"


def _planes(found: Measured) -> list[Figure]:
    table = Table(
        ("network", "x", "y", "loss"),
        [
            (name, x, y, loss)
            for _, name, one in found
            for x, row in zip(one.arrays["x"].tolist(), losses(one).tolist(), strict=True)
            for y, loss in zip(one.arrays["y"].tolist(), row, strict=True)
        ],
    )
    panels = [(label(name, longest=PANEL_LONGEST), one, losses(one)) for _, name, one in found]
    titles = _direction_title(found, 0), _direction_title(found, 1)
    return [
        Figure(
            name="landscape-contours",
            title="Loss landscape from above",
            reading="The loss on a plane through the network's weights, which are the cross in the middle; all maps"
            " share one scale of colours and the same levels. Lines far apart are flat ground; where there is a path,"
            " it is the training's, seen in this plane.",
            paper=_PAPER,
            table=table,
            plot=contours(panels, titles),
        ),
        Figure(
            name="landscape-surfaces",
            title="Loss landscape in three dimensions",
            reading="The same losses as height over directions 1 and 2, all on one scale; turn a surface with the mouse"
            " or a finger. It shows two directions of very many: compare shapes, and trust the eigenvalues.",
            paper=_PAPER,
            table=table,
            plot=surfaces(panels),
            heavy=True,
        ),
    ]
