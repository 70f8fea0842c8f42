"""Pictures of measurements as PNG files, in a folder beside the measurement: `PROBE-KEY/NAME.png`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitclinic._core.images import png
from vitclinic._core.io import write_bytes, write_errors
from vitclinic._core.records import Measurement
from vitclinic.probes import Probe

log = logging.getLogger(__name__)


def draw(probe: Probe, measurement: Measurement, file: Path, anew: bool) -> Path | None:
    """Write the pictures of a measurement that is stored as `file`, and return their folder, None if there are none.

    Unless they are to be drawn `anew`, pictures that are there already are left. A probe that cannot draw is a message:
    its numbers are stored.
    """
    if measurement.status not in ("ok", "not_converged"):
        return None
    try:
        pictures = dict(probe.pictures(measurement))
    except Exception as error:  # a probe may raise anything
        log.info("%s cannot draw", probe.name, exc_info=error)
        log.warning("There are no pictures of %s: %s: %s", probe.name, type(error).__name__, error)
        return None
    if not pictures:
        return None
    folder = file.with_suffix("")
    write_pictures(folder, pictures, anew)
    return folder


def write_pictures(folder: Path, pictures: Mapping[str, NDArray[np.uint8]], anew: bool = True) -> list[Path]:
    """Write each picture [H, W, 3] as a PNG named after it; characters that are not for file names become hyphens."""
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, picture in pictures.items():
        files.append(folder / f"{_file_name(name)}.png")
        if anew or not files[-1].exists():
            write_bytes(files[-1], png(picture))
    return files


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "picture"
