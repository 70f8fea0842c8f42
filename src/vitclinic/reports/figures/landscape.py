"""Loss landscapes: the loss along lines, and on planes as contour maps and surfaces, all networks on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from vitclinic._core.records import Measurement
from vitclinic.reports.figure import SEQUENTIAL, ExamView, Figure, Table, draws, select_usable
from vitclinic.reports.figures.canvas import (
    COLOUR_BAR_HEIGHT,
    PANEL_LONGEST,
    Floats,
    Measurements,
    finite,
    format_scalar,
    is_wide,
    label,
    line,
    make_canvas,
    put_colours_below,
    scale_for,
)

Panel = tuple[str, Measurement, Floats]
"""A network's label, its measurement and its losses, [x, y]."""

LEVELS = 24


@dataclass(frozen=True)
class Scale:
    """The scale that all panels share: logarithmic or not, and its ends."""

    log: bool
    low: float
    high: float

    @classmethod
    def of(cls, panels: Sequence[Panel]) -> Scale:
        """Return the scale of these panels."""
        known = np.concatenate([losses[np.isfinite(losses)] for _, _, losses in panels])
        if not known.size:
            return cls(False, 0.0, 1.0)
        log = is_wide(known)
        low, high = (float(end) for end in (known.min(), known.max()))
        return cls(log, low, high if high > low else low + 1.0)

    def colour(self, losses: Floats) -> Floats:
        """Return losses as positions on the scale of colours."""
        return np.log10(losses) if self.log else losses

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the scale of colours."""
        low, high = self.colour(np.array([self.low, self.high])).tolist()
        return low, high

    def bar(self) -> dict[str, Any]:
        """Return the bar of colours, with losses at its ticks."""
        losses = _powers(self.low, self.high) if self.log else _multiples(self.low, self.high, 5)
        ticks = {"tickvals": self.colour(losses), "ticktext": [f"{loss:.4g}" for loss in losses]}
        return {"tickmode": "array", **ticks}

    def levels(self) -> dict[str, float]:
        """Return the lines of equal loss, as plotly takes them."""
        levels = _multiples(*self.ends, LEVELS)
        return {"start": levels[0], "end": levels[-1], "size": levels[1] - levels[0]}

    def show_below(self, figure: go.Figure) -> None:
        low, high = self.ends
        title = "loss, nats (log)" if self.log else "loss, nats"
        put_colours_below(figure, title, colorscale=SEQUENTIAL, cmin=low, cmax=high, colorbar=self.bar())


def _powers(low: float, high: float) -> Floats:
    """Return 1, 3, 10, 30, ... between the two; without the 3 where there would be many."""
    powers = np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    digits = (1.0, 3.0) if len(powers) < 5 else (1.0,)
    values = np.array([digit * 10.0**power for power in powers for digit in digits])
    return values[(values >= low) & (values <= high)]


def _multiples(low: float, high: float, about: int) -> Floats:
    """Return about so many multiples of 1, 2 or 5 (and powers of ten) between the two; at least two."""
    raw = (high - low) / about
    power = 10.0 ** np.floor(np.log10(raw))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= raw * 0.999)
    first = np.ceil(low / step)
    multiples: Floats = step * np.arange(first, max(np.floor(high / step), first + 1) + 1)
    return multiples


def _grid(panels: Sequence[Panel]) -> tuple[int, int]:
    columns = min(2, len(panels))
    return -(-len(panels) // columns), columns


def contours(panels: Sequence[Panel], titles: tuple[str, str]) -> go.Figure:
    """Draw maps with the same levels and colours; a cross marks the network."""
    rows, columns = _grid(panels)
    scale = Scale.of(panels)
    height = 310 * rows + COLOUR_BAR_HEIGHT
    names = [name for name, _, _ in panels]
    figure = make_canvas(height, rows, columns, names, horizontal_spacing=0.1, vertical_spacing=92 / height)
    for at, (_, one, losses) in enumerate(panels):
        row, column = at // columns + 1, at % columns + 1
        contour = go.Contour(
            x=finite(one.arrays["x"]),
            y=finite(one.arrays["y"]),
            z=scale.colour(losses).T,
            customdata=losses.T,
            coloraxis="coloraxis",
            contours=scale.levels(),
            line={"width": 0.6},
            hovertemplate="(%{x:.2f}, %{y:.2f}): loss %{customdata:.4g}<extra></extra>",
        )
        figure.add_trace(contour, row, column)
        for trace in (*_path(one), _centre()):
            figure.add_trace(trace, row, column)
        x = f"x{at + 1 if at else ''}"
        figure.update_xaxes(title_text=titles[0], showgrid=False, constrain="domain", row=row, col=column)
        square = {"scaleanchor": x, "constrain": "domain", "constraintoward": "top"}
        figure.update_yaxes(showgrid=False, **square, row=row, col=column)
        figure.update_yaxes(title_text=titles[1] if column == 1 else None, row=row, col=column)
    scale.show_below(figure)
    figure.update_layout(showlegend=False)
    return figure


def _centre() -> go.Scatter:
    return go.Scatter(
        x=[0],
        y=[0],
        mode="markers",
        marker={"symbol": "cross-thin", "size": 11, "line": {"width": 2, "color": "white"}},
        hovertemplate="the network<extra></extra>",
    )


def _path(one: Measurement) -> list[go.Scatter]:
    """Return the training's epochs in the plane, if the directions are the training's."""
    path = one.arrays.get("path")
    if path is None or path.ndim != 2 or path.shape[1] < 2:
        return []
    epochs = one.arrays.get("path_epoch", np.arange(len(path)))
    return [
        go.Scatter(
            x=finite(path[:, 0]),
            y=finite(path[:, 1]),
            customdata=epochs,
            mode="lines+markers",
            line={"color": "white", "width": 1.5},
            marker={"color": "white", "size": 5, "line": {"color": "black", "width": 1}},
            hovertemplate="epoch %{customdata:g}<extra></extra>",
        )
    ]


def surfaces(panels: Sequence[Panel]) -> go.Figure:
    """Draw surfaces on one scale of heights and colours; the axes are numbered, for want of room."""
    rows, columns = _grid(panels)
    scale = Scale.of(panels)
    specs = [[{"type": "surface"}] * columns for _ in range(rows)]
    height = 360 * rows + COLOUR_BAR_HEIGHT
    names = [name for name, _, _ in panels]
    figure = make_canvas(
        height, rows, columns, names, specs=specs, horizontal_spacing=0.01, vertical_spacing=30 / height
    )
    for at, (_, one, losses) in enumerate(panels):
        surface = go.Surface(
            x=finite(one.arrays["x"]),
            y=finite(one.arrays["y"]),
            z=losses.T,
            surfacecolor=scale.colour(losses).T,
            coloraxis="coloraxis",
            contours={"z": {"show": True, "color": "rgba(255, 255, 255, 0.5)", "width": 1}},
            hovertemplate="(%{x:.2f}, %{y:.2f}): loss %{z:.4g}<extra></extra>",
        )
        figure.add_trace(surface, at // columns + 1, at % columns + 1)
    low, high = scale.ends
    for axis in "xyz":
        figure.update_scenes({f"{axis}axis_zeroline": False})
    figure.update_scenes(
        aspectmode="cube",
        camera={"eye": {"x": 1.9, "y": 1.9, "z": 1.0}, "center": {"x": 0, "y": 0, "z": -0.15}},
        xaxis={"title": {"text": "1"}, "showticklabels": False},
        yaxis={"title": {"text": "2"}, "showticklabels": False},
        zaxis={"title": {"text": ""}, "type": "log" if scale.log else "linear", "range": [low, high], "nticks": 5},
    )
    scale.show_below(figure)
    return figure


_PAPER = "Chen et al. 2022, Fig. 1; Park and Kim 2022, Fig. 1a (C1, P15)"
_DIRECTIONS = {"random": "random direction", "eigenvectors": "eigenvector", "trajectory": "direction of the training"}


@draws("landscape")
def landscape(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the loss along each direction and, of planes, as maps and surfaces."""
    found = [each for each in select_usable(exams, "landscape") if {"x", "losses"} <= each[2].arrays.keys()]
    planes = [each for each in found if each[2].arrays["losses"].ndim == 2 and "y" in each[2].arrays]
    return [*(_sections(found) if found else []), *(_planes(planes) if planes else [])]


