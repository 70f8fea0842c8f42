"""Indices of shards: each shard is read once, when it is first seen, and its index is kept in the cache.

Tars are WebDataset's: the members of a sample have one name up to its first dot, `KEY.jpg` beside `KEY.cls`, or beside
`KEY.json` with a `label`. Parquet files are as the Hugging Face hub has them; of these only the labels are read.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from vitclinic._core.errors import DataError, MissingExtraError
from vitclinic._core.io import LARGEST_TEXT, read_json, sign
from vitclinic.data.cache import cache_folder, read_stored, write_atomically
from vitclinic.data.folder import IMAGE_SUFFIXES
from vitclinic.data.shards.copies import OpenShard
from vitclinic.data.shards.names import Shard, open_there

LABELS = ("label", "labels", "fine_label", "class", "target", "cls")
"""Names of the label: of a field of JSON, or of a column of parquet."""

_FORMAT = 1
_MOST_IMAGES = 200_000
_FIELDS = {"names": list, "labels": list, "starts": list, "lengths": list, "problems": list}


@dataclass(frozen=True)
class Index:
    """Content of a shard: its images with their labels, all numbers or all texts, and what is wrong with others."""

    names: list[str]
    """Keys of a tar; empty for parquet."""
    labels: list[int] | list[str]
    starts: list[int]
    """Places in a tar, rows of parquet."""
    lengths: list[int]
    """In bytes; empty for parquet."""
    problems: list[str]
    classes: list[str] | None = None
    """Names of the classes, if the shard has them."""

    def plain(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _FIELDS}, "classes": self.classes}


def read_index(shard: Shard) -> Index:
    """Return the index of a shard, which is made when the shard is first seen.

    Raises:
        DataError: The shard is gone, damaged, or too large.
    """
    stored = cache_folder() / "shards" / "index" / f"{shard.key}-{_FORMAT}.json"
    values = read_stored(stored, _FIELDS)
    if values is not None:
        return Index(**{name: values[name] for name in _FIELDS}, classes=values.get("classes"))
    made = _index_parquet(shard) if shard.is_parquet else _index_tar(shard)
    if len(made.labels) > _MOST_IMAGES:
        raise DataError(f"'{shard.url}' has more than {_MOST_IMAGES:,} images; write smaller shards.")
    write_atomically(stored, json.dumps(sign(made.plain())))
    return made


def _index_parquet(shard: Shard) -> Index:
    if find_spec("pyarrow") is None:
        raise MissingExtraError(f"data={shard.url}", "parquet")
    from vitclinic.data.parquet import read_labels

    with open_there(shard) as file:
        labels, classes = read_labels(file, Path(shard.url))
    problems = [f"{shard.url} row {row}: the label is missing." for row, label in enumerate(labels) if label is None]
    rows = [row for row, label in enumerate(labels) if label is not None]
    return Index([], [labels[row] for row in rows], rows, [], problems, classes)


def _index_tar(shard: Shard) -> Index:
    """Look through a tar: samples, and that it is whole."""
    opened = OpenShard(shard)
    file, end, samples = opened.file, 0, dict[str, dict[str, tarfile.TarInfo]]()
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                end = member.offset_data + -(-member.size // 512) * 512
                folder, _, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                if member.isfile() and stem:
                    samples.setdefault(f"{folder}/{stem}" if folder else stem, {})[suffix.lower()] = member
        file.seek(end)
        if not _is_blank(file.read(shard.size - end)):  # tarfile takes a broken header for the end
            raise tarfile.ReadError("it is cut off, or a header in it is broken")
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise DataError(
            f"'{shard.url}' is damaged ({' '.join(str(error).split())}); write or fetch this shard again."
        ) from error
    index = Index([], [], [], [], [])
    for key, members in samples.items():
        _add_sample(index, shard, key, members, file)
    return index


def _is_blank(rest: bytes) -> bool:
    """Return True for the blocks of zeros that end a tar."""
    return len(rest) >= 512 and not rest.strip(b"\0")


def _add_sample(index: Index, shard: Shard, key: str, members: Mapping[str, tarfile.TarInfo], file: BinaryIO) -> None:
    images = [member for suffix, member in members.items() if f".{suffix}" in IMAGE_SUFFIXES]
    if not images and not any(suffix in ("cls", "label", "json") for suffix in members):
        return  # a README, say
    label = _read_label(members, file)
    if len(images) != 1:
        index.problems.append(f"{shard.url} '{key}': it has {len(images) or 'no'} images; expected one.")
    elif label is None:
        index.problems.append(f"{shard.url} '{key}': it has no label; expected {key}.cls, or a 'label' in {key}.json.")
    else:
        index.names.append(key)
        index.labels.append(label)  # type: ignore[arg-type]
        index.starts.append(images[0].offset_data)
        index.lengths.append(images[0].size)


def _read_label(members: Mapping[str, tarfile.TarInfo], file: BinaryIO) -> int | str | None:
    for suffix in ("cls", "label", "json"):
        member = members.get(suffix)
        if member is None or member.size > LARGEST_TEXT:
            continue
        file.seek(member.offset_data)
        try:
            value: Any = file.read(member.size).decode("utf-8").strip()
            if suffix == "json":
                fields = read_json(value)
                value = next((fields[name] for name in LABELS if name in fields), None)
        except (ValueError, TypeError):
            return None
        if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
            return int(value)
        return value if isinstance(value, int | str) and value != "" and not isinstance(value, bool) else None
    return None
