"""Predictions of runs that learned from masks or objects: the class of each pixel, objects with boxes.

A network sees the middle of an image, resized. Its answer is given in the image's own pixels, upright as it is shown:
pixels of a mask that the network did not see are void.

Shapes: H x W pixels of an image, h x w of the network's view, n objects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitclinic._core.errors import ModelError, RecipeError
from vitclinic._core.io import staged, write_errors, write_json
from vitclinic.data.annotations.annotation import VOID, Mask
from vitclinic.data.annotations.geometry import Window, choose_window
from vitclinic.data.coco import encode_runs
from vitclinic.data.decoding import Size
from vitclinic.deployment.images import COCO, SUFFIXES, Row, check_output, make_rows
from vitclinic.deployment.predictor import TOP_K, Decoded, ImagePredictor, Results
from vitclinic.exam.targets import Target
from vitclinic.models.segmenter import slide

MIN_SCORE = 0.5
_PIXELS = 2**20
"""Pixels that are segmented at a time, at most, unless one image has more."""
_DETECTED = 16
"""Images in which objects are looked for at a time: each may have a hundred masks."""


def restore_mask(view: Mask, size: Size, outside: int = VOID) -> Mask:
    """Return a mask of a network's view [h, w] in the pixels of the image [H, W], `outside` where it saw nothing.

    Example:
        >>> restore_mask(np.array([[0, 1], [2, 3]], np.uint8), (2, 4))
        array([[255,   0,   1, 255],
               [255,   2,   3, 255]], dtype=uint8)
    """
    height, width = view.shape
    left, top, right, bottom = (round(side) for side in choose_window(size, (height, width)).shown)
    return Window(size, (0, 0, width, height), (left, top, right, bottom)).move_mask(view, outside)


def restore_boxes(boxes: NDArray[np.float64], view: Size, size: Size) -> NDArray[np.float64]:
    """Return boxes [n, 4] of a network's view in the pixels of the image."""
    left, top, right, bottom = choose_window(size, view).shown
    scale = np.array([(right - left) / view[1], (bottom - top) / view[0]] * 2)
    return np.asarray(boxes * scale + np.array([left, top] * 2), np.float64)


@dataclass
class Masks(Results):
    """The class of each pixel of some images.

    Example:
        >>> found = Masks(["a.png"], ("sky", "road"), [np.array([[0, 0], [0, 1]], np.uint8)], [(2, 2)])
        >>> found.rows(top_k=1), found.mask(0).shape
        ([{'file': 'a.png', 'class': 'sky', 'share': 0.75}], (2, 2))
    """

    files: list[str]
    classes: tuple[str, ...]
    views: list[Mask]
    """The class of each pixel of what the network saw, [h, w]."""
    sizes: list[Size]
    """Height and width of the images."""
    skipped: dict[str, str] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)
    """Where the masks were written."""

    def mask(self, number: int) -> Mask:
        """Return the class of each pixel of an image, [H, W]; 255 where the network saw nothing."""
        return restore_mask(self.views[number], self.sizes[number])

    def rows(self, top_k: int = TOP_K, probabilities: bool = False) -> list[Row]:
        """Return a row for each image: its mask, if it is written, and the classes with the largest share of pixels.

        Args:
            top_k: How many classes to list.
            probabilities: Also tell the share of each class.
        """
        counts = [np.bincount(view.ravel(), minlength=len(self.classes)) for view in self.views]
        shares = np.array(counts, np.float64).reshape(-1, len(self.classes))
        shares /= shares.sum(1, keepdims=True)
        rows = make_rows(self.files, shares, self.classes, top_k, probabilities, ("class", "share", "share"))
        if not self.saved:
            return list(rows)
        return [{"file": row.pop("file"), "mask": mask, **row} for row, mask in zip(rows, self.saved, strict=True)]

    def save(self, places: Mapping[str, Path]) -> None:
        """Write the masks as PNG files, whose values are the numbers of the classes, shown in colours."""
        if not places:
            return
        for number, name in enumerate(self.files):
            place = places[name]
            image = Image.fromarray(self.mask(number), "P")
            image.putpalette(_PALETTE)
            with write_errors(place):
                place.parent.mkdir(parents=True, exist_ok=True)
            with staged(place) as staging:
                image.save(staging, format="PNG", optimize=True)
        self.saved = [str(places[name]) for name in self.files]

    @staticmethod
    def choose_places(files: Sequence[str], out: Path) -> dict[str, Path]:
        """Return the PNG file of each image, in a folder beside `out`: new.csv has new_masks/.

        Raises:
            RecipeError: One of them is one of the images.
        """
        whole = [Path(os.path.abspath(file)) for file in files]
        if not whole:
            return {}
        root = Path(os.path.commonpath([path.parent for path in whole]))
        short = [path.relative_to(root).with_suffix(".png") for path in whole]
        if len(set(short)) < len(set(whole)):  # a.jpg and a.png
            short = [path.relative_to(root).with_name(f"{path.name}.png") for path in whole]
        folder = _mask_folder(out)
        if taken := set(whole).intersection(Path(os.path.abspath(folder / name)) for name in short):
            raise RecipeError(f"The masks would replace the images, such as '{min(taken)}'; choose another file.")
        return {file: folder / name for file, name in zip(files, short, strict=True)}


