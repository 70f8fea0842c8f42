"""Errors as images: accuracy of each class, and a confusion matrix whose cells open their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from vitclinic._core.records import Measurement, Scalar
from vitclinic._core.statistics import share_interval
from vitclinic.reports.figure import ExamView, Figure, Table, draws, select_usable
from vitclinic.reports.figures.canvas import Measurements, label, make_canvas, points, unique_ticks
from vitclinic.reports.figures.worst_images import Shown, draw_thumbnail, has_arrays, read_shown
from vitclinic.reports.image_lists import Album, Cell, Listing, Matrix, Row, isolate, mark_up

MOST_CLASSES = 20
"""Classes of a whole matrix; of more, the matrix shows those that are confused most."""
MOST_CONFUSED = 14
MOST_BARS = 30
"""Classes in the plot of accuracies: the worst ones."""
MOST_PAIRS = 120
MOST_LISTED = 60
"""Rows of a list; the table has all."""
MOST_IMAGES, FEWEST_IMAGES = 160, 12
"""Images of all networks of a page together, and of each of many."""
_ARRAYS = ("classes", "class_images", "class_correct", "pairs", "pair_images")
OPEN_NETWORKS = 3
"""Up to so many networks, their matrices are open."""


@draws("errors")
def errors(exams: Sequence[ExamView]) -> list[Figure]:
    """Draw the accuracy of each class of all networks, then the confusions of each network with their images."""
    found = [each for each in select_usable(exams, "errors") if has_arrays(each[2], *_ARRAYS)]
    if not found:
        return []
    return [_by_class(found), *(_confusions(place, name, one, found) for place, name, one in found)]


def _by_class(found: Measurements) -> Figure:
    rows = []
    for _, name, one in found:
        accuracies = [_accuracy(one, number) for number in range(len(one.arrays["classes"]))]
        rows += [
            (name, class_name, *((a.value, a.low, a.high, a.n) if a else (None, None, None, 0)))
            for class_name, a in zip(one.arrays["classes"].tolist(), accuracies, strict=True)
        ]
    notes = []
    present = len({row[1] for row in rows if row[2] is not None})
    if present > MOST_BARS:
        notes.append(f"The {MOST_BARS} worst of {present} classes, of the first network; the CSV has all.")
    return Figure(
        name="class-accuracy",
        title="Accuracy of each class",
        reading="Each point is the share of a class's images that are recognized, with its 95% interval, the worst"
        " class first. A class far to the left of the others needs more or better images, or looks like another one.",
        paper="Wilson 1927 (intervals)",
        table=Table(("network", "class", "accuracy", "low", "high", "images"), rows),
        plot=_plot_classes(found),
        notes=notes,
    )


def _accuracy(one: Measurement, number: int) -> Scalar | None:
    images, correct = (int(one.arrays[key][number]) for key in ("class_images", "class_correct"))
    if not images:
        return None
    low, high = share_interval(correct, images)
    return Scalar(value=correct / images, low=low, high=high, n=images)


def _plot_classes(found: Measurements) -> go.Figure:
    first = found[0][2].arrays
    present = np.flatnonzero(first["class_images"])
    worst = present[np.argsort((first["class_correct"] / np.maximum(first["class_images"], 1))[present], kind="stable")]
    names = [first["classes"].tolist()[number] for number in worst[:MOST_BARS]]
    figure = make_canvas(64 + len(names) * (10 + 12 * min(len(found), 4)), legend=len(found))
    for place, name, one in found:
        numbers = {class_name: number for number, class_name in enumerate(one.arrays["classes"].tolist())}
        scalars = [_accuracy(one, numbers[each]) if each in numbers else None for each in names]
        figure.add_trace(points(place, label(name, one), unique_ticks(names), scalars))
    figure.update_xaxes(title_text="accuracy", tickformat=".0%", range=[-0.02, 1.02])
    figure.update_yaxes(autorange="reversed", type="category", tickmode="linear")
    figure.update_layout(scattermode="group", scattergap=0.3)
    return figure


@dataclass(frozen=True)
class _Pair:
    label: int
    predicted: int
    images: int
    share: float
    """Of the images with that label."""


def _confusions(place: int, name: str, one: Measurement, found: Measurements) -> Figure:
    several = len(found) > 1
    classes, pairs = one.arrays["classes"].tolist(), _pairs(one)
    table = [(classes[pair.label], classes[pair.predicted], pair.images, pair.share) for pair in pairs]
    wrong = [pair for pair in pairs if pair.label != pair.predicted]
    return Figure(
        name=f"confusions-{place}",
        title=f"Confusions of {name}" if several else "Confusions",
        reading="A row of the matrix is a label, a column the class that the network said; blue is right, orange wrong,"
        " darker is a larger share of the row. A number that is underlined opens the images that the network was"
        " surest about and wrong, as does each row of the lists.",
        paper="Hastie et al. 2009, Sec. 9.2",
        table=Table(("label", "predicted", "images", "share_of_label"), table),
        album=_album(one, wrong, max(FEWEST_IMAGES, MOST_IMAGES // len(found))),
        notes=_notes(len(classes), wrong),
        heavy=len(found) > OPEN_NETWORKS,
    )


def _notes(classes: int, wrong: Sequence[_Pair]) -> list[str]:
    if not wrong:
        return ["Every image was recognized."]
    if classes > MOST_CLASSES:
        return [
            f"The matrix has the classes of the most frequent confusions, {classes} in all; the CSV has every pair."
        ]
    return []


def _pairs(one: Measurement) -> list[_Pair]:
    """Return all cells of the matrix that are not 0, the largest first."""
    totals = one.arrays["class_images"]
    cells = zip(one.arrays["pairs"].tolist(), one.arrays["pair_images"].tolist(), strict=True)
    pairs = [_Pair(given, said, images, images / int(totals[given])) for (given, said), images in cells]
    return sorted(pairs, key=lambda pair: (-pair.images, pair.label, pair.predicted))


def _album(one: Measurement, wrong: Sequence[_Pair], most: int) -> Album:
    classes = one.arrays["classes"].tolist()
    by_pair: dict[tuple[int, int], list[Shown]] = {}
    for shown in sorted(read_shown(one), key=lambda shown: -shown.confidence):
        by_pair.setdefault((shown.label, shown.predicted), []).append(shown)
    kept = _choose([by_pair.get((pair.label, pair.predicted), []) for pair in wrong], most)
    numbers = {id(shown): number for number, shown in enumerate(kept)}
    places = {key: [numbers[id(shown)] for shown in group if id(shown) in numbers] for key, group in by_pair.items()}
    listed = wrong[:MOST_PAIRS]
    pairs = [
        Row(
            mark_up("{} taken for {}", classes[pair.label], classes[pair.predicted]),
            f"{pair.images} image{'s' * (pair.images != 1)}, {pair.share:.0%} of its label",
            places.get((pair.label, pair.predicted), []),
        )
        for pair in listed
    ]
    lists = [Listing("Most frequent confusions", pairs), Listing("Worst classes", _class_rows(one, kept))]
    rows = {(pair.label, pair.predicted): row for row, pair in enumerate(listed)}
    thumbnails = [draw_thumbnail(shown, classes) for shown in kept]
    return Album(thumbnails, lists if wrong else [], _matrix(one, wrong, rows))


def _choose(groups: Sequence[Sequence[Shown]], most: int) -> list[Shown]:
    """Return images of all groups, which take turns, the first group first."""
    deepest = max(map(len, groups), default=0)
    return [group[turn] for turn in range(deepest) for group in groups if turn < len(group)][:most]


def _class_rows(one: Measurement, kept: Sequence[Shown]) -> list[Row]:
    classes = one.arrays["classes"].tolist()
    accuracies = [(number, found) for number in range(len(classes)) if (found := _accuracy(one, number)) is not None]
    rows = []
    for number, accuracy in sorted(accuracies, key=lambda pair: pair[1].value)[:MOST_LISTED]:
        mine = [place for place, shown in enumerate(kept) if shown.label == number]
        surest = sorted(mine, key=lambda place: -kept[place].confidence)
        fact = f"{accuracy.value:.0%} ({accuracy.low:.0%} to {accuracy.high:.0%}) of {accuracy.n} right"
        rows.append(Row(mark_up("{}", classes[number]), fact, surest, accuracy.value))
    return rows


def _matrix(one: Measurement, wrong: Sequence[_Pair], rows: dict[tuple[int, int], int]) -> Matrix | None:
    classes = one.arrays["classes"].tolist()
    chosen = _choose_classes(wrong, len(classes))
    if not chosen:
        return None
    totals: NDArray[np.int64] = one.arrays["class_images"]
    counts = {(pair.label, pair.predicted): pair for pair in _pairs(one)}

    def cell(given: int, said: int) -> Cell:
        found = counts.get((given, said))
        images, share = (found.images, found.share) if found else (0, 0.0)
        what = "recognized" if given == said else f"taken for {isolate(classes[said])}"
        text = f"{isolate(classes[given])} {what}: {images} of {int(totals[given])} images, {share:.0%}"
        opens = (0, rows[given, said]) if (given, said) in rows else None
        return Cell(str(images) if images else "", text, share**0.5, given == said, opens)

    names = [classes[number] for number in chosen]
    return Matrix(names, [[cell(given, said) for said in chosen] for given in chosen])


def _choose_classes(wrong: Sequence[_Pair], classes: int) -> list[int]:
    """Return the classes of the matrix: all of a few, else those of the most frequent confusions."""
    if classes <= MOST_CLASSES:
        return list(range(classes))
    chosen: list[int] = []
    for pair in wrong:
        chosen += [number for number in (pair.label, pair.predicted) if number not in chosen]
        if len(chosen) >= MOST_CONFUSED:
            break
    return sorted(chosen)
