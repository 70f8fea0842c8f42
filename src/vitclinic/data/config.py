"""Configs of `data` and `data.augment`, and what a network must fit: the images' shape and the number of classes.

This module does not import torch, so that a typo in a recipe is reported at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from vitclinic._core.config import Settings
from vitclinic.data.text import TextSpec

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(ge=0)]


class Augment(Settings):
    """Augmentation of the training images: a level, any part of which can be overridden.

    Levels are `none`, `light` (crop and flip) and `deit` (RandAugment, random erasing, mixup, CutMix, label smoothing,
    repeated augmentation).

    Example:
        >>> augment = Augment(level="deit", mixup=0.2).resolve()
        >>> augment.mixup, augment.cutmix, augment.randaugment
        (0.2, 1.0, 'rand-m9-n2-mstd0.5-inc1')
    """

    main_key: ClassVar[str | None] = "level"

    level: Literal["none", "light", "deit"] = "light"
    flip: bool | None = Field(
        None, description="mirror half of the images (light and deit); false for letters and digits, say"
    )
    randaugment: Annotated[str, Field(pattern=r"^(off|(rand|original|v0)(-[a-z]+[\d.]+)*)$")] | None = Field(
        None, description="timm's policy string: rand-... (RandAugment), original or v0 (AutoAugment); or 'off'"
    )
    erasing: Share | None = Field(None, description="probability of random erasing")
    mixup: Positive | None = Field(None, description="alpha of mixup's Beta distribution; 0 is off")
    cutmix: Positive | None = Field(None, description="alpha of CutMix's Beta distribution; 0 is off")
    cutmix_cell: int | list[int] | None = Field(
        None,
        description="CutMix on the borders of cells of so many pixels (or [height, width]), each with its own targets",
    )
    mix_probability: Share | None = Field(None, description="share of the images that are mixed at all")
    smoothing: Annotated[float, Field(ge=0, lt=1)] | None = Field(None, description="label smoothing")
    repeats: Annotated[int, Field(ge=1, le=1000)] | None = Field(None, description="copies of an image in one epoch")

    def resolve(self) -> Augment:
        """Return a copy with every part set, using the level's defaults for the ones not given."""
        return Augment(**self._parts())

    def identity(self) -> dict[str, Any]:
        """Return the plain data by which measurements are stored; `flip` is left out unless it changes the level.

        It came later than the other parts, and what was measured before it is still right.
        """
        plain = self.model_dump(mode="json")
        return {key: value for key, value in plain.items() if key != "flip" or value not in (None, self._flips)}

    @property
    def _flips(self) -> bool:
        """Return True if the level mirrors images by itself."""
        return self.level != "none"

    def _parts(self) -> dict[str, Any]:
        level = _DEIT if self.level == "deit" else _PLAIN
        return {**level, "flip": self._flips, **self.model_dump(exclude_none=True)}

    @model_validator(mode="after")
    def _flip_has_a_level(self) -> Self:
        if self.flip and not self._flips:
            raise ValueError("flip is a part of the levels light and deit; level none changes no image")
        return self

    @model_validator(mode="after")
    def _cells_make_sense(self) -> Self:
        if self.cutmix_cell is None:
            return self
        cell = [self.cutmix_cell] * 2 if isinstance(self.cutmix_cell, int) else self.cutmix_cell
        if len(cell) != 2 or min(cell) < 1:
            raise ValueError("cutmix_cell is a number of pixels, or [height, width]")
        parts = self._parts()
        if parts["mixup"] or not parts["cutmix"]:
            raise ValueError("cutmix_cell is for CutMix alone: it needs a cutmix above 0 and mixup 0")
        return self


_PLAIN: dict[str, Any] = {
    "randaugment": "off",
    "erasing": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
    "mix_probability": 1.0,
    "smoothing": 0.0,
    "repeats": 1,
}
_DEIT: dict[str, Any] = {
    "randaugment": "rand-m9-n2-mstd0.5-inc1",
    "erasing": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
    "mix_probability": 1.0,
    "smoothing": 0.1,
    "repeats": 3,
}


