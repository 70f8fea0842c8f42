"""`data=FOLDER`: a folder with one sub-folder per class, or with train/val/test folders that contain them.

An optional file `classes.json`, {folder: class name} in the order of the labels, lists the classes where folder names
are not enough: names that are not valid file names, another order, classes without images, no training images.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vitclinic._core.errors import DataError
from vitclinic._core.io import fingerprint, read_json_file
from vitclinic.data.source import LEAVE_OUT, ROLES, Source

CLASSES_FILE = "classes.json"
IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})

UNREADABLE_SUFFIXES = frozenset(
    {".arw", ".avif", ".cr2", ".cr3", ".dcm", ".dng", ".exr", ".hdr", ".heic", ".heif", ".j2k", ".jp2", ".jpf", ".jpx"}
    | {".jxl", ".nef", ".nii", ".orf", ".pbm", ".pnm", ".psd", ".raf", ".raw", ".rw2", ".svg", ".tga"}
)
"""Images that nothing here decodes: reported, not skipped in silence."""

SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}


class FileRecords:
    """Images in files, one label each."""

    def __init__(self, root: Path, paths: list[str], labels: list[int]) -> None:
        self.root = root
        self.paths = paths
        self.labels = np.asarray(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        return str(self.root / self.paths[index])

    def read(self, index: int) -> Image.Image:
        path = self.root / self.paths[index]
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise OSError("it is not a regular file")
        return Image.open(path)

    def contents(self) -> list[tuple[str, int]]:
        return [(path, _stamp(self.root / path)[0]) for path in self.paths]


def open_folder(path: Path, on_error: str) -> Source:
    """Open a folder as a source; what cannot be used is an error, or is left out and noted with `on_error: skip`."""
    try:
        return _open(path, LeftOut(on_error == "skip"))
    except OSError as error:
        raise DataError(
            f"'{error.filename or path}' cannot be read: {(error.strerror or str(error)).lower()}."
        ) from error


class LeftOut:
    """Files of a folder that a data set cannot use: an error, or a note for each with `on_error: skip`."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.notes: list[str] = []

    def add(self, problem: str, advice: str) -> None:
        if not self.skip:
            raise DataError(f"{problem}; {advice}, {LEAVE_OUT}.")
        self.notes.append(f"{problem}.")


def _open(path: Path, left_out: LeftOut) -> Source:
    stated = _read_classes(path)
    roots = _split_roots(path, stated is not None, left_out)
    parts = _find_roles(path, roots)
    if stated is not None:
        _find_unlisted(path, [*roots.values(), *parts], stated, left_out)
    classes = _classes(path, roots, left_out) if stated is None else tuple(stated.values())
    if parts and stated is None:  # identities to find need not be those to learn from
        classes = tuple(sorted({*classes, *(folder.name for part in parts for folder in _folders(part))}))
    folders = classes if stated is None else tuple(stated)
    splits = {split: _records(root, folders, left_out) for split, root in roots.items()}
    queries = None
    if parts:
        query, gallery = (_records(part, folders, left_out) for part in parts)
        splits["test"] = _join(path, query, gallery)
        queries = np.arange(len(query) + len(gallery)) < len(query)
    listing = [
        (split, name, *_stamp(records.root / name)) for split, records in splits.items() for name in records.paths
    ]
    identity = fingerprint("folder", str(path.resolve()), classes, listing)
    return Source(str(path), classes, splits, identity, notes=tuple(dict.fromkeys(left_out.notes)), queries=queries)


def _find_roles(path: Path, roots: dict[str, Path]) -> list[Path]:
    """Return the folders `query` and `gallery` beside a train folder, of data for retrieval; none if it has neither."""
    parts = [path / role for role in ROLES if (path / role).is_dir()]
    if not parts or roots.get("train") == path:
        return []
    if len(parts) < len(ROLES) or "test" in roots:
        other = "a test folder as well" if len(parts) == len(ROLES) else "not both of query and gallery"
        raise DataError(f"'{path}' has '{parts[0].name}' and {other}; queries and their gallery are the test images.")
    return parts


def _join(path: Path, first: FileRecords, second: FileRecords) -> FileRecords:
    """Return the images of two folders in `path` as one set."""
    paths = [str(records.root.relative_to(path) / name) for records in (first, second) for name in records.paths]
    return FileRecords(path, paths, [*first.labels.tolist(), *second.labels.tolist()])


def _read_classes(path: Path) -> dict[str, str] | None:
    """Return the contents of `classes.json`, or None if there is no such file."""
    file = path / CLASSES_FILE
    if not file.is_file():
        return None
    stated = read_json_file(file, DataError)
    if not isinstance(stated, dict) or not stated or not all(isinstance(name, str) for name in stated.values()):
        raise DataError(f"'{file}' must be a JSON object {{folder: class name}}.")
    return stated


def _find_unlisted(path: Path, roots: Sequence[Path], stated: Container[str], left_out: LeftOut) -> None:
    """Note folders of images that `classes.json` does not list: nobody would miss a class that is left out unseen."""
    for folder in (folder for root in roots for folder in _folders(root)):
        if folder.name not in stated and any(image_files(folder)):
            left_out.add(
                f"'{folder}' contains images, but '{path / CLASSES_FILE}' does not list it", "add it, move the folder"
            )


