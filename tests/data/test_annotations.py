"""Annotations move with their images, are checked at the door, and survive cache, batches and splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitclinic._core.errors import DataError
from vitclinic.data import Augment, DataConfig, Dataset, TrainingStream, evaluation_batches, open_data
from vitclinic.data.annotations import VOID, AnnotatedView, Annotation, Annotations, Objects, Question, Window
from vitclinic.data.annotations.annotation import check_annotation, mask_boxes
from vitclinic.data.annotations.geometry import choose_window, fit_annotated
from vitclinic.data.annotations.store import open_annotations
from vitclinic.data.cache import StreamedImages, open_cached_images
from vitclinic.data.dataset import assemble, find_preprocessing
from vitclinic.data.source import NumberedRecords, Source

SIDE = st.integers(5, 40)


@st.composite
def windows(draw: st.DrawFn) -> tuple[tuple[int, int], Window]:
    size, frame = (draw(SIDE), draw(SIDE)), (draw(SIDE), draw(SIDE))
    share = st.floats(0, 1)
    return size, choose_window(size, frame, draw(st.floats(0.3, 3)), (draw(share), draw(share)), draw(st.booleans()))


def nearest(window: Window, row: int, column: int) -> tuple[int, int] | None:
    """Return the pixel of the image that a pixel of the frame shows, by the definition of a window."""
    if window.mirrored:
        column = window.frame[1] - 1 - column
    left, top, right, bottom = window.place
    if not (left <= column < right and top <= row < bottom):
        return None
    x = window.shown[0] + (column - left + 0.5) / (right - left) * (window.shown[2] - window.shown[0])
    y = window.shown[1] + (row - top + 0.5) / (bottom - top) * (window.shown[3] - window.shown[1])
    return y, x


@given(windows(), st.integers(0, 5))
def test_a_mask_shows_the_label_of_the_pixel_that_is_seen(case: tuple[tuple[int, int], Window], seed: int) -> None:
    size, window = case
    mask = np.random.default_rng(seed).integers(0, 200, size).astype(np.uint8)
    moved = window.move_mask(mask)
    assert moved.shape == window.frame
    for row in range(window.frame[0]):
        for column in range(window.frame[1]):
            seen = nearest(window, row, column)
            if seen is None:
                assert moved[row, column] == VOID
            elif min(abs(at - round(at)) for at in seen) > 1e-4:  # else rounding decides between two pixels
                assert moved[row, column] == mask[int(seen[0]), int(seen[1])]


@given(windows(), st.data())
def test_the_box_of_what_is_seen_is_that_of_the_moved_mask(
    case: tuple[tuple[int, int], Window], data: st.DataObject
) -> None:
    """Draw a box, transform, and find it again: to a pixel of the frame, and where it is not seen there is none."""
    size, window = case
    top, left = (data.draw(st.integers(0, side - 1)) for side in size)
    bottom, right = data.draw(st.integers(top + 1, size[0])), data.draw(st.integers(left + 1, size[1]))
    masks = np.zeros((1, *size), bool)
    masks[0, top:bottom, left:right] = True
    objects = Objects(mask_boxes(masks), np.array([3]), np.array([False]), masks)
    np.testing.assert_array_equal(objects.boxes, [[left, top, right, bottom]])
    moved = window.move(Annotation(objects=objects)).objects
    assert moved is not None
    (expected,) = window.move_boxes(objects.boxes)
    if len(moved):
        np.testing.assert_array_equal(moved.boxes, mask_boxes(moved.masks))
        np.testing.assert_allclose(moved.boxes[0], expected, atol=0.51)
        assert moved.labels.tolist() == [3]
    else:
        assert min(expected[2] - expected[0], expected[3] - expected[1]) < 1.01
    bare = window.move(Annotation(objects=Objects(objects.boxes, objects.labels, objects.crowd))).objects
    seen = min(expected[2] - expected[0], expected[3] - expected[1]) >= 1
    assert bare is not None
    assert len(bare) == seen


@given(windows(), st.integers(1, 5))
def test_pixels_and_mask_go_the_same_way(case: tuple[tuple[int, int], Window], seed: int) -> None:
    """An image whose halves are black and white shows them where its mask does, but for the blurred border."""
    size, window = case
    mask = np.zeros(size, np.uint8)
    mask[:, : size[1] // 2] = 1
    pixels = window.move_pixels(np.repeat(255 * mask[:, :, None], 3, axis=2))[:, :, 0].astype(int)
    moved = window.move_mask(mask)
    wide = (window.place[2] - window.place[0]) / (window.shown[2] - window.shown[0])
    disagree = ((moved == 1) & (pixels < 127)) | ((moved == 0) & (pixels > 128))
    assert disagree.sum(1).max() <= 1 + wide / 2
    assert (pixels[moved == VOID] == 0).all()


def test_mirroring_twice_is_nothing() -> None:
    mask = np.arange(30, dtype=np.uint8).reshape(5, 6)
    mirror = choose_window((5, 6), (5, 6), mirrored=True)
    np.testing.assert_array_equal(mirror.move_mask(mask), mask[:, ::-1])
    np.testing.assert_array_equal(mirror.move_mask(mirror.move_mask(mask)), mask)
    boxes = np.array([[0.0, 1.0, 2.5, 4.0]])
    np.testing.assert_allclose(mirror.move_boxes(mirror.move_boxes(boxes)), boxes)


def test_a_view_depends_on_the_key_alone_and_colours_leave_annotations() -> None:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (6, 16, 20, 3)).astype(np.uint8)
    masks = [Annotation(mask=random.integers(0, 5, (16, 20)).astype(np.uint8)) for _ in range(6)]
    keys = np.arange(6, dtype=np.uint64)
    plain, colourful = (AnnotatedView((12, 12), (0.5, 2.0), True, colour) for colour in (0.0, 1.0))
    pixels, moved = plain(images, masks, keys)
    alone = [plain(images[row : row + 1], masks[row : row + 1], keys[row : row + 1]) for row in range(6)]
    assert torch.equal(pixels, torch.cat([one for one, _ in alone]))
    other, unchanged = colourful(images, masks, keys)
    assert not torch.equal(other, pixels)
    for mask, same in zip(moved, unchanged, strict=True):
        np.testing.assert_array_equal(mask.mask, same.mask)


def test_evaluation_fits_image_and_mask_as_images_are_fitted() -> None:
    """The middle of a wide image, at the scale that covers the frame."""
    mask = np.zeros((4, 8), np.uint8)
    mask[:, 2:6] = 1
    pixels, (fitted,) = fit_annotated(np.repeat(mask[None, :, :, None], 3, 3) * 255, [Annotation(mask=mask)], (8, 8))
    assert fitted.mask is not None
    assert (fitted.mask == 1).all()
    assert (pixels[:, :, 1:-1] > 128).all()


# ---------------------------------------------------------------------------------------------------- at the door


def of_objects(box: tuple[float, ...], label: int = 0, masks: np.ndarray | None = None) -> Annotation:
    return Annotation(objects=Objects(np.array([box], float), np.array([label]), np.array([False]), masks))


@pytest.mark.parametrize(
    ("annotation", "sentence"),
    [
        (Annotation(mask=np.zeros((4, 6), np.uint8)), "a.png: its mask has 4 x 6 pixels, and the image 4 x 5."),
        (
            Annotation(mask=np.full((4, 5), 3, np.uint8)),
            "the label 3, and there are 3 classes, from 0 to 2 (255 is void).",
        ),
        (of_objects((0, 0, 7, 2)), "a.png: box 0 (0, 0, 7, 2) is not inside the image of 5 x 4 pixels."),
        (of_objects((2, 1, 2, 3)), "a.png: box 0 (2, 1, 2, 3) has no area; boxes are left, top, right, bottom."),
        (of_objects((0, 0, float("nan"), 3)), "has no area"),
        (of_objects((0, 0, 2, 2), 3), "a.png: object 0 has the label 3, and there are 3 classes."),
        (of_objects((0, 0, 2, 2), -1), "a.png: object 0 has the label -1, and there are 3 classes."),
        (of_objects((0, 0, 2, 2), 0, np.ones((1, 4, 4), bool)), "the masks of its objects have 4 x 4 pixels, and the"),
        (of_objects((0, 0, 2, 2), 0, np.zeros((1, 4, 5), bool)), "a.png: the mask of object 0 is empty."),
        (Annotation(questions=(Question("what is it", ("",)),)), "a.png: the question 'what is it' has no answer."),
        (Annotation(questions=(Question(" ", ("yes",)),)), "a.png: a question is empty."),
    ],
)
def test_what_does_not_fit_its_image_is_one_sentence(annotation: Annotation, sentence: str) -> None:
    with pytest.raises(DataError) as error:
        check_annotation(annotation, (4, 5), 3, "a.png")
    assert sentence in str(error.value)
    assert str(error.value).count(". ") == 0


def test_what_fits_is_taken_and_a_rounded_box_is_cut() -> None:
    mask = np.array([[0, 2], [VOID, 1]], np.uint8)
    assert check_annotation(Annotation(mask=mask), (2, 2), 3, "a").mask is mask
    cut = check_annotation(of_objects((-0.4, 0, 5.3, 4)), (4, 5), 3, "a").objects
    assert cut is not None
    assert cut.boxes.tolist() == [[0, 0, 5, 4]]
    none = Objects(np.zeros((0, 4)), np.zeros(0, np.int64), np.zeros(0, bool))
    assert check_annotation(Annotation(objects=none), (4, 5), 3, "a").objects is not None


# ------------------------------------------------------------------------------------------------- stores and batches


class Pictures(NumberedRecords):
    """Images of two sizes, some without objects; masks and objects with outlines unless told otherwise."""

    outlined = True

    def __init__(self, count: int = 7) -> None:
        super().__init__("pictures", np.zeros(count, np.int64))

    def size(self, index: int) -> tuple[int, int]:
        return (20, 16) if index % 2 else (12, 24)

    def read(self, index: int) -> Image.Image:
        values = np.random.default_rng(index).integers(0, 256, (*self.size(index), 3)).astype(np.uint8)
        return Image.fromarray(values)

    def mask(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).integers(0, 3, self.size(index)).astype(np.uint8)

    def objects(self, index: int) -> Objects:
        masks = np.zeros((index % 3, *self.size(index)), bool)
        for number in range(len(masks)):
            masks[number, 4 + number : 8, 5:9] = True
        boxes, labels = mask_boxes(masks) if len(masks) else np.zeros((0, 4)), np.arange(len(masks))
        return Objects(boxes, labels, labels > 0, masks if self.outlined else None)

    def questions(self, index: int) -> tuple[Question, ...]:
        return tuple(Question(f"question {number} of {index}", ("yes", "no")) for number in range(1 + index % 2))


TARGETS = {"mask": ("a", "b", "c"), "objects": ("x", "y"), "questions": ("yes", "no")}


def source_of(records: Pictures) -> Source:
    return Source("pictures", (), {"train": records}, f"pictures {records.outlined}", targets=TARGETS)


def as_plain(annotation: Annotation) -> list[object]:
    objects = annotation.objects
    parts = [] if objects is None else [objects.boxes, objects.labels, objects.crowd, objects.masks]
    return [annotation.mask, *parts, annotation.questions]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("outlined", [True, False])
def test_a_cached_annotation_is_the_fitted_one(target: str, outlined: bool) -> None:
    records, size = Pictures(), (8, 10)
    records.outlined = outlined
    images = open_cached_images(records, f"own {target} {outlined}", size, 3, "raise", lambda *_: None)
    key = f"annotations {target} {outlined}"
    classes = len(TARGETS[target])
    first = open_annotations(target, records, images, classes, key, size, lambda *_: None)
    again = open_annotations(target, records, images, classes, key, size, lambda *_: None)
    assert first.digest == again.digest
    rows = np.array([6, 0, 5, 2])
    for row, found in zip(rows, again.read(rows), strict=True):
        window = choose_window(records.size(row), size)
        method = getattr(records, target)(row)
        expected = window.move(Annotation(**{target: method}))
        np.testing.assert_equal(as_plain(found), as_plain(expected))


def test_streamed_annotations_are_those_of_the_originals() -> None:
    records = Pictures()
    streamed = StreamedImages(records, (96, 96), (96, 96), 3, "raise", lambda *_: None)
    store = open_annotations("mask", records, streamed, 3, "unused", (96, 96), lambda *_: None)
    for row, found in enumerate(store.read(np.arange(7))):
        np.testing.assert_array_equal(found.mask, records.mask(row))
    small = StreamedImages(records, (8, 8), (8, 8), 3, "raise", lambda *_: None)
    (found,) = open_annotations("mask", records, small, 3, "unused", (8, 8), lambda *_: None).read(np.array([3]))
    np.testing.assert_array_equal(found.mask, choose_window((20, 16), (8, 8)).move_mask(records.mask(3)))


def test_a_mask_of_another_size_stops_the_opening() -> None:
    class Wrong(Pictures):
        def mask(self, index: int) -> np.ndarray:
            return np.zeros((3, 3), np.uint8)

    records = Wrong()
    images = open_cached_images(records, "wrong masks", (8, 8), 3, "raise", lambda *_: None)
    with pytest.raises(DataError, match=r"^pictures image 0: its mask has 3 x 3 pixels, and the image 12 x 24\.$"):
        open_annotations("mask", records, images, 3, "wrong", (8, 8), lambda *_: None)


@pytest.mark.parametrize("target", TARGETS)
def test_a_batch_takes_its_annotations_along(target: str) -> None:
    dataset = open_data(DataConfig(source="scenes:12", target=target))
    batch = TrainingStream(dataset, Augment(level="light"), seed=0)[range(0, 7)]
    assert batch.annotations is not None
    assert len(batch.annotations) == 7
    parts = batch.to(torch.device("cpu"), torch.float64).split(3)
    assert [len(part.annotations) for part in parts] == [3, 3, 1]
    if target == "mask":
        assert torch.equal(torch.cat([part.annotations.masks for part in parts]), batch.annotations.masks)
    if target == "objects":
        boxes = [each["boxes"] for part in parts for each in part.annotations.objects]
        assert all(torch.equal(a, b["boxes"].double()) for a, b in zip(boxes, batch.annotations.objects, strict=True))
    if target == "questions":
        assert sum((part.annotations.questions for part in parts), ()) == batch.annotations.questions
    assert [part.annotations.tensors()[0].dtype for part in parts[:1] if target == "objects"] in ([], [torch.float64])


def test_any_division_of_the_stream_has_the_same_annotated_samples() -> None:
    stream = TrainingStream(open_data(DataConfig(source="scenes:9", target="mask")), Augment(level="light"), seed=3)
    whole, parts = stream[range(0, 12)], [stream[range(0, 5)], stream[range(5, 12)]]
    assert torch.equal(whole.images, torch.cat([part.images for part in parts]))
    assert torch.equal(whole.annotations.masks, torch.cat([part.annotations.masks for part in parts]))


def test_joined_splits_keep_each_image_with_its_annotation() -> None:
    plain = open_data(DataConfig(source="scenes:9", target="mask"))
    joined = open_data(DataConfig(source="scenes:9", target="mask", train_on_val=True))
    batch = next(evaluation_batches(joined, "train", 18))
    apart = [next(evaluation_batches(plain, split, 9)) for split in ("train", "val")]
    assert torch.equal(batch.images, torch.cat([part.images for part in apart]))
    assert torch.equal(batch.annotations.masks, torch.cat([part.annotations.masks for part in apart]))


def test_data_without_what_the_task_needs_is_one_sentence() -> None:
    with pytest.raises(DataError, match=r"'digits' come with class labels, not with masks: choose another task"):
        open_data(DataConfig(source="digits", target="mask"))
    with pytest.raises(DataError, match=r"'scenes' come with masks and objects and questions, not with class labels"):
        open_data("scenes")


def test_the_digest_knows_annotations_and_held_out_splits_have_theirs() -> None:
    records = Pictures(20)
    config, source = DataConfig(source="unused", target="mask"), source_of(records)
    way = find_preprocessing(source, (8, 8), 3, margin=False)
    images = open_cached_images(records, "held out", (8, 8), 3, "raise", lambda *_: None)
    store = open_annotations("mask", records, images, 3, "held out masks", (8, 8), lambda *_: None)
    dataset = assemble(source, config, {"train": images}, way, Dataset, {"train": store})
    bare = assemble(source, config, {"train": images}, way, Dataset)
    assert dataset.digest != bare.digest
    assert dataset.classes == TARGETS["mask"]
    for split in dataset.splits.values():
        (found,) = split.annotate(np.array([0]))
        row = int(split.rows[0])
        np.testing.assert_array_equal(found.mask, choose_window(records.size(row), (8, 8)).move_mask(records.mask(row)))


def test_blank_annotations_have_the_shapes_of_real_ones() -> None:
    for target in TARGETS:
        blank = Annotations.blank(target, 3, (8, 8))
        assert len(blank) == 3
