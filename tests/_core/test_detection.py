"""Average precision against COCO's evaluation (faster-coco-eval), torchmetrics and cases counted by hand."""

import contextlib
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitclinic._core.detection import (
    THRESHOLDS,
    Detections,
    box_overlaps,
    mask_overlaps,
    match_objects,
    summarize_precision,
)

SIZE, CLASSES = 24, 3
BOX = np.array([[2.0, 2.0, 12.0, 12.0]])
ONE, SINGLE, CROWD = np.zeros(1, np.int64), np.array([False]), np.array([True])


def match(found, scores, objects, crowd=None, labels=None, object_labels=None, classes=1):
    crowd = np.zeros(len(objects), bool) if crowd is None else np.asarray(crowd)
    labels = np.zeros(len(found), np.int64) if labels is None else labels
    object_labels = np.zeros(len(objects), np.int64) if object_labels is None else object_labels
    overlaps = box_overlaps(np.asarray(found, float).reshape(-1, 4), np.asarray(objects, float).reshape(-1, 4), crowd)
    return match_objects(overlaps, labels, np.asarray(scores, float), object_labels, crowd, classes)


def test_one_of_two_objects_found_before_a_false_one_has_ap_one_half():
    image = match([*BOX, [14, 14, 20, 20]], [0.9, 0.8], [*BOX, [2, 14, 8, 20]])
    # Recalls up to 0.5 have precision 1: 51 of the 101.
    assert summarize_precision(Detections([image], 1).average_precision()) == pytest.approx((51 / 101,) * 3)


def test_a_second_detection_of_an_object_is_wrong():
    image = match([*BOX, *BOX], [0.9, 0.8], BOX)
    assert image.right[0].tolist() == [True, False]


def test_detections_in_a_crowd_count_neither_way():
    crowded = match([[3, 3, 6, 6], *BOX], [0.9, 0.8], [[0, 0, 20, 20], *BOX], crowd=[True, False])
    assert crowded.ignored[:, 0].all()
    assert crowded.right[:, 1].all()
    assert crowded.objects.tolist() == [1]
    assert Detections([crowded], 1).average_precision().mean() == 1


def test_an_image_without_objects_counts_what_is_found_in_it():
    good, empty = match(BOX, [0.5], BOX), match(BOX, [0.9], np.zeros((0, 4)))
    assert Detections([good, empty], 1).average_precision().mean() == pytest.approx(0.5)
    nothing = match(np.zeros((0, 4)), [], np.zeros((0, 4)))
    assert Detections([good, nothing], 1).average_precision().mean() == 1


def test_without_objects_there_is_no_number():
    empty = match(BOX, [0.9], np.zeros((0, 4)))
    assert np.isnan(summarize_precision(Detections([empty], 1).average_precision())).all()
    assert np.isnan(summarize_precision(Detections([], 2).average_precision())).all()


def draw_image(random, with_crowd=True):
    """Return detections and objects of an image as masks, boxes, labels and scores; both may be none."""

    def masks(count):
        drawn = np.zeros((count, SIZE, SIZE), bool)
        for mask in drawn:
            top, left = random.integers(0, SIZE - 8, 2)
            height, width = random.integers(3, 9, 2)
            mask[top : top + height, left : left + width] = True
        return drawn

    objects = masks(random.integers(0, 5))
    near = [np.roll(mask, random.integers(-2, 3, 2), (0, 1)) for mask in objects for _ in range(random.integers(0, 3))]
    found = np.concatenate([masks(random.integers(0, 4)), np.array(near, bool).reshape(-1, SIZE, SIZE)])
    crowd = (random.random(len(objects)) < 0.3) if with_crowd else np.zeros(len(objects), bool)
    labels, kinds = random.integers(0, CLASSES, len(found)), random.integers(0, CLASSES, len(objects))
    return found, labels, random.random(len(found)).round(2), objects, kinds, crowd


