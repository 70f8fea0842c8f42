"""Answers to questions: accuracy by the beginning of the question, and the worst answers beside their images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitclinic._core.images import Picture, encode_small
from vitclinic._core.records import Measurement
from vitclinic.reports.figure import ExamView, Figure, Table, draws, select_usable
from vitclinic.reports.figures.canvas import Measurements
from vitclinic.reports.figures.errors import OPEN_NETWORKS
from vitclinic.reports.figures.worst_images import has_arrays, list_worst, short_name
from vitclinic.reports.image_lists import Album, Listing, Row, Thumbnail, isolate, mark_up

MOST_IMAGES, FEWEST_IMAGES = 60, 8
"""Answers of all networks of a page together, and of each of many."""
_SHOWN = ("questions", "given", "truth", "scores", "confidence")
_COLUMNS = ("network", "image", "question", "answer_given", "answers", "accuracy", "confidence")


@draws("vqa")
def vqa(exams: Sequence[ExamView]) -> list[Figure]:
    """Show the accuracy by beginning of all networks, then the worst answers of each."""
    needed = ("beginnings", "beginning_questions", "beginning_accuracy", "shown_images", "shown_names")
    wanted = (*needed, *(f"shown_{key}" for key in _SHOWN))
    found = [each for each in select_usable(exams, "vqa") if has_arrays(each[2], *wanted)]
    return [_worst(place, name, one, found) for place, name, one in found]


def _worst(place: int, name: str, one: Measurement, found: Measurements) -> Figure:
    columns = [one.arrays["shown_names"].tolist(), *(one.arrays[f"shown_{key}"].tolist() for key in _SHOWN)]
    rows = [(name, short_name(path), *rest) for path, *rest in zip(*columns, strict=True)]
    most = max(FEWEST_IMAGES, MOST_IMAGES // len(found))
    images = one.arrays["shown_images"]
    thumbnails = [_thumbnail(image, row) for image, row in zip(images[:most], rows, strict=False)]
    several = len(found) > 1
    return Figure(
        name=f"answers-{place}",
        title=f"Answers of {name}" if several else "Answers",
        reading="Questions by their first words, the most frequent first, with the share of right answers; then the"
        " worst answers, the surest of them first, with what people answered. Look whether the image or the question"
        " was misread.",
        paper="Antol et al. 2015",
        table=Table(_COLUMNS, rows),
        album=Album(
            thumbnails,
            [Listing("First words of questions", _beginnings(one)), list_worst(thumbnails, "Worst answers first")],
        ),
        heavy=len(found) > OPEN_NETWORKS,
    )


def _beginnings(one: Measurement) -> list[Row]:
    """Return a row for each beginning of questions."""
    columns = (one.arrays[key].tolist() for key in ("beginnings", "beginning_questions", "beginning_accuracy"))
    return [
        Row(mark_up("{} ...", text), f"{count:,} questions, {right:.0%} right", share=right)
        for text, count, right in zip(*columns, strict=True)
    ]


def _thumbnail(image: Picture, row: tuple[Any, ...]) -> Thumbnail:
    _, file, question, given, truth, score, confidence = row
    sentence = f"{{}}: said {{}}, truth {{}} ({score:.0%} right, {confidence:.0%} sure)"
    description = sentence.format(isolate(question), isolate(given), isolate(truth))
    height, width = image.shape[:2]
    said = mark_up(sentence, question, given, truth)
    return Thumbnail(encode_small(image), (width, height), said, description, file)
