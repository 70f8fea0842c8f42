"""Colours of networks, safe for colour-blind readers and legible on light and dark, and of the kinds of units."""

from __future__ import annotations

from typing import Any

NETWORKS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7A7A7A")
"""Okabe and Ito's, by a network's place in the report (modulo their number)."""

DASHES = ("solid", "dash", "dot", "dashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
"""Beside the colour, so that a figure can be read without colours."""

SEQUENTIAL = "Viridis"
DIVERGING = "RdBu_r"

KINDS = {
    "msa": "rgba(0, 114, 178, 0.16)",
    "mlp": "rgba(230, 159, 0, 0.13)",
    "conv": "rgba(230, 159, 0, 0.13)",
    "token_mlp": "rgba(0, 158, 115, 0.15)",
    "pool": "rgba(120, 120, 120, 0.26)",
}
"""The shading behind a unit of this kind in a figure over depth: convs and MLPs do the same work [park2022 Fig. 9]."""

KIND_MARKS = {
    "stem": "#7A7A7A",
    "position": "#CC79A7",
    "msa": "#0072B2",
    "mlp": "#E69F00",
    "conv": "#D55E00",
    "token_mlp": "#009E73",
    "pool": "#56B4E9",
    "head": "#8C6BB1",
}
"""The colour of a unit of this kind where it stands for the unit itself: on the axes of a matrix of units."""

KIND_SYMBOLS = {
    "stem": "x",
    "position": "cross",
    "msa": "circle",
    "mlp": "square",
    "conv": "triangle-up",
    "token_mlp": "diamond",
    "pool": "triangle-down",
    "head": "star",
}
"""The marker of a unit of this kind."""


def network_colour(place: int) -> str:
    """Return the colour of the network at this place of the report."""
    return NETWORKS[place % len(NETWORKS)]


def with_opacity(place: int, opacity: float) -> str:
    """Return the network's colour as rgba(), for bands of uncertainty."""
    red, green, blue = (int(network_colour(place)[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {opacity})"


FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def template(dark: bool) -> dict[str, Any]:
    """Return plotly's template for the light or the dark theme; the background is the page's own."""
    ink, faint, line, box = (
        ("#d7dce2", "#333b45", "#5a6570", "#232a32") if dark else ("#2b333b", "#e3e7eb", "#9aa5b1", "#ffffff")
    )
    axis = {
        "gridcolor": faint,
        "linecolor": line,
        "zerolinecolor": line,
        "zerolinewidth": 1,
        "tickcolor": line,
        "ticks": "outside",
        "ticklen": 4,
        "automargin": True,
        "title": {"standoff": 8, "font": {"size": 13}},
    }
    in_space = {
        "gridcolor": line,
        "linecolor": line,
        "zerolinecolor": line,
        "showbackground": False,
        "tickcolor": line,
        "tickfont": {"size": 10},
        "title": {"font": {"size": 11}},
    }
    colorbar = {"outlinewidth": 0, "thickness": 14, "tickcolor": line, "ticks": "outside", "ticklen": 4}
    mapped = {kind: [{"colorbar": colorbar}] for kind in ("heatmap", "contour", "surface", "histogram2d")}
    return {
        "layout": {
            "font": {"family": FONT, "size": 13, "color": ink},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "colorway": list(NETWORKS),
            "margin": {"l": 56, "r": 16, "t": 40, "b": 48},
            "xaxis": axis,
            "yaxis": axis,
            "polar": {"bgcolor": "rgba(0,0,0,0)", "angularaxis": axis, "radialaxis": axis},
            "scene": dict.fromkeys(("xaxis", "yaxis", "zaxis"), in_space),
            "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "xanchor": "left", "x": 0},
            "hoverlabel": {"bgcolor": box, "bordercolor": line, "font": {"color": ink}, "namelength": -1},
            "annotationdefaults": {"font": {"color": ink, "size": 13}, "arrowcolor": ink},
            "shapedefaults": {"line": {"color": line}},
            "coloraxis": {"colorbar": colorbar},
        },
        "data": mapped,
    }