def boxes_of(masks):
    found = []
    for mask in masks:
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        found.append([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
    return np.array(found, float).reshape(-1, 4)


def ours(images, kind):
    matched = []
    for found, labels, scores, objects, kinds, crowd in images:
        if kind == "segm":
            overlaps = mask_overlaps(found, objects, crowd)
        else:
            overlaps = box_overlaps(boxes_of(found), boxes_of(objects), crowd)
        matched.append(match_objects(overlaps, labels, scores, kinds, crowd, CLASSES))
    return summarize_precision(Detections(matched, CLASSES).average_precision())


def by_coco(images, kind):
    from faster_coco_eval import COCO, COCOeval_faster, mask

    def encode(pixels):
        coded = mask.encode(np.asfortranarray(pixels.astype(np.uint8)))
        return {**coded, "counts": coded["counts"].decode()}

    truth, results = [], []
    for number, (found, labels, scores, objects, kinds, crowd) in enumerate(images, start=1):
        for pixels, box, kind_of, many in zip(objects, boxes_of(objects), kinds, crowd, strict=True):
            left, top, right, bottom = box.tolist()
            truth.append(
                {
                    "id": len(truth) + 1,
                    "image_id": number,
                    "category_id": int(kind_of) + 1,
                    "iscrowd": int(many),
                    "bbox": [left, top, right - left, bottom - top],
                    "area": float(pixels.sum()),
                    "segmentation": encode(pixels),
                }
            )
        for pixels, box, label, score in zip(found, boxes_of(found), labels, scores, strict=True):
            left, top, right, bottom = box.tolist()
            shape = {"bbox": [left, top, right - left, bottom - top]} if kind == "bbox" else {}
            shape |= {} if kind == "bbox" else {"segmentation": encode(pixels)}
            results.append({"image_id": number, "category_id": int(label) + 1, "score": float(score), **shape})
    listed = [{"id": number + 1, "width": SIZE, "height": SIZE} for number in range(len(images))]
    categories = [{"id": number + 1, "name": str(number)} for number in range(CLASSES)]
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO({"images": listed, "annotations": truth, "categories": categories})
        evaluation = COCOeval_faster(coco, coco.loadRes(results), kind)
        evaluation.run()
    return evaluation.stats[:3]


@pytest.mark.parametrize("kind", ["bbox", "segm"])
@pytest.mark.parametrize("seed", range(4))
def test_ap_is_cocos(kind, seed):
    random = np.random.default_rng(seed)
    images = [draw_image(random) for _ in range(12)]
    assert ours(images, kind) == pytest.approx(by_coco(images, kind), abs=1e-9)


@pytest.mark.slow  # its import takes longer than all else here
def test_ap_is_torchmetrics():
    from torchmetrics.detection import MeanAveragePrecision

    random = np.random.default_rng(7)
    images = [draw_image(random, with_crowd=False) for _ in range(20)]
    metric = MeanAveragePrecision(iou_type="bbox", backend="faster_coco_eval")
    for found, labels, scores, objects, kinds, _ in images:
        metric.update(
            [{"boxes": torch.tensor(boxes_of(found)), "labels": torch.tensor(labels), "scores": torch.tensor(scores)}],
            [{"boxes": torch.tensor(boxes_of(objects)), "labels": torch.tensor(kinds)}],
        )
    result = metric.compute()
    # Its recalls are rounded to single precision, which moves one of the 101 points of a class now and then.
    expected = [float(result[name]) for name in ("map", "map_50", "map_75")]
    assert ours(images, "bbox") == pytest.approx(expected, abs=5e-3)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_a_weight_of_two_is_the_image_twice(seed):
    random = np.random.default_rng(seed)
    drawn = [draw_image(random) for _ in range(5)]
    matched = []
    for number, (found, labels, scores, objects, kinds, crowd) in enumerate(drawn):
        apart = scores + np.arange(len(scores)) * 1e-5 + number * 1e-4  # of equal scores, the order would decide
        overlaps = mask_overlaps(found, objects, crowd)
        matched.append(match_objects(overlaps, labels, apart, kinds, crowd, CLASSES))
    weights = random.integers(0, 3, len(matched))
    repeated = [one for one, weight in zip(matched, weights, strict=True) for _ in range(weight)]
    found = Detections(matched, CLASSES).average_precision(weights)
    expected = Detections(repeated, CLASSES).average_precision()
    assert found == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_bootstrap_surrounds_the_value_and_depends_on_its_seed_alone():
    random = np.random.default_rng(0)
    matched = []
    for found, labels, scores, objects, kinds, crowd in (draw_image(random) for _ in range(30)):
        overlaps = mask_overlaps(found, objects, crowd)
        matched.append(match_objects(overlaps, labels, scores, kinds, crowd, CLASSES))
    detections = Detections(matched, CLASSES)
    draws = detections.bootstrap(50, seed=1)
    value = summarize_precision(detections.average_precision())[0]
    assert draws[:, 0].min() < value < draws[:, 0].max()
    assert (draws == detections.bootstrap(50, seed=1)).all()
    assert (draws != detections.bootstrap(50, seed=2)).any()


def test_thresholds_are_cocos():
    assert THRESHOLDS.tolist() == pytest.approx([0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95])
