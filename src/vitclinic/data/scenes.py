"""`scenes`: several coloured shapes an image, with masks, boxes and questions, a set that needs no download.

One drawing serves three tasks. The mask has the class of each pixel, 0 for the background; objects are the shapes, with
their visible pixels and the smallest boxes around these; questions ask what colour a shape is, what shape has a colour,
whether a kind is there and how many there are. Shapes in front cover a little of those behind.

Scene i of a split depends on (seed, split, i) and on nothing else, and uses `Generator.random` of PCG64 alone, as
`vitclinic.data.shapes` does: 1,000 scenes are a prefix of 4,000.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitclinic._core.errors import DataError
from vitclinic._core.io import fingerprint
from vitclinic.data.annotations.annotation import Objects, Question, mask_boxes
from vitclinic.data.shapes.drawing import generator
from vitclinic.data.shapes.outlines import OUTLINES
from vitclinic.data.shapes.sampling import SPLITS
from vitclinic.data.source import NumberedRecords, Source

SIZE = 64
"""Pixels of a side."""
SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
COLOURS = {
    "red": (0.85, 0.15, 0.15),
    "green": (0.15, 0.7, 0.25),
    "blue": (0.2, 0.35, 0.95),
    "yellow": (0.95, 0.85, 0.2),
    "purple": (0.6, 0.2, 0.75),
    "white": (0.95, 0.95, 0.95),
}
MOST = 4
"""Shapes in a scene; the least is 1."""
VERSION = 1
"""Version of the drawing code: a new one invalidates every stored set and changes every digest."""

# What sets the difficulty; a change here changes every result on `scenes`, and the golden test says so.
_RADIUS = (8.0, 14.0)  # pixels
_TILT = 0.5  # radians, at most
_REACH = 1.3  # radii within which every outline lies
_APART = 0.8  # least distance of two centres, in sums of their radii
_GROUND = (0.2, 0.55)  # brightness of the background
_TINT = 0.08  # how far its channels, and those of a shape's colour, differ from grey or from the pure colour
_NOISE = (0.01, 0.06)  # standard deviation
_TRIES = 20  # places tried for a shape, which is left out if none is free
_STREAM = 20  # sets the random numbers apart from those of `shapes`

_OUTLINE = {"circle": "disc"}
_DEFAULT, _VAL, _TEST, _MOST_SCENES = 4000, 250, 500, 1_000_000


@dataclass(frozen=True)
class Thing:
    """A shape of a scene: its kind and colour, and where it is."""

    shape: int
    colour: int
    x: float
    y: float
    radius: float
    tilt: float
    proportion: float
    tint: tuple[float, float, float]


def compose(seed: int, split: str, index: int) -> list[Thing]:
    """Return the shapes of a scene, from back to front, without drawing it."""
    chance = _generator(seed, split, index, 0)
    count = 1 + int(chance.random() * MOST)
    things: list[Thing] = []
    for _ in range(count):
        shape, colour, size, tilt, proportion, *tint = chance.random(8).tolist()
        radius = _RADIUS[0] + size * (_RADIUS[1] - _RADIUS[0])
        places = radius + chance.random((_TRIES, 2)) * (SIZE - 2 * radius)
        free = [place for place in places.tolist() if _is_free(place, radius, things)]
        if free:
            x, y = free[0]
            r, g, b = (_TINT * (2 * part - 1) for part in tint)
            kind, paint = int(shape * len(SHAPES)), int(colour * len(COLOURS))
            things.append(Thing(kind, paint, x, y, radius, _TILT * (2 * tilt - 1), proportion, (r, g, b)))
    return things


def _is_free(place: list[float], radius: float, things: list[Thing]) -> bool:
    return all(np.hypot(place[0] - it.x, place[1] - it.y) >= _APART * (radius + it.radius) for it in things)


def draw(seed: int, split: str, index: int) -> tuple[NDArray[np.uint8], Objects]:
    """Return a scene [64, 64, 3] and its objects, with their visible pixels."""
    things, random = compose(seed, split, index), _generator(seed, split, index, 1)
    ground = random.random(12).astype(np.float32)
    x, y = (axis.astype(np.float32) / SIZE - np.float32(0.5) for axis in np.meshgrid(np.arange(SIZE), np.arange(SIZE)))
    level = np.float32(_GROUND[0]) + np.float32(_GROUND[1] - _GROUND[0]) * ground[0]
    slope = (ground[1] - np.float32(0.5)) * x + (ground[2] - np.float32(0.5)) * y
    image = level + np.float32(0.4) * slope[:, :, None] + np.float32(_TINT) * (2 * ground[3:6] - 1)
    masks = np.zeros((len(things), SIZE, SIZE), bool)
    for number, thing in enumerate(things):
        rows, columns, inside = _cover(thing)
        colour = np.asarray(tuple(COLOURS.values())[thing.colour], np.float32) + np.asarray(thing.tint, np.float32)
        image[rows, columns] += inside[:, :, None] * (colour - image[rows, columns])
        masks[:number, rows, columns] &= inside < 0.5
        masks[number, rows, columns] = inside >= 0.5
    noise = random.random((2, SIZE, SIZE, 3), dtype=np.float32)
    deviation = np.float32((_NOISE[0] + float(ground[6]) ** 2 * (_NOISE[1] - _NOISE[0])) * 6**0.5)
    image = image + deviation * (noise[0] - noise[1])
    pixels = (np.clip(image, 0, 1) * 255 + np.float32(0.5)).astype(np.uint8)
    labels = np.asarray([thing.shape for thing in things], np.int64)
    return pixels, Objects(mask_boxes(masks), labels, np.zeros(len(things), bool), masks)


def _cover(thing: Thing) -> tuple[slice, slice, NDArray[np.float32]]:
    """Return the rows and columns around a shape, and the share of each of their pixels that it covers."""
    reach = _REACH * thing.radius
    first_x, first_y = (max(0, int(at - reach) - 1) for at in (thing.x, thing.y))
    last_x, last_y = (min(SIZE, int(at + reach) + 2) for at in (thing.x, thing.y))
    x = ((np.arange(first_x, last_x) + 0.5 - thing.x) / thing.radius).astype(np.float32)[None, None]
    y = -((np.arange(first_y, last_y) + 0.5 - thing.y) / thing.radius).astype(np.float32)[None, :, None]
    c, s = np.float32(np.cos(thing.tilt)), np.float32(np.sin(thing.tilt))
    name = SHAPES[thing.shape]
    proportion = np.full((1, 1, 1), thing.proportion)
    distance = OUTLINES[_OUTLINE.get(name, name)](c * x + s * y, c * y - s * x, proportion)[0]
    inside = np.clip(np.float32(0.5) - distance * np.float32(thing.radius), 0, 1)
    return slice(first_y, last_y), slice(first_x, last_x), inside


def _generator(seed: int, split: str, index: int, part: int) -> np.random.Generator:
    return generator((seed, SPLITS.index(split), index, _STREAM, part))


class SceneRecords(NumberedRecords):
    """Scenes of a split, drawn as they are read."""

    def __init__(self, seed: int, split: str, count: int) -> None:
        super().__init__(f"scenes {split}", np.zeros(count, np.int64))
        self.seed, self.split = seed, split

    def read(self, index: int) -> Image.Image:
        return Image.fromarray(draw(self.seed, self.split, index)[0])

    def pictures(self) -> Iterator[NDArray[np.uint8]]:
        for index in range(len(self)):
            yield draw(self.seed, self.split, index)[0]

    def objects(self, index: int) -> Objects:
        """Return the shapes of a scene."""
        return draw(self.seed, self.split, index)[1]

    def mask(self, index: int) -> NDArray[np.uint8]:
        """Return the class of each pixel: 0 is the background."""
        objects = self.objects(index)
        assert objects.masks is not None
        mask = np.zeros((SIZE, SIZE), np.uint8)
        for label, pixels in zip(objects.labels, objects.masks, strict=True):
            mask[pixels] = 1 + label
        return mask

    def questions(self, index: int) -> tuple[Question, ...]:
        """Return what is asked about a scene."""
        things = [(SHAPES[it.shape], list(COLOURS)[it.colour]) for it in compose(self.seed, self.split, index)]
        return ask(things, SHAPES, _generator(self.seed, self.split, index, 2))


def open_scenes(spec: str, seed: int) -> Source:
    """Open `scenes` or `scenes:N`, N training images; val and test have at most 250 and 500."""
    match = re.fullmatch(r"scenes(?::(?:n=)?(\d{1,9}))?", spec)
    count = int(match[1] or _DEFAULT) if match else 0
    if not 1 <= count <= _MOST_SCENES:
        raise DataError(f"'{spec}': write scenes, or scenes:2000 for so many training images (1 to {_MOST_SCENES:,}).")
    sizes = {"train": count, "val": min(count, _VAL), "test": min(count, _TEST)}
    splits = {split: SceneRecords(seed, split, size) for split, size in sizes.items()}
    targets = {
        "mask": ("background", *SHAPES),
        "objects": SHAPES,
        "questions": list_answers(SHAPES, tuple(COLOURS), MOST),
    }
    version = fingerprint("scenes", VERSION, seed, sizes)
    return Source(spec, (), splits, version, ((SIZE, SIZE), 3), targets=targets)


def list_answers(shapes: Sequence[str], colours: Sequence[str], most: int) -> tuple[str, ...]:
    """Return every answer there is to a question about a scene of at most `most` shapes."""
    return ("yes", "no", *colours, *shapes, *(str(number) for number in range(most + 1)))


def ask(things: Sequence[tuple[str, str]], shapes: Sequence[str], random: np.random.Generator) -> tuple[Question, ...]:
    """Return the questions about a scene.

    They are what colour each shape is that is there once, what shape each thing is that alone has its colour, whether a
    kind is there (one that is, one that is not), and how many there are of a kind and in all.

    Args:
        things: Shape and colour of each thing.
        shapes: All kinds of shapes.
        random: What chooses the kinds that are asked for.

    Example:
        >>> found = ask([("star", "red")], ["star", "circle"], np.random.default_rng(0))
        >>> found[0].text, found[0].answers, len(found)
        ('what colour is the star', ('red',), 6)
    """
    kinds, colours = Counter(shape for shape, _ in things), Counter(colour for _, colour in things)
    there, absent = [kind for kind in shapes if kinds[kind]], [kind for kind in shapes if not kinds[kind]]
    draws = random.random(4).tolist()
    found = [(f"what colour is the {shape}", colour) for shape, colour in things if kinds[shape] == 1]
    found += [(f"what shape is the {colour} thing", shape) for shape, colour in things if colours[colour] == 1]
    found.append((f"is there a {there[int(draws[0] * len(there))]}", "yes"))
    found.append((f"is there a {absent[int(draws[1] * len(absent))]}", "no"))
    counted = (there if draws[2] < 0.75 else absent)[int(draws[3] * len(there if draws[2] < 0.75 else absent))]
    found.append((f"how many {_plural(counted)} are there", str(kinds[counted])))
    found.append(("how many shapes are there", str(len(things))))
    return tuple(Question(text, (answer,)) for text, answer in found)


def _plural(shape: str) -> str:
    return f"{shape}es" if shape.endswith("s") else f"{shape}s"
