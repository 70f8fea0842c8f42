"""Figures as the page carries them: drawn by whoever draws their probe, packed, with their pictures or without."""

from __future__ import annotations

import base64
import logging
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import vitclinic.reports.figures  # noqa: F401  (registers the drawers)
from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import DRAWERS, Figure, Picture
from vitclinic.reports.generic import drawn_generically
from vitclinic.reports.packing import as_csv, packed, plot_json

log = logging.getLogger(__name__)

DEFAULT_HEIGHT = 420


@dataclass
class Drawings:
    """The figures of one page, and what it carries of them by name."""

    images: bool
    packed: dict[str, str] = field(default_factory=dict)
    left_out: int = 0
    """How many pictures are not in the page, because nobody wants them there."""
    _names: set[str] = field(default_factory=set)

    def of(self, probe: str, examined: Sequence[Examined]) -> list[dict[str, Any]]:
        """The views of a probe's figures; a drawer that fails leaves its probe to the generic one, with a message."""
        try:
            drawer = DRAWERS.get(probe)
            figures = drawn_generically(probe, examined) if drawer is None else drawer(examined)
            return [self.view(figure) for figure in figures]
        except Exception as error:  # a measurement of another version may lack what its drawer looks for
            log.info("%s cannot be drawn", probe, exc_info=error)
            log.warning("The figures of %s cannot be drawn: %s: %s", probe, type(error).__name__, error)
            return [self.view(figure) for figure in drawn_generically(probe, examined)]

    def view(self, figure: Figure) -> dict[str, Any]:
        """What the templates show of a figure, which the page carries from now on."""
        name = self._own(figure.name)
        if figure.plot is not None:
            self.packed[f"plot-{name}"] = packed(plot_json(figure.plot, self.images))
        self.packed[f"csv-{name}"] = packed(as_csv(figure.table))
        pictures = figure.pictures if self.images else ()
        self.left_out += len(figure.pictures) - len(pictures)
        return {
            "name": name,
            "title": figure.title,
            "reading": figure.reading,
            "paper": figure.paper,
            "heavy": figure.heavy,
            "plotted": figure.plot is not None,
            "height": DEFAULT_HEIGHT if figure.plot is None else int(figure.plot.layout.height or DEFAULT_HEIGHT),
            "rows": len(figure.table.rows),
            "pictures": [_picture(picture) for picture in pictures],
            "left_out": _left_out(len(figure.pictures) - len(pictures)),
        }

    def _own(self, wanted: str) -> str:
        """A name of letters, digits and hyphens that no other figure of the page has."""
        base = re.sub(r"[^A-Za-z0-9]+", "-", wanted).strip("-") or "figure"
        candidates = (base if number == 1 else f"{base}-{number}" for number in range(1, len(self._names) + 2))
        name = next(candidate for candidate in candidates if candidate not in self._names)
        self._names.add(name)
        return name


def _picture(picture: Picture) -> dict[str, Any]:
    width, height = struct.unpack(">II", picture.png[16:24])  # where a PNG file says it
    return {
        "caption": picture.caption,
        "data": base64.b64encode(picture.png).decode("ascii"),
        "width": width,
        "height": height,
        "shape": round(width / height, 3),
    }


def _left_out(count: int) -> str:
    return f"{count} picture{'s' * (count != 1)} left out, as asked for." if count else ""