def read_losses(measurement: Measurement) -> Floats:
    """Return the losses that were evaluated and are finite, NaN elsewhere."""
    found = finite(measurement.arrays["losses"])
    evaluated = measurement.arrays.get("evaluated")
    return found if evaluated is None else np.where(evaluated, found, np.nan)


def cut_section(measurement: Measurement, direction: int) -> tuple[Floats, Floats] | None:
    """Return places and losses on the line through the network along one direction; None if there is none."""
    found = read_losses(measurement)
    if direction >= found.ndim or "xy"[direction] not in measurement.arrays:
        return None
    middle = [size // 2 for size in found.shape]
    along = tuple(slice(None) if axis == direction else at for axis, at in enumerate(middle))
    return measurement.arrays["xy"[direction]], found[along]


def _sections(found: Measurements) -> list[Figure]:
    directions = max(one.arrays["losses"].ndim for _, _, one in found)
    figure = make_canvas(340, 1, directions, legend=2 * len(found), shared_yaxes=True, horizontal_spacing=0.04)
    rows = []
    everything: list[float] = []
    for direction in range(directions):
        for place, name, one in found:
            cut = cut_section(one, direction)
            if cut is None:
                continue
            x, y = cut
            text = label(name, one, f"loss {format_scalar(one.scalars.get('loss'))}")
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


def _direction_title(found: Measurements, direction: int) -> str:
    kinds = {_DIRECTIONS.get(str(one.config.get("directions")), "direction") for _, _, one in found}
    return f"{kinds.pop() if len(kinds) == 1 else 'direction'} {direction + 1}"


def _planes(found: Measurements) -> list[Figure]:
    table = Table(
        ("network", "x", "y", "loss"),
        [
            (name, x, y, loss)
            for _, name, one in found
            for x, row in zip(one.arrays["x"].tolist(), read_losses(one).tolist(), strict=True)
            for y, loss in zip(one.arrays["y"].tolist(), row, strict=True)
        ],
    )
    panels = [(label(name, longest=PANEL_LONGEST), one, read_losses(one)) for _, name, one in found]
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
