"""A survey of the headers of a source's images, before any of them is decoded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np

from vitclinic.data.cache import Progress, cache_folder, write_atomically
from vitclinic.data.decoding import UNREADABLE, Size, is_grey
from vitclinic.data.source import Source

LARGEST_DEFAULT, STEP, SMALLEST_VARIED = 224, 16, 32
"""Unless a size is asked for: images of one size keep it up to 224; of different sizes they are brought to the largest
multiple of 16, from 32 to 224, that is not above the median shorter side."""

_AT_MOST = 50_000
_FORMAT = 2


@dataclass(frozen=True)
class Survey:
    """Default size and channels, and the median shorter side of the images."""

    size: Size
    channels: int
    shorter_side: float


def survey(source: Source, progress: Progress) -> Survey:
    """Return the survey of a source, which is made once per machine."""
    if source.uniform is not None:
        size, channels = source.uniform
        return Survey(size, channels, float(min(size)))
    stored = cache_folder() / "surveys" / f"{source.fingerprint[:32]}-{_FORMAT}.json"
    if stored.exists():
        values = json.loads(stored.read_text())
        return Survey(tuple(values["size"]), values["channels"], values["shorter_side"])
    made = _survey(source, progress)
    write_atomically(stored, json.dumps(asdict(made)))
    return made


def _survey(source: Source, progress: Progress) -> Survey:
    """Read the headers of the main images (50,000 of them, evenly spaced, if there are more)."""
    sizes: list[tuple[int, int]] = []
    grey = True
    records = source.main
    chosen = np.unique(np.linspace(0, len(records) - 1, min(len(records), _AT_MOST)).astype(int))
    for number, index in enumerate(chosen):
        progress("looking at", number + 1, len(chosen))
        try:
            with records.read(int(index)) as image:
                sizes.append(image.size)
                grey = grey and is_grey(image)
        except UNREADABLE:
            continue  # decoding it will say so, with the file's name
    shorter = float(np.median([min(size) for size in sizes] or [LARGEST_DEFAULT]))
    varied = len(set(sizes)) != 1
    side = min(max(SMALLEST_VARIED, int(shorter) // STEP * STEP) if varied else int(shorter), LARGEST_DEFAULT)
    return Survey((side, side), 1 if grey and sizes else 3, shorter)
