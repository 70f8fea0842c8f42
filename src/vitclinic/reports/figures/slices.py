"""Weak slices: accuracy of parts of the images against the rest, with images of the worst ones."""

from __future__ import annotations

import re
from collections.abc import Sequence

import plotly.graph_objects as go

from vitclinic._core.records import Measurement, Scalar
from vitclinic.reports.figure import ExamView, Figure, Table, draws, select_usable
from vitclinic.reports.figures.canvas import Measurements, label, make_canvas, points, unique_ticks
from vitclinic.reports.figures.worst_images import Shown, draw_thumbnail, has_arrays, read_shown
from vitclinic.reports.image_lists import Album, Listing, Row, mark_up

MOST_PLOTTED = 24
"""Slices in the plot: those of the smallest p of any network."""
_QUARTER = re.compile(r"(quarter) \([^()]*\)$")
"""The end of a slice's title whose numbers the list has, too."""
MOST_IMAGES = 96
"""Of all networks of a page together."""
SIGNIFICANT = 0.05
_ARRAYS = (
    *("slice_feature", "slice_value", "slice_images", "slice_accuracy", "slice_accuracy_low", "slice_accuracy_high"),
    *("rest_accuracy", "slice_p", "slice_p_adjusted", "shown_slice", "shown_numbers", "classes"),
)
COLUMNS = ("network", "feature", "slice", "images", "accuracy", "low", "high", "rest_accuracy", "p", "p_adjusted")


@draws("slices")
def slices(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the accuracy of each slice, then the images of the worst slices of each network."""
    whole = [each for each in select_usable(exams, "slices") if has_arrays(each[2], *_ARRAYS)]
    found = [each for each in whole if each[2].arrays["slice_feature"].size]
    if not found:
        return [_explain_none(whole[0][2])] if whole else []
    rows = [(name, *row) for _, name, one in found for row in _rows(one)]
    plot = Figure(
        name="slices",
        title="Accuracy on parts of the images",
        reading="Each point is the accuracy on one part of the images, with its 95% interval, the least probable"
        " first. One that the list below calls weak is worse than the rest by more than chance, all looks together.",
        paper="Fisher 1922; Holm 1979",
        table=Table(COLUMNS, rows),
        plot=_plot(found),
        notes=[] if len(_titles(found)) <= MOST_PLOTTED else [f"{MOST_PLOTTED} of {len(_titles(found))} slices."],
    )
    return [plot, *(_list(place, name, one, found) for place, name, one in found)]


def _explain_none(one: Measurement) -> Figure:
    return Figure(
        name="slices",
        title="No slices",
        reading=f"There are too few images to compare parts of them: a part, and the rest, must have at least"
        f" {one.config.get('least', 20)} images (the option least). Examine more images.",
        paper="",
        table=Table(COLUMNS, []),
        album=Album([], []),
    )


def _rows(one: Measurement) -> list[tuple[str, str, int, float, float, float, float, float, float]]:
    keys = ("feature", "value", "images", "accuracy", "accuracy_low", "accuracy_high")
    columns = [one.arrays[f"slice_{key}"].tolist() for key in keys]
    columns += [one.arrays[key].tolist() for key in ("rest_accuracy", "slice_p", "slice_p_adjusted")]
    return sorted(zip(*columns, strict=True), key=lambda row: row[-2])


def _titles(found: Measurements) -> list[str]:
    """Return the names of all slices, those of the smallest p first."""
    rows = sorted((row for _, _, one in found for row in _rows(one)), key=lambda row: row[-2])
    return list(dict.fromkeys(f"{row[0]}: {row[1]}" for row in rows))


def _plot(found: Measurements) -> go.Figure:
    titles = _titles(found)[:MOST_PLOTTED]
    figure = make_canvas(64 + len(titles) * (10 + 12 * min(len(found), 4)), legend=len(found))
    for place, name, one in found:
        known = {f"{row[0]}: {row[1]}": Scalar(value=row[3], low=row[4], high=row[5]) for row in _rows(one)}
        scalars = [known.get(title) for title in titles]
        ticks = unique_ticks([_QUARTER.sub(r"\1", title) for title in titles], 30)  # on a phone, half of the figure
        figure.add_trace(points(place, label(name, one), ticks, scalars))
    figure.update_xaxes(title_text="accuracy", tickformat=".0%")
    figure.update_yaxes(autorange="reversed", type="category", tickmode="linear")
    figure.update_layout(scattermode="group", scattergap=0.3)
    return figure


def _list(place: int, name: str, one: Measurement, found: Measurements) -> Figure:
    rows = _rows(one)
    weak = sum(row[-1] < SIGNIFICANT for row in rows)
    kept, groups = _group_images(one, max(4, MOST_IMAGES // len(found) // 3))
    listed = [
        Row(
            mark_up("{}: {}", row[0], row[1]) + (" (weak)" if row[-1] < SIGNIFICANT else ""),
            f"{row[3]:.0%} ({row[4]:.0%} to {row[5]:.0%}) of {row[2]}, the rest {row[6]:.0%}; {_format_p(row[-1])}",
            groups.get((row[0], row[1]), []),
            row[3],
        )
        for row in rows
    ]
    verdict = (
        f"{weak} of {len(rows)} slices {'is' if weak == 1 else 'are'} weak"
        if weak
        else f"None of {len(rows)} slices is weaker than the rest by more than chance"
    )
    classes = one.arrays["classes"].tolist()
    return Figure(
        name=f"slices-{place}",
        title=f"Slices of {name}" if len(found) > 1 else "Slices, and images of the worst",
        reading=f"{verdict} (Fisher's exact test, p adjusted by Holm for {len(rows)} looks; weak is p below"
        f" {SIGNIFICANT:g}). The rows with the smallest p open the images that the network was surest about and wrong.",
        paper="Fisher 1922; Holm 1979",
        table=Table(COLUMNS[1:], rows),
        album=Album([draw_thumbnail(each, classes) for each in kept], [Listing("By p", listed)]),
        heavy=len(found) > 3,
    )


def _group_images(one: Measurement, most: int) -> tuple[list[Shown], dict[tuple[str, str], list[int]]]:
    """Return the images of the worst slices, each once, and the places of at most `most` of them for each slice."""
    shown, numbers = read_shown(one), one.arrays["shown_numbers"].tolist()
    names = list(zip(one.arrays["slice_feature"].tolist(), one.arrays["slice_value"].tolist(), strict=True))
    kept: dict[int, Shown] = {}
    groups: dict[tuple[str, str], list[int]] = {}
    for image, number, slice_number in zip(shown, numbers, one.arrays["shown_slice"].tolist(), strict=False):
        group = groups.setdefault(names[slice_number], [])
        if len(group) < most:
            kept.setdefault(number, image)
            group.append(list(kept).index(number))
    return list(kept.values()), groups


def _format_p(p: float) -> str:
    return f"p\u00a0{p:.2g}" if p >= 1e-4 else "p\u00a0<\u00a00.0001"
