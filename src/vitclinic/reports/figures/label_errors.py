"""Suspected labels, as images and as a CSV file beside the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitclinic._core.io import write_bytes
from vitclinic._core.records import Measurement
from vitclinic.reports.figure import ExamView, Figure, Table, draws, select_usable
from vitclinic.reports.figures.canvas import Measurements
from vitclinic.reports.figures.errors import OPEN_NETWORKS
from vitclinic.reports.figures.worst_images import draw_thumbnail, has_arrays, read_shown, short_name
from vitclinic.reports.frame import format_csv
from vitclinic.reports.image_lists import Album, Listing, Row, mark_up

MOST_IMAGES, FEWEST_IMAGES = 144, 8
"""Images of all networks of a page together, and of each of many."""
A_ROW = 12
DOUBTFUL = 0.2
"""Share of wrong labels above which it is rather the network that is wrong: curated sets have 1 to 10%."""
SUSPECT_COLUMNS = ("network", "path", "given_label", "suggested_label", "score")


def suspect_rows(name: str, one: Measurement, whole: bool) -> list[tuple[str, str, str, str, float]]:
    """Return the suspected labels of a network, the least self-confident first, with whole paths or only names."""
    keys = ("names", "labels", "suggested", "score")
    names, labels, suggested, scores = (one.arrays[f"suspect_{key}"].tolist() for key in keys)
    classes = one.arrays["classes"].tolist()
    return [
        (name, path if whole else short_name(path), classes[given], classes[other], score)
        for path, given, other, score in zip(names, labels, suggested, scores, strict=True)
    ]


def is_whole(one: Measurement) -> bool:
    """Tell whether a measurement has what is listed."""
    keys = ("names", "labels", "suggested", "score")
    return has_arrays(one, "classes", *(f"suspect_{key}" for key in keys)) and "suspected" in one.scalars


@draws("label_errors")
def label_errors(exams: Sequence[ExamView]) -> list[Figure]:
    """Show the images whose labels are suspected, of each network."""
    found = [each for each in select_usable(exams, "label_errors") if is_whole(each[2])]
    return [_suspects(place, name, one, found) for place, name, one in found]


def _suspects(place: int, name: str, one: Measurement, found: Measurements) -> Figure:
    count, images = int(one.scalars["suspected"].value), one.scalars["suspected"].n or 0
    classes = one.arrays["classes"].tolist()
    shown = read_shown(one)[: max(FEWEST_IMAGES, MOST_IMAGES // len(found))]
    suggested = one.arrays["suspect_suggested"].tolist()
    thumbnails = [draw_thumbnail(each, classes, better) for each, better in zip(shown, suggested, strict=False)]
    rows = [
        Row(
            mark_up(f"{first + 1} to {min(first + A_ROW, len(shown))}"),
            "",
            range(first, min(first + A_ROW, len(shown))),
        )
        for first in range(0, len(shown), A_ROW)
    ]
    notes = [] if count else ["No label is suspected."]
    wrong = one.scalars.get("wrong_labels")
    if wrong is not None and wrong.value > DOUBTFUL:
        notes.append(
            f"By this count {wrong.value:.0%} of the labels would be wrong. Unless they are that bad, the network has"
            " not learned enough to judge them, and most of these are its own mistakes."
        )
    notes.append(
        "This is out of sample only if the network was not trained on these images: a network that was may have learned"
        " wrong labels, too, and suspects fewer of them."
    )
    return Figure(
        name=f"suspects-{place}",
        title=f"Suspected labels of {name}" if len(found) > 1 else "Suspected labels",
        reading=f"{count} of {images} labels are suspected, because the network is surer of another class than it"
        " usually is of that class. Look at them from the top: some are wrong labels, some are hard images, and the"
        " CSV file beside the report names their files.",
        paper="Northcutt, Jiang and Chuang 2021",
        table=Table(SUSPECT_COLUMNS, suspect_rows(name, one, whole=False)),
        album=Album(thumbnails, [Listing("Least probable labels first", rows, open_rows=1)] if rows else []),
        notes=notes,
        heavy=len(found) > OPEN_NETWORKS,
    )


def write_suspects(page: Path, exams: Sequence[ExamView]) -> Path | None:
    """Write the suspected labels of all networks as a CSV file beside the page, if there are any.

    Args:
        page: The page's file; `report.html` has `report-labels.csv` beside it.
        exams: The networks.

    Returns:
        The file, or None.
    """
    found = [(one.name, one.measurements.get("label_errors")) for one in exams]
    listed = [(name, one) for name, one in found if one is not None and is_whole(one)]
    rows = [row for name, one in listed for row in suspect_rows(name, one, whole=True)]
    if not rows:
        return None
    file = page.with_name(f"{page.stem}-labels.csv")
    write_bytes(file, format_csv(Table(SUSPECT_COLUMNS, rows)).encode("utf-8", "replace"))
    return file