def _split_roots(path: Path, classes_are_stated: bool, left_out: LeftOut) -> dict[str, Path]:
    folders = _folders(path)
    roots: dict[str, Path] = {}
    for folder in folders:
        split = SPLIT_NAMES.get(folder.name.lower())
        if split is not None and split in roots:
            raise DataError(f"'{path}' has two {split} folders, '{roots[split].name}' and '{folder.name}'; keep one.")
        if split is not None:
            roots[split] = folder
    if "train" in roots or (roots and classes_are_stated):
        for split in [split for split in roots if split != "train" and not any(image_files(roots[split]))]:
            if not classes_are_stated:
                left_out.add(f"The folder '{roots[split]}' contains no images", "add some, delete the folder")
                del roots[split]
        return roots
    if not folders:
        raise DataError(_no_class_folders(path))
    return {"train": path}


def _no_class_folders(path: Path) -> str:
    loose = sum(1 for _ in image_files(path))
    found = f"{loose} images and no sub-folders" if loose else "no images and no sub-folders"
    return f"'{path}' contains {found}; expected one sub-folder per class with its images."


def _classes(path: Path, roots: dict[str, Path], left_out: LeftOut) -> tuple[str, ...]:
    """Return the class names in order, from the training folder; every class must have a training image."""
    names = [folder.name for folder in _folders(roots["train"])]
    empty = [name for name in names if not any(image_files(roots["train"] / name))]
    if empty and len(empty) == len(names):
        raise DataError(f"'{path}' has {len(names)} sub-folders, none of which contains an image.")
    for name in empty:
        left_out.add(f"Class folder '{roots['train'] / name}' contains no images", "add some, delete the folder")
    if not names:
        raise DataError(_no_class_folders(roots["train"]))
    kept = tuple(name for name in names if name not in empty)
    for split, root in roots.items():
        for folder in _folders(root):
            if folder.name not in names:
                raise DataError(f"'{folder}' is a class of the {split} folder that is missing from the train folder.")
    return kept


def _records(root: Path, classes: tuple[str, ...], left_out: LeftOut) -> FileRecords:
    paths: list[str] = []
    labels: list[int] = []
    owners: dict[str, str] = {}
    for label, name in enumerate(classes):
        for folder in _walk(root / name, left_out):
            owner = owners.setdefault(os.path.realpath(folder), name)
            if owner != name:
                raise DataError(
                    f"'{folder}' belongs to two classes of '{root}', '{owner}' and '{name}', by a link from one to the"
                    " other; remove the link."
                )
        found = sorted(str(p.relative_to(root)) for p in image_files(root / name))
        paths += found
        labels += [label] * len(found)
    return FileRecords(root, paths, labels)


def _folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _walk(path: Path, left_out: LeftOut) -> Iterator[str]:
    """Yield the folders below `path`, noting those that cannot be listed and images that nothing here decodes."""

    def note(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # a class that this split does not have
            left_out.add(f"'{error.filename}' cannot be read ({(error.strerror or '').lower()})", "make it readable")

    for folder, files in _visit(path, note):
        yield folder
        for file in sorted(files):
            if Path(file).suffix.lower() in UNREADABLE_SUFFIXES and not file.startswith("."):
                left_out.add(
                    f"'{Path(folder) / file}' is an image that cannot be decoded here", "convert it to JPEG or PNG"
                )


def _visit(path: Path, on_error: Callable[[OSError], None] | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder below `path` with its files; a folder reached twice through links counts once."""
    seen: set[str] = set()
    for folder, inner, files in os.walk(path, followlinks=True, onerror=on_error):
        real = os.path.realpath(folder)
        if real in seen:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield folder, files


def image_files(path: Path, suffixes: frozenset[str] = IMAGE_SUFFIXES) -> Iterator[Path]:
    """Yield all image files below `path`."""
    for folder, files in _visit(path):
        for file in files:
            if Path(file).suffix.lower() in suffixes and not file.startswith("."):
                yield Path(folder) / file


def _stamp(path: Path) -> tuple[int, int]:
    """Return size and modification time; both 0 for a broken link, which decoding will report."""
    if not path.exists():
        return 0, 0
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def class_folders(classes: Sequence[str]) -> list[str]:
    """Return a folder name for each class: its own name, escaped as in URLs where a file name does not allow it.

    Numbers for all, if a name is empty or too long, or if two differ in case alone.

    Example:
        >>> class_folders(["cat", "9/10", ".x"])
        ['cat', '9%2F10', '%2Ex']
    """
    folders = [re.sub(r'[\x00-\x1f%/\\:*?"<>|]|^\.', lambda found: f"%{ord(found[0]):02X}", name) for name in classes]
    usable = all(0 < len(folder.encode()) <= 200 for folder in folders)
    if not usable or len({folder.casefold() for folder in folders}) < len(folders):
        return [f"{label:05}" for label in range(len(classes))]
    return folders
