"""`data=FOLDER` or `data=FILE.json` for detection: images and their objects in COCO's JSON.

A file belongs to the split that its name, or that of its folder, has in it (`instances_val2017.json`,
`valid/_annotations.coco.json`); without such a word it is training data. Images are looked for beside the file, in
`images/`, and in folders named as the split (`val2017/`, `images/val/`). Annotations that cannot be used are an error,
or are left out and noted with `data.on_error: skip`. Images without annotations are background; crowds are kept.

The pixels of an object are polygons, or lengths of runs down the columns, as numbers or as text. A pixel belongs to a
polygon if its centre lies inside, by the even-odd rule.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitclinic._core.errors import DataError
from vitclinic._core.io import LARGEST_TABLE, fingerprint, read_json_file
from vitclinic.data.annotations.annotation import Objects, upright_size
from vitclinic.data.decoding import Size
from vitclinic.data.folder import SPLIT_NAMES, FileRecords, LeftOut
from vitclinic.data.source import Source

Mask = NDArray[np.bool_]

_PREFERRED = "instances"
_KEPT = ("bbox", "iscrowd", "segmentation")
_NEEDED = {
    "images": ("id", "file_name"),
    "annotations": ("image_id", "category_id", "bbox"),
    "categories": ("id", "name"),
}

Contents = dict[str, list[dict[str, Any]]]
"""The lists of a COCO file."""


class CocoRecords(FileRecords):
    """Images of a COCO file, with their objects."""

    def __init__(
        self,
        root: Path,
        paths: list[str],
        sizes: list[tuple[int, int]],
        annotations: list[list[dict[str, Any]]],
        outlined: bool,
    ) -> None:
        super().__init__(root, paths, [0] * len(paths))
        self.sizes, self.annotations, self.outlined = sizes, annotations, outlined

    def objects(self, index: int) -> Objects:
        """Return the objects of an image, in the order of the file."""
        found = self.annotations[index]
        boxes = np.array([each["bbox"] for each in found], np.float64).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        labels = np.array([each["label"] for each in found], np.int64)
        crowd = np.array([bool(each.get("iscrowd")) for each in found], bool)
        if not self.outlined:
            return Objects(boxes, labels, crowd)
        size = self.sizes[index] if all(self.sizes[index]) else self._look_at(index)
        masks = [self._draw(each["segmentation"], size, index) for each in found]
        return Objects(boxes, labels, crowd, np.array(masks, bool).reshape(-1, *size))

    def _draw(self, outline: Any, size: tuple[int, int], index: int) -> NDArray[np.bool_]:
        try:
            mask = draw_outline(outline, size)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self.name(index)}: the mask of an object cannot be read ({error}).") from error
        if mask.shape != size:
            height, width = mask.shape
            raise DataError(
                f"{self.name(index)}: the mask of an object has {height} x {width} pixels, and the image {size[0]} x"
                f" {size[1]}."
            )
        return mask

    def _look_at(self, index: int) -> tuple[int, int]:
        with self.read(index) as image:
            return upright_size(image)

    def contents(self) -> list[Any]:
        return [(*found, fingerprint(of)) for found, of in zip(super().contents(), self.annotations, strict=True)]


def find_coco_files(path: Path) -> dict[str, Path]:
    """Return the COCO files of a folder by split; a file given by its name is training data.

    Raises:
        DataError: There is none, or there are several for a split.
    """
    if path.is_file():
        return {"train": path}
    found: dict[str, list[Path]] = defaultdict(list)
    for file in sorted({*path.glob("*.json"), *path.glob("*/*.json")}):
        if file.name != "classes.json":
            found[_split_of(file, path)].append(file)
    chosen = {}
    for split, files in found.items():
        named = [file for file in files if file.name.startswith(_PREFERRED)] or files
        if len(named) > 1:
            raise DataError(
                f"'{path}' has several JSON files for {split}, '{named[0].name}' and '{named[1].name}'; keep one, or"
                f" call it {_PREFERRED}_{split}.json."
            )
        chosen[split] = named[0]
    if not chosen:
        raise DataError(f"'{path}' has no COCO file: expected a JSON with images, annotations and categories in it.")
    return {split: chosen[split] for split in ("train", "val", "test") if split in chosen}


def _split_of(file: Path, root: Path) -> str:
    folders = [folder.name for folder in file.parents if root in folder.parents]
    words = [word for name in (file.stem, *folders) for word in re.findall("[a-z]+", name.lower())]
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), "train")


def open_coco(path: Path, on_error: str) -> Source:
    """Open a COCO file, or a folder with one for each split, as a source of objects."""
    files, left_out = find_coco_files(path), LeftOut(on_error == "skip")
    root = path.parent if path.is_file() else path
    read = {split: _read(file) for split, file in files.items()}
    first = next(iter(files))
    classes = [str(each["name"]) for each in sorted(read[first]["categories"], key=lambda each: int(each["id"]))]
    if not classes:
        raise DataError(f"'{files[first]}' has no categories.")
    outlined = _are_outlined(read, left_out)
    splits = {}
    for split, file in files.items():
        folder = _find_folder(file, root, split, read[split]["images"])
        splits[split] = _records(file, folder, read[split], classes, outlined, left_out)
    stamps = {split: (file.stat().st_size, file.stat().st_mtime_ns) for split, file in files.items()}
    listing = {split: records.paths for split, records in splits.items()}
    identity = fingerprint("coco", str(path.resolve()), stamps, listing, on_error)
    return Source(str(path), (), splits, identity, notes=tuple(left_out.notes), targets={"objects": tuple(classes)})


def _read(file: Path) -> Contents:
    contents = read_json_file(file, DataError, LARGEST_TABLE)
    lists = ("images", "annotations", "categories")
    if not isinstance(contents, dict) or not all(isinstance(contents.get(name), list) for name in lists):
        raise DataError(f"'{file}' is not COCO's JSON, which has the lists images, annotations and categories.")
    for name, needed in _NEEDED.items():
        for number, entry in enumerate(contents[name]):
            missing = [key for key in needed if not isinstance(entry, dict) or key not in entry]
            if missing:
                raise DataError(f"'{file}': number {number} of its {name} has no {missing[0]}.")
    return contents


def _are_outlined(read: Mapping[str, Contents], left_out: LeftOut) -> bool:
    """Return True if all objects have masks; if some have, say that they are not used."""
    every = [bool(each.get("segmentation")) for contents in read.values() for each in contents["annotations"]]
    if any(every) and not all(every):
        left_out.add(
            f"{every.count(False):,} of {len(every):,} annotations have no segmentation, so that no masks are read",
            "add them, remove the others",
        )
    return bool(every) and all(every)


def _records(
    file: Path, folder: Path, contents: Contents, classes: list[str], outlined: bool, left_out: LeftOut
) -> CocoRecords:
    images = {each["id"]: each for each in contents["images"]}
    labels = {each["id"]: _label(str(each["name"]), classes, file) for each in contents["categories"]}
    of_image: dict[Any, list[dict[str, Any]]] = {number: [] for number in images}
    for each in contents["annotations"]:
        problem = _find_problem(each, images, labels)
        if problem is None:
            kept = {key: each[key] for key in _KEPT if key in each and (outlined or key != "segmentation")}
            of_image[each["image_id"]].append({**kept, "label": labels[each["category_id"]]})
        else:
            left_out.add(f"'{file}': annotation {each.get('id', '')} {problem}", "fix it")
    sizes = [(int(each.get("height", 0)), int(each.get("width", 0))) for each in images.values()]
    paths = [str(each["file_name"]) for each in images.values()]
    return CocoRecords(folder, paths, sizes, list(of_image.values()), outlined)


def _label(name: str, classes: list[str], file: Path) -> int:
    if name not in classes:
        raise DataError(f"'{file}' has the category '{name}', which is not in the training data.")
    return classes.index(name)


def _find_problem(annotation: dict[str, Any], images: Mapping[Any, Any], labels: Mapping[Any, int]) -> str | None:
    """Return what is wrong with an annotation, or None."""
    if annotation["image_id"] not in images:
        return f"is of image {annotation['image_id']}, which is not in the file"
    if annotation["category_id"] not in labels:
        return f"is of category {annotation['category_id']}, which is not in the file"
    box = annotation["bbox"]
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(side, int | float) for side in box):
        return f"has the box {box}; expected [x, y, width, height]"
    if not (box[2] > 0 and box[3] > 0):
        return f"has a box without area ({', '.join(f'{side:g}' for side in box)}; x, y, width, height)"
    return None


def _find_folder(file: Path, root: Path, split: str, images: list[dict[str, Any]]) -> Path:
    """Return the folder in which the images of a file are: the first that has the first image."""
    if not images:
        raise DataError(f"'{file}' lists no images.")
    first = str(images[0]["file_name"])
    folders = list(dict.fromkeys(_folders(file, root, split)))
    for folder in folders:
        if (folder / first).is_file():
            return folder
    looked = ", ".join(f"'{folder}'" for folder in folders)
    raise DataError(f"'{file}' lists the image '{first}', which is in none of {looked}.")


def _folders(file: Path, root: Path, split: str) -> Iterator[Path]:
    yield from (file.parent, root, root / "images")
    words = [word for word, of in SPLIT_NAMES.items() if of == split]
    for name in (file.stem.removeprefix(f"{_PREFERRED}_"), *words):
        for folder in (root / name, root / "images" / name):
            if folder.is_dir():
                yield folder


def draw_outline(outline: Any, size: Size) -> Mask:
    """Return the pixels of an object, [height, width].

    Args:
        outline: `segmentation` of a COCO annotation: a list of polygons [x, y, x, y, ...], which are joined, or {size,
            counts}, with counts as numbers or as COCO's compressed text.
        size: Height and width of the image.

    Raises:
        ValueError: It is none of these.

    Example:
        >>> draw_outline([[1, 0, 3, 0, 3, 2, 1, 2]], (3, 4)).astype(int)
        array([[0, 1, 1, 0],
               [0, 1, 1, 0],
               [0, 0, 0, 0]])
    """
    if isinstance(outline, dict):
        counts = outline["counts"]
        height, width = (int(side) for side in outline["size"])
        runs = read_counts(counts) if isinstance(counts, str | bytes) else [int(count) for count in counts]
        return decode_runs(runs, (height, width))
    if not isinstance(outline, Sequence) or isinstance(outline, str) or not outline:
        raise ValueError("a segmentation is a list of polygons, or {size, counts}")
    drawn = np.zeros(size, bool)
    for polygon in outline:
        points = np.asarray(polygon, np.float64).reshape(-1, 2)
        if len(points) < 3 or not np.isfinite(points).all():
            raise ValueError("a polygon has at least three points")
        drawn |= _fill(points, size)
    if not drawn.any():  # thinner than a pixel, between the centres of two
        middle = np.concatenate([np.asarray(polygon, np.float64).reshape(-1, 2) for polygon in outline]).mean(0)
        column, row = (int(np.clip(at, 0, side - 1)) for at, side in zip(middle, (size[1], size[0]), strict=True))
        drawn[row, column] = True
    return drawn


def _fill(points: NDArray[np.float64], size: Size) -> Mask:
    """Return the pixels whose centres lie inside a polygon: to the right of an odd number of its edges."""
    crossings = np.zeros((size[0], size[1] + 1), np.int64)
    rows = np.arange(size[0]) + 0.5
    for (x, y), (next_x, next_y) in pairwise([*points, points[0]]):
        crossed = np.flatnonzero((y <= rows) != (next_y <= rows))
        if len(crossed):
            at = x + (rows[crossed] - y) * (next_x - x) / (next_y - y)
            np.add.at(crossings, (crossed, np.clip(np.ceil(at - 0.5), 0, size[1]).astype(np.int64)), 1)
    return np.asarray(np.cumsum(crossings, axis=1)[:, :-1] % 2 == 1)


def decode_runs(runs: Sequence[int], size: Size) -> Mask:
    """Return the pixels of runs: so many out, so many in, and so on, down one column after the other.

    Raises:
        ValueError: The runs are not as long as the image has pixels.
    """
    if any(run < 0 for run in runs) or sum(runs) != size[0] * size[1]:
        raise ValueError(f"the runs of a mask add up to {sum(runs)}, and the image has {size[0]} x {size[1]} pixels")
    inside = np.arange(len(runs)) % 2 == 1
    return np.asarray(np.repeat(inside, runs).reshape(size[1], size[0]).T)


def encode_runs(mask: Mask) -> list[int]:
    """Return the runs of a mask [height, width], as `decode_runs` takes them.

    Example:
        >>> encode_runs(np.array([[True, False], [True, True]]))
        [0, 2, 1, 1]
    """
    down = mask.T.ravel()
    changes = np.flatnonzero(down[1:] != down[:-1]) + 1
    runs: list[int] = np.diff([0, *changes.tolist(), down.size]).tolist()
    return [0, *runs] if down[0] else runs


def read_counts(text: str | bytes) -> list[int]:
    """Return the runs in COCO's compressed text: five bits a character; from the fourth on, less the run two before.

    Raises:
        ValueError: The text ends within a number, or has other characters.
    """
    runs: list[int] = []
    value = shift = 0
    for character in text if isinstance(text, bytes) else text.encode():
        code = character - 48
        if not 0 <= code < 64:
            raise ValueError("the compressed mask has characters that do not belong there")
        value |= (code & 31) << shift
        shift += 5
        if code & 32:
            continue
        if code & 16:  # negative
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
        value = shift = 0
    if shift:
        raise ValueError("the compressed mask ends within a number")
    return runs
