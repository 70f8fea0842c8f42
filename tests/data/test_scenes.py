"""What is true of the `scenes` set: one drawing, whose masks, boxes and questions agree; and that the drawing stays."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from vitclinic._core.errors import DataError
from vitclinic.data import DataConfig, open_data, scenes
from vitclinic.data.annotations.annotation import mask_boxes

GOLDEN = [[124.27, 107.58, 77.04, 153.74], [71.17, 104.49, 99.17, 117.17]]
RECORDS = scenes.SceneRecords(0, "train", 200)


def test_a_scene_depends_on_seed_split_and_index_alone() -> None:
    forwards = [scenes.draw(3, "val", index)[0] for index in range(6)]
    backwards = [scenes.draw(3, "val", index)[0] for index in reversed(range(6))][::-1]
    np.testing.assert_array_equal(forwards, backwards)
    drawn = [scenes.draw(seed, split, i)[0] for seed in (0, 1) for split in ("train", "val", "test") for i in range(20)]
    assert len({image.tobytes() for image in drawn}) == 120


def test_masks_boxes_and_classes_are_of_one_drawing() -> None:
    for index in range(60):
        _, objects = scenes.draw(0, "train", index)
        assert 1 <= len(objects) <= scenes.MOST
        assert objects.masks is not None
        assert objects.masks.sum(0).max() <= 1  # visible pixels belong to one
        np.testing.assert_array_equal(objects.boxes, mask_boxes(objects.masks))
        mask = RECORDS.mask(index)
        for label, pixels in zip(objects.labels, objects.masks, strict=True):
            assert (mask[pixels] == 1 + label).all()
            assert pixels.sum() > 30
        assert ((mask > 0) == objects.masks.any(0)).all()


def test_the_colour_of_a_shape_is_the_one_that_is_asked_for() -> None:
    """By the pixels alone: the mean colour inside is nearer to the answer than to every other colour."""
    palette, asked = np.array(list(scenes.COLOURS.values())), 0
    for index in range(60):
        image, objects = scenes.draw(0, "train", index)
        for question in RECORDS.questions(index):
            if not question.text.startswith("what colour is the "):
                continue
            shape = scenes.SHAPES.index(question.text.rpartition(" ")[2])
            (number,) = np.flatnonzero(objects.labels == shape)
            colour = image[objects.masks[number]].mean(0) / 255
            assert list(scenes.COLOURS)[np.square(palette - colour).sum(1).argmin()] == question.answers[0]
            asked += 1
    assert asked > 50


def test_counts_and_presence_are_those_of_the_objects() -> None:
    answers: Counter[str] = Counter()
    for index in range(200):
        kinds = Counter(scenes.SHAPES[label] for label in RECORDS.objects(index).labels)
        for question in RECORDS.questions(index):
            words, (answer,) = question.text.split(), question.answers
            if words[0] == "is":
                assert (answer == "yes") == (kinds[words[-1]] > 0)
                answers[answer] += 1
            if words[:2] == ["how", "many"]:
                singular = "cross" if words[2] == "crosses" else words[2].removesuffix("s")
                assert answer == str(kinds.total() if words[2] == "shapes" else kinds[singular])
    assert answers["yes"] == answers["no"] == 200


def test_every_answer_is_listed() -> None:
    dataset = open_data(DataConfig(source="scenes:60", target="questions"))
    found = {answer for index in range(60) for each in RECORDS.questions(index) for answer in each.answers}
    assert found <= set(dataset.classes)
    assert len(dataset.classes) == 2 + 6 + 6 + 5


def test_the_number_of_scenes_can_be_chosen_and_others_are_refused() -> None:
    sizes = {split: len(records) for split, records in scenes.open_scenes("scenes:300", 0).splits.items()}
    assert sizes == {"train": 300, "val": 250, "test": 300}
    for wrong in ("scenes:0", "scenes:many", "scenes:n=2,texture=1"):
        with pytest.raises(DataError, match="write scenes, or scenes:2000"):
            scenes.open_scenes(wrong, 0)


def test_the_drawing_has_not_changed() -> None:
    """Means of some pixels; a changed drawing needs a new `VERSION`."""
    found = [[round(float(scenes.draw(seed, "test", i)[0].mean()), 2) for i in range(4)] for seed in (0, 7)]
    assert found == GOLDEN
