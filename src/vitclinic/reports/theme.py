"""The look of plots, light and dark, as plotly's templates: what a drawer leaves open is decided here."""

from __future__ import annotations

from typing import Any

from vitclinic.reports.colours import NETWORKS

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def template(dark: bool) -> dict[str, Any]:
    """The template of one of the two themes; the background is the page's own."""
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
