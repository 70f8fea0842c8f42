"""COCO's JSON as a source: outlines against COCO's own tools, splits, and what is wrong in one sentence each."""

import json

import numpy as np
import pytest
from PIL import Image

from vitclinic._core.errors import DataError
from vitclinic.data import DataConfig, open_data
from vitclinic.data.coco import decode_runs, draw_outline, read_counts

CATEGORIES = [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}]
SQUARE = [[4, 2, 12, 2, 12, 10, 4, 10]]


def annotation(number=1, image=1, **changes):
    return {
        "id": number,
        "image_id": image,
        "category_id": 7,
        "bbox": [4, 2, 8, 8],
        "iscrowd": 0,
        "segmentation": SQUARE,
        **changes,
    }


def write(folder, name="train.json", annotations=None, files=("a.png", "b.png"), **changes):
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        Image.new("RGB", (20, 16)).save(folder / file)
    listed = [{"id": n, "file_name": file, "height": 16, "width": 20} for n, file in enumerate(files, start=1)]
    found = [annotation()] if annotations is None else annotations
    contents = {"images": listed, "annotations": found, "categories": CATEGORIES, **changes}
    (folder / name).write_text(json.dumps(contents))
    return folder


def read(folder, **options):
    options = {"held_out": 0, **options}
    return open_data(DataConfig(source=str(folder), target="objects", **options), size=(16, 20))


def objects_of(dataset, split="train"):
    return [one.objects for one in dataset.splits[split].annotate(np.arange(len(dataset.splits[split])))]


def test_boxes_masks_labels_and_images_without_objects(tmp_path):
    dataset = read(write(tmp_path / "set"))
    assert dataset.classes == ("dog", "cat")  # by their ids
    first, second = objects_of(dataset)
    assert first.boxes.tolist() == [[4, 2, 12, 10]]
    assert first.labels.tolist() == [1]
    assert first.masks[0].sum() == 64
    assert first.masks[0, 2:10, 4:12].all()
    assert len(second) == 0


def test_crowds_are_kept_as_such_and_runs_are_masks(tmp_path):
    crowd = annotation(2, iscrowd=1, segmentation={"size": [16, 20], "counts": [16, 32, 16 * 17]}, bbox=[1, 0, 2, 16])
    first, _ = objects_of(read(write(tmp_path / "set", annotations=[annotation(), crowd])))
    assert first.crowd.tolist() == [False, True]
    assert first.masks[1].sum() == 32
    assert first.masks[1, :, 1:3].all()


def test_splits_are_told_by_the_names_of_files_and_folders(tmp_path):
    root = tmp_path / "set"
    write(root / "train", "_annotations.coco.json")
    write(root / "valid", "_annotations.coco.json", files=("c.png",))
    assert {name: len(split) for name, split in read(root).splits.items()} == {"train": 2, "val": 1, "test": 1}
    official = tmp_path / "official"
    write(official / "val2017", files=("d.png", "e.png"))
    (official / "annotations").mkdir()
    (official / "val2017" / "train.json").rename(official / "annotations" / "instances_val2017.json")
    (official / "annotations" / "captions_val2017.json").write_text("{}")
    assert len(read(official).splits["val"]) == 2


def test_without_outlines_there_are_no_masks(tmp_path):
    bare = annotation()
    del bare["segmentation"]
    assert objects_of(read(write(tmp_path / "set", annotations=[bare])))[0].masks is None


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"image_id": 9}, "annotation 2 is of image 9, which is not in the file"),
        ({"category_id": 5}, "annotation 2 is of category 5, which is not in the file"),
        ({"bbox": [4, 2, 0, 8]}, "annotation 2 has a box without area"),
        ({"bbox": [1, 2, 3]}, r"annotation 2 has the box \[1, 2, 3\]; expected"),
        ({"segmentation": []}, "1 of 2 annotations have no segmentation"),
    ],
)
def test_what_cannot_be_used_is_told_or_left_out_and_noted(wrong, sentence, tmp_path):
    folder = write(tmp_path / "set", annotations=[annotation(), annotation(2, **wrong)])
    with pytest.raises(DataError, match=f"{sentence}.*on_error=skip"):
        read(folder)
    dataset = read(folder, on_error="skip")
    assert len(dataset.skipped) == 1
    assert len(objects_of(dataset)[0]) == (2 if "segmentation" in wrong else 1)


