"""Where the result of a study is kept, so that none takes the place of a better one.

The plain call of a study, on its own data and with nothing changed, has the claim's name. Any other has a digest of
what it changed behind it. Of the same call, the result with more seeds is kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vitclinic.files import write_json
from vitclinic.reports.study.page import write_study
from vitclinic.studies.named_data import NAMED_DATA
from vitclinic.studies.study import ScaleName, Study
from vitclinic.training import Recipe

log = logging.getLogger(__name__)

_SAME = ("schema", "study", "scale", "data", "words")
"""What two results have in common that differ in their seeds only."""


def result_name(chosen: Study, scale: ScaleName, words: Sequence[str], recipes: Collection[Recipe]) -> str:
    """The name of a result's file, without its ending; `words` are those that changed more than the data."""
    name = f"{chosen.claim}-paper" if scale == "paper" else chosen.claim
    if not words and data_names(recipes) == data_names(chosen.recipes(scale=scale).values()):
        return name
    changed = json.dumps([list(words), sorted({_place(recipe.data.source) for recipe in recipes})])
    return f"{name}+{hashlib.sha256(changed.encode()).hexdigest()[:8]}"  # no claim has a + in its name


def data_names(recipes: Iterable[Recipe]) -> tuple[str, ...]:
    """The names of the data that recipes are about, without where they lie."""
    return tuple(sorted({_data_name(recipe.data.source) for recipe in recipes}))


def _data_name(source: str) -> str:
    """`CIFAR-10/`, `data/cifar10` and `torchvision:CIFAR10@data` are all the set that studies call cifar10."""
    of_torchvision, _, _ = source.removeprefix("torchvision:").partition("@")
    name = of_torchvision if source.startswith("torchvision:") else Path(source).name
    known = name.lower().replace("-", "").replace("_", "")
    return known if known in NAMED_DATA else name


def _place(source: str) -> str:
    """The same for a folder however it is written; two folders of one name differ."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def keep(file: Path, plain: Mapping[str, Any]) -> None:
    """Write a result and its page, unless the file holds the same with more seeds, of which these would be a part."""
    with _alone(file.parent):
        seeds = len(plain["seeds"])
        if _seeds_kept(file, plain) > seeds:
            log.warning("'%s' has more seeds and is kept: the result with %d is shown only here.", file, seeds)
            return
        write_json(file, plain)
        write_study(file.with_suffix(".html"), plain)


def _seeds_kept(file: Path, plain: Mapping[str, Any]) -> int:
    """How many seeds the same study, on the same data, has in the file; 0 if anything else is there."""
    asked = json.loads(json.dumps(plain))
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        same = all(stored[key] == asked[key] for key in _SAME) and _runs_agree(stored["runs"], asked["runs"])
        return len(stored["seeds"]) if same else 0
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return 0


def _runs_agree(stored: Mapping[str, Mapping[str, str]], asked: Mapping[str, Mapping[str, str]]) -> bool:
    """A run's folder is the digest of its recipe and its data: other images of the same name have others."""
    return all(
        run in ("", stored[arm].get(seed) or run) for arm, by_seed in asked.items() for seed, run in by_seed.items()
    )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two commands that end at a time compare and write one after the other."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # that some file systems have no locks is no reason not to write
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
