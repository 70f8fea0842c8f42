"""Data for segmentation: folders `images/` and `masks/` with equal names, or parquet with `image` and `mask`.

A mask has one value a pixel: the number of its class, or 255 for void; a palette image has its indices. Folders may
lie in `train/`, `val/` and `test/`. A file `classes.json` beside them, a list of names, says what the classes are
called; without it, they are numbered up to the largest label of the training masks.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from vitclinic._core.errors import DataError
from vitclinic._core.io import fingerprint, read_json_file, sign
from vitclinic.data.annotations.annotation import VOID, Mask
from vitclinic.data.cache import cache_folder, read_stored, write_atomically
from vitclinic.data.decoding import UNREADABLE
from vitclinic.data.folder import CLASSES_FILE, image_files
from vitclinic.data.source import SPLITS, NumberedRecords, Source

IMAGES, MASKS = "images", "masks"
_LABELS_FORMAT = 2


def read_mask(image: Image.Image) -> Mask:
    """Return the labels of a mask image.

    Raises:
        ValueError: It has colours, or labels above 255, instead of one number a pixel.
    """
    if image.mode not in ("1", "L", "P", "I", "I;16"):
        raise ValueError(f"a mask has one number a pixel, and this is a picture of mode {image.mode}")
    labels = np.asarray(image)
    if labels.dtype != np.uint8 and (int(labels.min()) < 0 or int(labels.max()) > VOID):
        raise ValueError(f"its labels go up to {int(labels.max())}, and {VOID} is the largest")
    return labels.astype(np.uint8)


class MaskedFiles(NumberedRecords):
    """Images in files, each with a file of its mask."""

    def __init__(self, root: Path, images: list[Path], masks: list[Path]) -> None:
        super().__init__(str(root), np.zeros(len(images), np.int64))
        self.root, self.images, self.masks = root, images, masks

    def name(self, index: int) -> str:
        return str(self.images[index])

    def read(self, index: int) -> Image.Image:
        return Image.open(self.images[index])

    def mask(self, index: int) -> Mask:
        with Image.open(self.masks[index]) as image:
            return read_mask(image)

    def contents(self) -> Sequence[Any]:  # type: ignore[override]
        pairs = zip(self.images, self.masks, strict=True)
        return [(image.name, image.stat().st_size, mask.stat().st_size) for image, mask in pairs]


class _Masked(Protocol):
    def __len__(self) -> int: ...

    def name(self, index: int) -> str: ...

    def mask(self, index: int) -> Mask: ...


def open_mask_folder(path: Path) -> Source:
    """Open a folder with `images` and `masks`, or with `train`, `val` and `test` folders that have them.

    Raises:
        DataError: An image has no mask, a mask no image, or there are none.
    """
    roots = {split: path / split for split in SPLITS if (path / split / IMAGES).is_dir()} or {"train": path}
    splits = {split: _pair(root) for split, root in roots.items()}
    stamps = [
        (split, str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns)
        for split, records in splits.items()
        for file in (*records.images, *records.masks)
    ]
    stated = _read_class_names(path / CLASSES_FILE)
    identity = fingerprint("masks", stamps, stated)
    classes = stated or _number_classes(next(iter(splits.values())), identity)
    return Source(str(path), (), splits, identity, targets={"mask": classes})


def _pair(root: Path) -> MaskedFiles:
    for name in (IMAGES, MASKS):
        if not (root / name).is_dir():
            raise DataError(f"'{root}' has no folder '{name}'; expected '{IMAGES}' and '{MASKS}' with equal names.")
    images = {str(file.relative_to(root / IMAGES).with_suffix("")): file for file in image_files(root / IMAGES)}
    masks = {str(file.relative_to(root / MASKS).with_suffix("")): file for file in image_files(root / MASKS)}
    if lacking := sorted(images.keys() - masks.keys()):
        raise DataError(f"'{images[lacking[0]]}' has no mask of that name in '{root / MASKS}' ({len(lacking)} such).")
    if alone := sorted(masks.keys() - images.keys()):
        raise DataError(f"'{masks[alone[0]]}' is the mask of no image in '{root / IMAGES}' ({len(alone)} such).")
    if not images:
        raise DataError(f"'{root / IMAGES}' contains no images.")
    names = sorted(images)
    return MaskedFiles(root, [images[name] for name in names], [masks[name] for name in names])


def _read_class_names(file: Path) -> tuple[str, ...] | None:
    if not file.is_file():
        return None
    names = read_json_file(file, DataError)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"'{file}' must be a JSON list of the names of the classes, in the order of their labels.")
    return tuple(names)


def _number_classes(records: _Masked, identity: str) -> tuple[str, ...]:
    """Return numbers as the names of the classes, up to the largest label; it is looked for once per machine."""
    stored = cache_folder() / "labels" / f"{identity[:32]}-{_LABELS_FORMAT}.json"
    found = read_stored(stored, {"largest": int})
    if found is None:
        found = {"largest": max(_largest_label(records, index) for index in range(len(records)))}
        write_atomically(stored, json.dumps(sign(found)))
    return tuple(str(number) for number in range(found["largest"] + 1))


def _largest_label(records: _Masked, index: int) -> int:
    try:
        mask = records.mask(index)
    except UNREADABLE as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise DataError(f"{records.name(index)}: its mask cannot be read ({reason}).") from error
    return int(mask[mask != VOID].max(initial=0))


def open_mask_parquet(path: Path) -> Source:
    """Open parquet files whose rows have an `image` and a `mask`, both with their `bytes`."""
    from vitclinic.data import parquet, tables

    files = parquet.files_by_split(path)
    splits: dict[str, MaskedRows] = {}
    for split, paths in files.items():
        table = tables.read_table(paths)
        for name in ("image", "mask"):
            if name not in table.column_names:
                raise DataError(f"'{path}' has no column '{name}' in its {split} files; it has {table.column_names}.")
        source = str(path if path.is_file() else paths[0].parent / split)
        splits[split] = MaskedRows(source, table.column("image"), table.column("mask"))
    identity = fingerprint("masks in parquet", {split: tables.stamp_files(paths) for split, paths in files.items()})
    stated = _read_class_names(path / CLASSES_FILE) if path.is_dir() else None
    classes = stated or _number_classes(next(iter(splits.values())), identity)
    return Source(
        str(path), (), splits, identity if stated is None else fingerprint(identity, stated), targets={"mask": classes}
    )


class MaskedRows(NumberedRecords):
    """Images and masks in the bytes of two Arrow columns."""

    def __init__(self, source: str, images: Any, masks: Any) -> None:
        super().__init__(source, np.zeros(len(images), np.int64))
        self.images, self.masks = images, masks

    def name(self, index: int) -> str:
        return f"{self.source} row {index}"

    def read(self, index: int) -> Image.Image:
        return _open_bytes(self.images, index)

    def mask(self, index: int) -> Mask:
        with _open_bytes(self.masks, index) as image:
            return read_mask(image)

    def contents(self) -> Sequence[Any]:  # type: ignore[override]
        columns = (self.images, self.masks)
        return [[len(column[row].as_py()["bytes"] or b"") for column in columns] for row in range(len(self))]


def _open_bytes(column: Any, index: int) -> Image.Image:
    record: dict[str, Any] | None = column[index].as_py()
    if not record or record.get("bytes") is None:
        raise OSError("the row has no bytes")
    return Image.open(io.BytesIO(record["bytes"]))