@pytest.mark.parametrize(
    ("contents", "sentence"),
    [
        ({"images": [{"id": 1, "file_name": "gone.png"}]}, "lists the image 'gone.png', which is in none of"),
        ({"annotations": [annotation(bbox=[4, 2, 80, 8])]}, "is not inside the image of 20 x 16 pixels"),
        ({"annotations": [annotation(segmentation={"size": [16, 20], "counts": [3]})]}, "the runs of a mask add up"),
        ({"annotations": [annotation(segmentation=[[1, 2, 3, 4]])]}, "at least three points"),
        (
            {"annotations": [annotation(segmentation={"size": [2, 2], "counts": [4]})]},
            "has 2 x 2 pixels, and",
        ),
        ({"annotations": [{"id": 1}]}, "number 0 of its annotations has no image_id"),
        ({"categories": []}, "has no categories"),
        ({"images": []}, "lists no images"),
        ({"images": "none"}, "is not COCO's JSON"),
    ],
)
def test_what_is_wrong_is_one_sentence(contents, sentence, tmp_path):
    with pytest.raises(DataError, match=sentence):
        read(write(tmp_path / "set", **{"annotations": [], **contents}))


def test_files_that_are_missing_or_two_for_a_split(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no COCO file"):
        read(tmp_path / "empty")
    folder = write(write(tmp_path / "set"), "training.json")
    with pytest.raises(DataError, match="several JSON files for train"):
        read(folder)


def test_compressed_runs_are_cocos():
    from faster_coco_eval import mask as coco

    random = np.random.default_rng(0)
    for share in (0.02, 0.5, 0.97):
        pixels = random.random((37, 23)) < share
        pixels[5:20] = True
        coded = coco.encode(np.asfortranarray(pixels.astype(np.uint8)))
        assert (decode_runs(read_counts(coded["counts"]), (37, 23)) == pixels).all()
        text = {"size": [37, 23], "counts": coded["counts"].decode()}
        assert (draw_outline(text, (37, 23)) == pixels).all()
    with pytest.raises(ValueError, match="ends within a number"):
        read_counts("o")


def test_polygons_are_cocos_but_for_their_border():
    from faster_coco_eval import mask as coco

    random = np.random.default_rng(1)
    for _ in range(5):
        angles = np.sort(random.random(9)) * 2 * np.pi
        radius = 12 + 8 * random.random(9)
        polygon = np.stack([32 + radius * np.cos(angles), 30 + radius * np.sin(angles)], 1).ravel().tolist()
        theirs = coco.decode(coco.merge(coco.frPyObjects([polygon], 64, 64))).astype(bool)
        ours = draw_outline([polygon], (64, 64))
        assert (ours & theirs).sum() / (ours | theirs).sum() > 0.93


def test_a_polygon_has_the_pixels_whose_centres_it_contains():
    random = np.random.default_rng(2)
    points = random.random((7, 2)) * [20, 16]
    drawn = draw_outline([points.ravel().tolist()], (16, 20))
    for row in range(16):
        for column in range(20):
            x, y, inside = column + 0.5, row + 0.5, False
            for (ax, ay), (bx, by) in zip(points, np.roll(points, -1, axis=0), strict=True):
                if (ay > y) != (by > y) and x > ax + (y - ay) * (bx - ax) / (by - ay):
                    inside = not inside
            assert drawn[row, column] == inside


def test_an_object_thinner_than_a_pixel_has_one():
    assert draw_outline([[3.1, 2.1, 3.2, 2.1, 3.2, 2.2]], (8, 8)).nonzero() == (2, 3)
