"""`data=shards/train-{000..099}.tar`: shards as a source, for data that fits no disk."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from vitclinic._core.errors import DataError
from vitclinic._core.io import fingerprint
from vitclinic.data.cache import Progress, cache_limit
from vitclinic.data.config import DataConfig
from vitclinic.data.folder import SPLIT_NAMES, LeftOut
from vitclinic.data.shards.images import ShardRecords
from vitclinic.data.shards.index import Index, read_index
from vitclinic.data.shards.names import Shard, list_shards, look_at
from vitclinic.data.source import SPLITS, Source

_AT_A_TIME = 4
_MOST_CLASSES = 1_000_000


def open_shards(config: DataConfig, progress: Progress) -> Source:
    """Open shards as a source; what cannot be used is an error, or is left out and noted with `on_error: skip`."""
    spec = config.source
    urls = list_shards(spec)
    left_out = LeftOut(config.on_error == "skip")
    shards, indexes = _index_all(urls, left_out, progress)
    if not shards:
        raise DataError(f"'{spec}' has no shard that can be read.")
    _check_room(spec, shards, config.window)
    classes, codes = _number_classes(spec, indexes)
    splits: dict[str, ShardRecords] = {}
    for split, members in _assign_splits(spec, shards).items():
        labels = [codes.get(str(label), -1) if codes else label for n in members for label in indexes[n].labels]
        chosen, known = [shards[n] for n in members], [indexes[n] for n in members]
        splits[split] = ShardRecords(chosen, known, np.asarray(labels, np.int64), 2 * config.window)
    identity = fingerprint("shards", [[shard.url, shard.size, shard.version] for shard in shards])
    name = spec.partition("{")[0].rstrip("-_./") or spec
    return Source(name, classes, splits, identity, notes=tuple(left_out.notes))


def _index_all(urls: Sequence[str], left_out: LeftOut, progress: Progress) -> tuple[list[Shard], list[Index]]:
    """Look at all shards, some at a time."""

    def index(url: str) -> tuple[Shard, Index] | DataError:
        try:
            shard = look_at(url)
            return shard, read_index(shard)
        except DataError as error:
            return error

    shards, indexes = list[Shard](), list[Index]()
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        for done, found in enumerate(pool.map(index, urls), 1):
            progress("indexing", done, len(urls))
            if isinstance(found, DataError):
                if not left_out.skip:
                    raise found
                left_out.notes.append(str(found))
                continue
            for problem in found[1].problems:
                left_out.add(problem.rstrip("."), "fix it")
            shards.append(found[0])
            indexes.append(found[1])
    return shards, indexes


def _check_room(spec: str, shards: Iterable[Shard], window: int) -> None:
    """Raise a DataError if the cache cannot hold two windows, the one that is read and the one that is fetched."""
    largest = sorted((shard.size for shard in shards if shard.is_copied), reverse=True)
    needed = sum(largest[: 2 * window])
    if needed > cache_limit():
        raise DataError(
            f"'{spec}': twice data.window={window} shards take {needed / 1e9:.3g} GB, more than the cache may hold;"
            " lower data.window or raise VITCLINIC_CACHE_SIZE."
        )


def _assign_splits(spec: str, shards: Sequence[Shard]) -> dict[str, list[int]]:
    """Return the shards of each split, by a word of their names or by their folder; all train if none has one."""
    found: dict[str, list[int]] = {}
    for number, shard in enumerate(shards):
        folder, file = shard.url.lower().replace(os.sep, "/").split("/")[-2:]
        words = [folder, *re.split(r"[^a-z]+", file)]
        named = [SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES]
        found.setdefault(named[-1] if named else "", []).append(number)
    unnamed = found.pop("", [])
    if unnamed and found:
        raise DataError(
            f"'{spec}': the name of '{shards[unnamed[0]].url}' does not say train, val or test, as those of others do."
        )
    return {split: found[split] for split in SPLITS if split in found} or {"train": unnamed}


def _number_classes(spec: str, indexes: Sequence[Index]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the class names and, if labels are texts, the number of each."""
    kinds = {type(label) for index in indexes for label in index.labels}
    stated = next((index.classes for index in indexes if index.classes), None)
    if kinds == {int, str}:
        raise DataError(f"'{spec}' has labels that are numbers and labels that are names; write one kind.")
    if kinds == {str}:
        names = stated or sorted({str(label) for index in indexes for label in index.labels})
        return tuple(names), {name: code for code, name in enumerate(names)}
    top = max((int(label) for index in indexes for label in index.labels), default=0)
    if stated is None and top >= _MOST_CLASSES:
        raise DataError(f"'{spec}': label {top} would make {top + 1:,} classes; number them from 0.")
    return tuple(stated or (str(label) for label in range(top + 1))), {}
