"""predict for masks, boxes and answers: files are as right as the run's own test, in the image's own pixels."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitclinic
from tests.deployment.conftest import TINY
from vitclinic._core.errors import DataError, RecipeError
from vitclinic._core.segmentation import count_pixels, mean_iou
from vitclinic.data import DataConfig, evaluation_batches, open_data
from vitclinic.data.coco import decode_runs, encode_runs, open_coco
from vitclinic.deployment.annotate import Boxes, FoundObjects, restore_boxes, restore_mask
from vitclinic.tasks.vqa_accuracy import score_answer
from vitclinic.training import load_model

TASKS = {
    "mask": {"name": "segmentation", "head": "linear", "auxiliary": 0, "crop": 48},
    "objects": {"name": "detection", "width": 8, "samples": 4, "proposals": 6, "masks": False},
    "questions": "vqa",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a run of each kind, trained for a moment on scenes, the folder of its test images, and their batch."""
    made = {}

    def make(kind):
        if kind not in made:
            root = tmp_path_factory.mktemp(kind)
            keys = {"data": "scenes:24", "model": TINY, "steps": 2, "batch_size": 8, "workers": 0}
            run = vitclinic.train(task=TASKS[kind], **keys, test=kind != "objects", out=root / "run")
            opened = open_data(DataConfig(source="scenes:24", target=kind), size=run.spec.img_size)
            (batch,) = evaluation_batches(opened, "test", 100)
            (root / "test").mkdir()
            for number, image in enumerate(batch.images):
                pixels = (image.permute(1, 2, 0) * 255).round().byte().numpy()
                Image.fromarray(pixels).save(root / "test" / f"{number:02}.png")
            made[kind] = run, root / "test", batch
        return made[kind]

    return make


def test_written_masks_have_the_score_of_the_run_s_own_test(trained, tmp_path):
    run, folder, batch = trained("mask")
    found = vitclinic.predict(run, folder)
    found.write(tmp_path / "new.csv", top_k=2)
    with (tmp_path / "new.csv").open() as file:
        rows = list(csv.DictReader(file))
    masks = [np.asarray(Image.open(row["mask"])) for row in rows]
    assert rows[0]["mask"] == str(tmp_path / "new_masks" / "00.png")
    counts = count_pixels(torch.from_numpy(np.stack(masks)), batch.annotations.masks, len(found.classes))
    assert float(mean_iou(counts.sum(0).numpy())) == pytest.approx(run.results["test"]["miou"])
    largest = found.classes.index(rows[0]["class"])
    assert float(rows[0]["share"]) == pytest.approx((masks[0] == largest).mean(), abs=1e-6)


def test_a_mask_has_the_pixels_of_its_image_and_void_where_nothing_was_seen(trained):
    run, folder, _ = trained("mask")
    image = Image.open(folder / "00.png")
    wide = Image.new("RGB", (4 * image.width, 2 * image.height))
    wide.paste(image.resize((2 * image.width, 2 * image.height)), (image.width, 0))
    found = vitclinic.predict(run, [wide, image])
    assert found.mask(0).shape == (wide.height, wide.width)
    seen = slice(image.width, 3 * image.width)
    assert (np.delete(found.mask(0), np.r_[seen], axis=1) == 255).all()
    assert np.array_equal(found.mask(0)[:, seen][::2, ::2], found.views[0])
    assert np.array_equal(found.mask(1), found.views[1])


def test_boxes_and_masks_move_back_to_the_image():
    view = np.arange(16, dtype=np.uint8).reshape(4, 4)
    assert np.array_equal(restore_mask(view, (8, 8)), view.repeat(2, 0).repeat(2, 1))
    assert restore_boxes(np.array([[1.0, 0.0, 3.0, 4.0]]), (4, 4), (8, 20)).tolist() == [[8, 0, 12, 8]]


def test_objects_written_as_coco_are_read_back_as_data(tmp_path):
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    views = np.zeros((2, 6, 8), bool)
    views[0, 1:3, 2:5] = views[1, 4:, 7:] = True
    boxes, labels = np.array([[2.0, 1.0, 5.0, 3.0], [6.5, 4.0, 8.0, 6.0]]), np.array([1, 0])
    found = Boxes(
        [str(tmp_path / "a.png")], ("star", "disc"), [FoundObjects((6, 8), boxes, labels, np.array([0.9, 0.4]), views)]
    )
    found.write(tmp_path / "new.json")
    contents = json.loads((tmp_path / "new.json").read_text())
    assert [(each["score"], each["area"]) for each in contents["annotations"]] == [(0.9, 6), (0.4, 2)]
    source = open_coco(tmp_path / "new.json", "raise")
    read = source.splits["train"].objects(0)
    assert source.targets["objects"] == found.classes
    assert np.array_equal(read.boxes, boxes)
    assert np.array_equal(read.labels, labels)
    assert np.array_equal(read.masks, views)