def _mask_folder(out: Path) -> Path:
    return out.with_name(f"{out.stem}_masks")


def _make_palette() -> list[int]:
    """Return colours that are far apart for neighbouring numbers, as PASCAL VOC has them; void is pale."""
    colours = []
    for number in range(VOID):
        bits = [(number >> bit) & 1 for bit in range(8)]
        colours += [
            sum(bits[channel + 3 * k] << (7 - k) for k in range(3) if channel + 3 * k < 8) for channel in range(3)
        ]
    return [*colours, 224, 224, 192]


_PALETTE = _make_palette()


class MaskPredictor(ImagePredictor[Masks]):
    """A network that is ready to segment images."""

    results = Masks

    def describe(self, rows: int, out: Path | None) -> str:
        return f"masks in {_mask_folder(out)}" if out else "shares of classes; masks are written beside a file"

    @torch.inference_mode()
    def read(self, decoded: Decoded) -> Masks:
        assert self.target.run is not None
        run, views = self.target.run, []
        height, width = self.preprocessing.size
        window = run.recipe.task.frame(run.spec).img_size
        at_once = max(1, _PIXELS // (height * width))
        for start in range(0, len(decoded.names), at_once):
            scores = slide(self.network, decoded.images[start : start + at_once].to(self.device), window)
            if not bool(scores.isfinite().all()):
                raise ModelError(f"'{self.target.name}' returns scores that are not finite (NaN or infinity).")
            views += list(scores.argmax(1).to(torch.uint8).cpu().numpy())
        return Masks(decoded.names, self.classes, views, decoded.sizes, decoded.skipped)


@dataclass
class FoundObjects:
    """The objects that were found in an image, the surest first."""

    size: Size
    """Height and width of the image."""
    boxes: NDArray[np.float64]
    """[n, 4]: left, top, right, bottom, in pixels of the image."""
    labels: NDArray[np.int64]
    scores: NDArray[np.float64]
    views: NDArray[np.bool_] | None = None
    """[n, h, w], the pixels of each in what the network saw, if the run learned masks."""

    def __len__(self) -> int:
        return len(self.scores)

    def mask(self, number: int) -> NDArray[np.bool_]:
        """Return the pixels of an object, [H, W]."""
        if self.views is None:
            raise ModelError("The network finds boxes and no masks: it was trained with task.masks=false.")
        return restore_mask(self.views[number].astype(np.uint8), self.size, outside=0) > 0


@dataclass
class Boxes(Results):
    """Objects in some images.

    Example:
        >>> star = FoundObjects((8, 8), np.array([[1.0, 2.0, 4.0, 6.0]]), np.array([0]), np.array([0.9]))
        >>> Boxes(["a.png"], ("star",), [star]).rows()
        [{'file': 'a.png', 'class': 'star', 'score': 0.9, 'left': 1.0, 'top': 2.0, 'right': 4.0, 'bottom': 6.0}]
    """

    suffixes = (*SUFFIXES, COCO)
    columns = ("file", "class", "score", "left", "top", "right", "bottom")

    files: list[str]
    classes: tuple[str, ...]
    objects: list[FoundObjects]
    """Those of each image."""
    skipped: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        """Return a row for each object, the surest of an image first; boxes are in pixels of the image."""
        return [
            {
                "file": file,
                "class": self.classes[label],
                "score": round(float(score), 6),
                **dict(zip(self.columns[3:], (round(float(side), 2) for side in box), strict=True)),
            }
            for file, found in zip(self.files, self.objects, strict=True)
            for box, label, score in zip(found.boxes, found.labels, found.scores, strict=True)
        ]

    def coco(self, folder: Path) -> dict[str, Any]:
        """Return images, categories and annotations as COCO has them, with `score`; files are relative to `folder`."""
        images, annotations = [], []
        for number, (file, found) in enumerate(zip(self.files, self.objects, strict=True), 1):
            height, width = found.size
            images.append({"id": number, "file_name": os.path.relpath(file, folder), "height": height, "width": width})
            annotations += [{"image_id": number, **one} for one in _annotate(found)]
        return {
            "images": images,
            "categories": [{"id": number, "name": name} for number, name in enumerate(self.classes, 1)],
            "annotations": [{"id": number, **one} for number, one in enumerate(annotations, 1)],
        }

    def write(self, path: str | Path, *how: Any, **keywords: Any) -> Path:
        """Write a table, or COCO's JSON with the masks of objects as .json."""
        if Path(path).suffix != COCO:
            return super().write(path, *how, **keywords)
        check_output(Path(path), self.suffixes)
        write_json(Path(path), self.coco(Path(path).absolute().parent))
        return Path(path)


def _annotate(found: FoundObjects) -> list[dict[str, Any]]:
    annotations = []
    for number, (box, label, score) in enumerate(zip(found.boxes, found.labels, found.scores, strict=True)):
        left, top, right, bottom = (float(side) for side in box)
        one = {"category_id": int(label) + 1, "bbox": [left, top, right - left, bottom - top], "score": float(score)}
        if found.views is None:
            annotations.append({**one, "area": (right - left) * (bottom - top), "iscrowd": 0})
            continue
        mask = found.mask(number)
        outline = {"size": list(found.size), "counts": encode_runs(mask)}
        annotations.append({**one, "segmentation": outline, "area": float(mask.sum()), "iscrowd": 0})
    return annotations


class BoxPredictor(ImagePredictor[Boxes]):
    """A network that is ready to find objects; arguments are those of `predict`."""

    results = Boxes

    @property
    def facts(self) -> dict[str, Any]:
        return {"min_score": self.min_score}

    def describe(self, rows: int, out: Path | None) -> str:
        less = "; a lower least score shows less certain ones" if not rows else ""
        return f"{rows} object{'s' * (rows != 1)} of score {self.min_score:g} or more{less}"

    def __init__(self, target: Target, *, min_score: float | None = None, **common: Any) -> None:
        self.min_score = MIN_SCORE if min_score is None else min_score
        if not 0 <= self.min_score <= 1:
            raise RecipeError(f"'min_score' must be between 0 and 1 (got {min_score}).")
        super().__init__(target, **common)

    @torch.inference_mode()
    def read(self, decoded: Decoded) -> Boxes:
        objects: list[FoundObjects] = []
        for start in range(0, len(decoded.names), _DETECTED):
            for found in self.network(decoded.images[start : start + _DETECTED].to(self.device)):
                objects.append(self._restore(found, decoded.sizes[len(objects)]))
        return Boxes(decoded.names, self.classes, objects, decoded.skipped)

    def _restore(self, found: Mapping[str, torch.Tensor], size: Size) -> FoundObjects:
        scores = found["scores"].double().cpu().numpy()
        if not np.isfinite(scores).all():
            raise ModelError(f"'{self.target.name}' returns scores that are not finite (NaN or infinity).")
        kept = scores >= self.min_score
        boxes = found["boxes"].double().cpu().numpy()[kept]
        views = found["masks"].cpu().numpy()[kept] if "masks" in found else None
        labels = found["labels"].cpu().numpy().astype(np.int64)[kept]
        return FoundObjects(size, restore_boxes(boxes, self.preprocessing.size, size), labels, scores[kept], views)