class DataConfig(Settings):
    """Section `data` of a recipe: the source, how much of it to use, and its augmentation.

    Example:
        >>> DataConfig(source="digits", limit=100).augment.level
        'light'
    """

    main_key: ClassVar[str | None] = "source"

    source: Annotated[str, Field(min_length=1)] = Field(
        "shapes", description="folder, parquet, shards, torchvision:NAME@ROOT, hf:NAME, digits, shapes or scenes"
    )
    target: Literal["class", "mask", "objects", "questions"] = Field(
        "class", description="what the images come with; the task says it"
    )
    limit: Annotated[int, Field(ge=1)] | None = Field(None, description="how many training images to use")
    fraction: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="share of the training images")
    held_out: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.1, description="share of the training images that a missing val or test split takes; 0 trains on all of them"
    )
    train_on_val: bool = Field(
        False, description="train on the val images, too; none then select a checkpoint, and the last one is used"
    )
    augment: Augment = Field(Augment(level="light"), description="none, light or deit, or its details")
    group: str | None = Field(
        None, description="column of a parquet source: retrieval matches no two images of one group (camera, drawer)"
    )
    split_by: str | None = Field(
        None,
        description="column of a parquet source, or `label`: held-out splits get whole values of it",
    )
    split_column: str | None = Field(
        None, description="column of a parquet source that names the split of a row: train, val, test, query or gallery"
    )
    split_seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="seed of held-out splits and subsets, and of `shapes` and `scenes`"
    )
    vocabulary: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="file with a token a line, such as BERT's vocab.txt; the training questions' words unless given",
    )
    answers: Annotated[int, Field(ge=2)] | None = Field(
        None, description="how many of the most frequent training answers can be given (task vqa); all unless given"
    )
    window: Annotated[int, Field(ge=1, le=10_000)] = Field(
        8, description="how many shards have their images shuffled together, and how many are fetched ahead"
    )
    on_error: Literal["raise", "skip"] = Field("raise", description="what an unreadable image does")

    @model_validator(mode="after")
    def _one_size(self) -> DataConfig:
        if self.limit is not None and self.fraction is not None:
            raise ValueError("give limit or fraction, not both")
        return self


DATASETS = {
    "digits": "embedded: 1,797 handwritten digits, 8 x 8 grey",
    "shapes[:N]": "embedded: procedural, 10 shapes, 32 x 32 RGB, N training images",
    "scenes[:N]": "embedded: procedural, several shapes an image with masks, boxes and questions, 64 x 64 RGB",
    "FOLDER": "one sub-folder per class, or train/val/test folders of them",
    "FILE.parquet": "Hugging Face style; also a folder of train*.parquet, test*.parquet",
    "SHARDS": "tars as of WebDataset or parquet, here or elsewhere: a folder of tars, s3://b/{train-{000..099},val}.tar",
    "FILE.jsonl": "lines of image, question and answer(s); also a folder of train*.jsonl, test*.jsonl",
    "torchvision:NAME@FOLDER": "a torchvision set that is already on disk",
    "hf:NAME": "a set of the Hugging Face hub (pip install 'vitclinic[hf]')",
}
"""The forms of `source`, with descriptions."""


@dataclass(frozen=True)
class ImageSpec:
    """Input shape and number of classes that a network must have, named as in timm's `create_model`.

    Example:
        >>> spec = ImageSpec(num_classes=10, in_chans=3, img_size=(32, 32))
        >>> spec.img_size
        (32, 32)
    """

    num_classes: int
    in_chans: int
    """Channels of an image: 1 (grey) or 3."""
    img_size: tuple[int, int]
    """Height and width in pixels."""
    text: TextSpec | None = field(default=None, repr=False)
    """How questions become numbers, where images come with questions."""