def test_boxes_are_those_of_the_network_in_the_pixels_of_the_image(trained):
    run, folder, batch = trained("objects")
    image = Image.open(folder / "00.png")
    large = image.resize((3 * image.width, 3 * image.height), Image.Resampling.NEAREST)
    found = vitclinic.predict(run, [image, large], min_score=0)
    network = load_model(run.path)
    with torch.no_grad():
        (own,), (seen,) = network(batch.images[:1]), network(large)
    assert found.objects[0].boxes == pytest.approx(own["boxes"].numpy(), abs=1e-5)
    assert found.objects[0].scores == pytest.approx(own["scores"].numpy())
    assert found.objects[1].boxes == pytest.approx(3 * seen["boxes"].numpy(), abs=1e-3)


@pytest.mark.parametrize("mask", [[[0]], [[1]], [[0, 1], [1, 1]], [[1, 0], [0, 0]]])
def test_runs_of_a_mask_are_its_pixels(mask):
    pixels = np.array(mask, bool)
    assert np.array_equal(decode_runs(encode_runs(pixels), pixels.shape), pixels)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_images_without_objects_leave_a_table_without_rows(trained, tmp_path, suffix):
    run, folder, _ = trained("objects")
    found = vitclinic.predict(run, folder / "00.png", min_score=1)
    assert (found.rows(), len(found)) == ([], 1)
    assert found.write(tmp_path / f"x.{suffix}").is_file()
    if suffix == "csv":
        assert (tmp_path / "x.csv").read_text() == "file,class,score,left,top,right,bottom\n"


def test_answers_to_a_table_are_as_right_as_the_run_s_own_test(trained, tmp_path):
    run, folder, batch = trained("questions")
    asked = [
        {"image": str(folder / f"{number:02}.png"), "question": question.text}
        for number, of_image in enumerate(batch.annotations.questions)
        for question in of_image
    ]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    found = vitclinic.predict(run, tmp_path / "asked.jsonl", batch_size=2)
    assert found.questions == [row["question"] for row in asked]
    truth = [question.answers for of_image in batch.annotations.questions for question in of_image]
    scores = [score_answer(answer, answers) for answer, answers in zip(found.labels, truth, strict=True)]
    assert np.mean(scores) == pytest.approx(run.results["test"]["accuracy"])


def test_a_question_is_asked_of_each_image_and_may_be_given_to_the_network(trained, tmp_path):
    run, folder, _ = trained("questions")
    questions = ["is there a star", "what colour is the circle"]
    (tmp_path / "bad.png").write_text("not an image")
    found = vitclinic.predict(run, [tmp_path / "bad.png", folder / "00.png", folder / "01.png"], ask=questions)
    assert (len(found), found.questions, len(found.skipped)) == (4, questions * 2, 1)
    assert list(found.rows(top_k=1)[0]) == ["file", "question", "answer", "score"]
    logits = load_model(run.path)(Image.open(folder / "01.png"), questions[1]).detach().double()
    assert found.scores[3] == pytest.approx(logits.sigmoid().numpy()[0], abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("questions", {}, r"answers questions: give one by `ask`"),
        ("questions", {"ask": " "}, "empty question"),
        ("mask", {"ask": "is it"}, "'ask' is for runs of the task vqa, and .* was trained for segmentation"),
        ("mask", {"temperature": 2}, "'temperature' is for runs of the task classification"),
        ("objects", {"min_score": 2}, "must be between 0 and 1"),
    ],
)
def test_what_does_not_fit_the_task_is_one_sentence(trained, kind, options, reason):
    run, folder, _ = trained(kind)
    with pytest.raises(RecipeError, match=reason):
        vitclinic.predict(run, folder, **options)


def test_tables_of_questions_are_read_with_care(trained, run, tmp_path):
    table = tmp_path / "asked.csv"
    table.write_text("image,question\na.png,\n")
    with pytest.raises(DataError, match="row 1 has no 'question'"):
        vitclinic.predict(trained("questions")[0], table)
    table.write_text("image,question\na.png,is it\n")
    with pytest.raises(DataError, match=r"None of the 1 images can be read; .*asked\.csv"):
        vitclinic.predict(run, table)  # to a classifier it is a file like any


def test_features_are_no_classes_and_the_verb_that_writes_them_is_named(tmp_path):
    keys = {"data": "digits", "model": TINY, "steps": 1, "batch_size": 8, "workers": 0}
    run = vitclinic.train(task="retrieval", **keys, out=tmp_path / "run")
    with pytest.raises(RecipeError, match=r"was trained for retrieval, .* the verb features writes them"):
        vitclinic.predict(run.path, [])


def test_the_command_writes_masks_beside_the_table(trained, tmp_path, command):
    run, folder, _ = trained("mask")
    code, _, told = command("predict", run.path, folder, "-o", tmp_path / "x.csv", "--json")
    assert (code, told) == (0, "")
    assert len(list((tmp_path / "x_masks").iterdir())) == len(list(folder.iterdir()))
    code, _, told = command("predict", run.path, folder, "-o", tmp_path / "x.json")
    assert code == 2
    assert "must end in .csv, .jsonl or .parquet" in " ".join(told.split())
    with pytest.raises(RecipeError, match="would replace the images"):
        vitclinic.predict(run, tmp_path / "x_masks").write(tmp_path / "x.csv")
