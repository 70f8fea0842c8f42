"""Albums: images of the data in a page, in a matrix and in lists whose rows open them.

Every image is in the page once, however many rows show it. What users named is escaped, and set apart from the text
around it, whichever way it is written.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup


def isolate(name: object) -> str:
    """Return a name for a plain sentence, such as a label for screen readers, that keeps its direction to itself."""
    return f"\u2068{name}\u2069"


def mark_up(sentence: str, *names: object) -> Markup:
    """Return a sentence as HTML, with names in the place of each `{}`.

    Example:
        >>> mark_up("{} taken for {}", "cat", "<b>")
        Markup('<bdi>cat</bdi> taken for <bdi>&lt;b&gt;</bdi>')
    """
    return Markup(sentence).format(*(Markup("<bdi>{}</bdi>").format(str(name)) for name in names))


@dataclass(frozen=True)
class Thumbnail:
    """A small image of the data, with what is said of it."""

    file: bytes
    """A PNG or JPEG file."""
    size: tuple[int, int]
    """Width and height in pixels."""
    said: Markup
    description: str
    """The same in plain text, for screen readers."""
    name: str
    """Of its file, or its table and row."""


@dataclass(frozen=True)
class Row:
    """A row of a list, which opens its images if it has some."""

    title: Markup
    fact: str
    thumbnails: Sequence[int] = ()
    """Numbers of the album's images."""
    share: float | None = None
    """Length of its bar, between 0 and 1."""


@dataclass(frozen=True)
class Listing:
    """A list of rows: the first `short` of them are seen at once, the others when asked for."""

    title: str
    rows: Sequence[Row]
    short: int = 12
    open_rows: int = 0
    """So many rows at its beginning are open."""


@dataclass(frozen=True)
class Cell:
    """A cell of a matrix."""

    text: str
    description: str
    level: float
    """How dark it is, between 0 and 1."""
    right: bool
    opens: tuple[int, int] | None = None
    """The list, and the row in it, whose images it opens."""


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix: a row for each label, a column for each predicted class."""

    names: Sequence[str]
    cells: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Album:
    """Images of the data, in a matrix and in lists."""

    thumbnails: Sequence[Thumbnail]
    lists: Sequence[Listing] = field(default_factory=tuple)
    matrix: Matrix | None = None

    def without_images(self) -> Album:
        """Return the same without images: nothing opens."""
        lists = [
            Listing(one.title, [Row(row.title, row.fact, (), row.share) for row in one.rows], one.short)
            for one in self.lists
        ]
        return Album((), lists, self.matrix)

    def pack(self) -> str:
        """Return the images as JSON: a list of addresses with the data in them."""
        return json.dumps([_address(thumbnail.file) for thumbnail in self.thumbnails])

    def view(self) -> dict[str, Any]:
        """Return what the template shows."""
        return {
            "matrix": None if self.matrix is None else self._view_matrix(self.matrix),
            "lists": [
                {
                    "title": listing.title,
                    "short": listing.short,
                    "open_rows": listing.open_rows,
                    "rows": [self._view_row(row) for row in listing.rows],
                }
                for listing in self.lists
            ],
        }

    def _view_row(self, row: Row) -> dict[str, Any]:
        shown = [(number, self.thumbnails[number]) for number in row.thumbnails]
        return {"title": row.title, "fact": row.fact, "share": row.share, "thumbnails": shown}

    def _view_matrix(self, matrix: Matrix) -> dict[str, Any]:
        def opens(cell: Cell) -> str | None:
            if cell.opens is None or not self.lists[cell.opens[0]].rows[cell.opens[1]].thumbnails:
                return None
            return f"{cell.opens[0]}-{cell.opens[1]}"

        cells = [[(cell, opens(cell)) for cell in row] for row in matrix.cells]
        return {"names": matrix.names, "rows": list(zip(matrix.names, cells, strict=True))}


def _address(file: bytes) -> str:
    kind = "png" if file.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file).decode('ascii')}"
