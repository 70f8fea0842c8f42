"""predict: the run's own preprocessing, calibrated probabilities, files of any kind, mistakes as sentences."""

import csv
import io
import json
import os
import re
import shutil
import sys
import time
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image

import vitclinic
from tests.deployment.conftest import write_photos
from vitclinic._core.errors import DataError, ModelError, RecipeError
from vitclinic.data import dataset as dataset_module
from vitclinic.data import evaluation_batches, open_data
from vitclinic.deployment.calibration import choose_temperature
from vitclinic.deployment.images import find_images, find_inputs
from vitclinic.deployment.predict import Predictor
from vitclinic.deployment.predictor import ImageStream
from vitclinic.models import create_model
from vitclinic.probes.digest import network_digest
from vitclinic.training import load_model


def images_of(run):
    return run.path.parent / "photos" / "test"


@pytest.mark.parametrize(
    ("sizes", "suffix", "size", "limit"),
    [
        ([(48, 40), (36, 60)], "png", None, 2**31),  # small: resized and cropped
        ([(300, 200), (160, 500)], "jpg", 72, 2**31),  # photographs: a margin, JPEGs decoded at a fraction
        ([(300, 200), (160, 500)], "jpg", 72, 0),  # a set too large for the cache: decoded whole
        ([(70, 80), (300, 66)], "png", 72, 2**31),  # originals too small for a margin
    ],
)
def test_files_become_exactly_the_pixels_of_the_test_split(tmp_path, monkeypatch, sizes, suffix, size, limit):
    monkeypatch.setattr(dataset_module, "SMALL_SET_BYTES", limit)
    data = write_photos(tmp_path / "photos", sizes, suffix, count=2)
    opened = open_data(str(data), size=size)
    files = find_images([data / "test"])
    (batch,) = evaluation_batches(opened, "test", 100)
    decoded = ImageStream(files, opened.preprocessing)[range(len(files))]
    assert torch.equal(decoded.images, batch.images)


def test_predictions_are_as_right_as_the_run_s_own_test(run):
    found = vitclinic.predict(run, images_of(run), workers=1, batch_size=5)
    truth = [file.split("/")[-2] for file in found.files]
    right = sum(one == other for one, other in zip(found.labels, truth, strict=True))
    assert (right, len(found)) == (run.results["test"]["correct"], run.results["test"]["count"])
    assert found.probabilities.sum(1) == pytest.approx(1)


@pytest.mark.parametrize("images", [torch.rand(2, 3, 8, 8), [3]])
def test_tensors_and_numbers_are_no_images(run, images):
    with pytest.raises(RecipeError, match=r"takes paths and images of Pillow's \(got .*call the network"):
        vitclinic.predict(run, images)


def test_the_temperature_is_fitted_on_val_once_and_divides_the_logits(run, monkeypatch):
    files = find_images([images_of(run)])
    found = vitclinic.predict(run, files)
    stored = json.loads((run.path / "calibration.json").read_text())
    stored.pop("digest")
    (record,) = stored.values()
    assert record["temperature"] == found.temperature != 1
    logits = load_model(run.path)([Image.open(file) for file in files]).detach().double()
    assert found.probabilities == pytest.approx((logits / found.temperature).softmax(1).numpy(), abs=1e-6)
    monkeypatch.setattr(
        sys.modules["vitclinic.deployment.calibration"], "open_data", None
    )  # to fit again would call it
    assert vitclinic.predict(run, files).temperature == found.temperature
    assert vitclinic.predict(run, files, temperature=2).temperature == 2


def test_a_temperature_that_raises_the_loss_is_not_taken_and_a_worse_calibration_is_told(caplog):
    right = 9 * torch.eye(3)
    kept = choose_temperature(right, torch.arange(3), "'runs/a'")
    assert kept["temperature"] == 1
    assert kept["ece"] == kept["ece_before"]
    assert "'runs/a' keeps the temperature 1: at" in caplog.text
    caplog.clear()
    # one sure mistake, 19 unsure ones right: the loss asks for less certainty, the calibration error for more
    logits = torch.tensor([[1.0, 0.0]] * 19 + [[9.0, 0.0]])
    found = choose_temperature(logits, torch.tensor([0] * 19 + [1]), "'runs/a'")
    assert found["temperature"] > 1
    assert found["nll"] < found["nll_before"]
    assert found["ece"] > found["ece_before"]
    assert "calibration error rises" in caplog.text


def test_a_temperature_of_an_earlier_version_is_fitted_again(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy, ignore=shutil.ignore_patterns("calibration.json"))
    found = vitclinic.predict(copy, images_of(run)).temperature
    stored = json.loads((copy / "calibration.json").read_text())
    stored.pop("digest")
    (record,) = stored.values()
    record["temperature"] = 7.0
    record.pop("nll")
    (copy / "calibration.json").write_text(json.dumps(stored))
    assert vitclinic.predict(copy, images_of(run)).temperature == found


def test_without_its_data_a_run_predicts_uncalibrated_and_says_so(tmp_path, run, caplog):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy, ignore=shutil.ignore_patterns("calibration.json"))
    recipe = (copy / "recipe.yaml").read_text().replace(str(run.path.parent / "photos"), str(tmp_path / "gone"))
    (copy / "recipe.yaml").write_text(recipe)
    assert vitclinic.predict(copy, images_of(run)).temperature == 1
    assert "not calibrated: There is no data at" in caplog.text


def test_a_loaded_network_takes_images_and_tensors_alike(run):
    network = load_model(run.path)
    images = [Image.open(file) for file in find_images([images_of(run)])[:3]]
    pixels = np.stack([run.preprocessing(image) for image in images])
    x_bchw = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    assert torch.equal(network(images), network(x_bchw))
    assert torch.equal(network(images[0]), network(images[:1]))
    assert network.classes == ("cat", "dog")
    with pytest.raises(ModelError, match="only a run's"):
        create_model("vit_tiny_patch16_224", img_size=32, depth=1)(images)


def test_what_describes_a_network_is_no_part_of_its_digest(run):
    network = load_model(run.path)
    before = network_digest(network)
    network.preprocessing = network.classes = None
    del network.preprocessing, network.classes
    assert network_digest(network) == before


def test_a_run_of_an_earlier_version_has_its_framing_from_its_data(run):
    facts = json.loads((run.path / "data.json").read_text())
    whole = run.preprocessing
    try:
        (run.path / "data.json").write_text(
            json.dumps({k: v for k, v in facts.items() if k not in ("framed", "whole")})
        )
        assert run.preprocessing == whole
    finally:
        (run.path / "data.json").write_text(json.dumps(facts))


def test_files_folders_patterns_and_standard_input_name_the_same_images(run):
    folder = images_of(run)
    files = find_images([folder])
    assert len(files) == 16
    assert find_images([f"{folder}/**/*.png"]) == files == find_images(files)
    assert (
        find_images(["-"], io.StringIO("\n".join(files))) == files == find_images(["-"], io.StringIO("\0".join(files)))
    )
    wrong = {folder / "x.png": "no image at", folder.parent.parent / "run": "contains no images", "ü" * 300: "too long"}
    for word, reason in wrong.items():
        with pytest.raises(DataError, match=reason):
            find_images([word])
    with pytest.raises(DataError, match="lists no image"):
        find_images(["-"], io.StringIO(""))


def test_every_format_holds_the_same_rows(run, tmp_path):
    import pyarrow.parquet

    found = vitclinic.predict(run, images_of(run))
    rows = found.rows(top_k=2, probabilities=True)
    assert list(rows[0]) == ["file", "class", "probability", "class_2", "probability_2", "p(cat)", "p(dog)"]
    assert rows[0]["probability"] == max(rows[0]["p(cat)"], rows[0]["p(dog)"]) >= rows[0]["probability_2"]
    for suffix in ("csv", "jsonl", "parquet"):
        found.write(tmp_path / f"x.{suffix}", 2, True)
    numbers = {"probability", "probability_2", "p(cat)", "p(dog)"}
    with (tmp_path / "x.csv").open() as file:
        read = [{k: float(v) if k in numbers else v for k, v in row.items()} for row in csv.DictReader(file)]
    assert read == rows
    assert [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()] == rows
    assert pyarrow.parquet.read_table(tmp_path / "x.parquet").to_pylist() == rows
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(RecipeError, match=r"must end in \.csv, \.jsonl or \.parquet"):
        found.write(tmp_path / "x.txt")


def test_a_library_s_network_says_what_size_it_takes(picture):
    found = vitclinic.predict(create_model("resnet10t", num_classes=3), picture(0, (40, 30)), size=32)
    assert (found.files, found.classes, found.temperature) == (["image 0"], ("0", "1", "2"), 1)
    with pytest.raises(RecipeError, match="give `size`"):
        vitclinic.predict(torch.nn.Flatten(), picture())


def test_unreadable_images_are_told_and_counted(run, tmp_path, command):
    good = find_images([images_of(run)])[0]
    (tmp_path / "bad.png").write_text("not an image")
    (tmp_path / "cut.png").write_bytes(open(good, "rb").read()[:300])  # noqa: SIM115
    out = tmp_path / "x.csv"
    code, _, told = command("predict", run.path, good, tmp_path / "bad.png", tmp_path / "cut.png", "-o", out)
    assert code == 8
    assert "; 2 images skipped (" in told
    assert f"skipped {tmp_path}/bad.png: cannot identify image file" in told
    assert len(out.read_text().splitlines()) == 2
    out.unlink()
    code, _, told = command("predict", run.path, tmp_path / "bad.png", "-o", out)
    assert (code, out.exists()) == (3, False)
    assert "None of the 1 images can be read" in told


def test_a_pipe_is_not_waited_for_and_names_need_not_be_utf_8(run, tmp_path, command):
    folder = tmp_path / "photos"
    folder.mkdir()
    os.mkfifo(folder / "pipe.png")
    name = os.fsencode(folder) + b"/caf\xe9.png"
    shutil.copy(find_images([images_of(run)])[0], name)
    for suffix in ("csv", "jsonl", "parquet"):
        code, _, told = command("predict", run.path, folder, "-o", tmp_path / f"x.{suffix}")
        assert code == 8
        assert "pipe.png: " in told
        assert "not a regular file" in told
    wanted = f"{folder}/caf\\udce9.png"
    assert [row["file"] for row in csv.DictReader((tmp_path / "x.csv").open(encoding="utf-8"))] == [wanted]
    assert [json.loads(line)["file"] for line in (tmp_path / "x.jsonl").open(encoding="utf-8")] == [wanted]
    assert pyarrow.parquet.read_table(tmp_path / "x.parquet")["file"].to_pylist() == [wanted]


def test_a_size_that_a_run_cannot_take_is_refused(run, picture):
    with pytest.raises(RecipeError, match="takes images of 32 x 32 pixels and no others"):
        vitclinic.predict(run, picture(), size=48)
    assert len(vitclinic.predict(run, picture(), size=32)) == 1


@pytest.mark.parametrize("verb", [("predict", "RUN", "."), ("export", "RUN", "--to", "onnx"), ("examine", "RUN")])
def test_a_misspelt_run_is_told_from_those_beside_it(verb, run, command):
    wrong = run.path.with_name("rum")
    code, _, told = command(*(wrong if word == "RUN" else word for word in verb))
    assert code in (2, 4)
    assert f"Did you mean '{run.path}'?" in told


def test_standard_output_is_csv_or_json_and_nothing_else(run, command):
    good = find_images([images_of(run)])[0]
    code, printed, told = command("predict", run.path, good, "--top-k", 1)
    header, row = csv.reader(io.StringIO(printed))
    assert (code, header, row[0]) == (0, ["file", "class", "probability"], good)
    assert "1 prediction written (" in told
    code, printed, told = command("predict", run.path, good, "--json")
    assert (code, told) == (0, "")
    assert json.loads(printed)["predictions"][0]["file"] == good


def test_an_interruption_leaves_no_file(run, tmp_path, command, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Predictor, "_classify", interrupted)
    code, _, told = command("predict", run.path, images_of(run), "-o", tmp_path / "x.csv")
    assert (code, list(tmp_path.iterdir())) == (130, [])
    assert "interrupted; no table was written" in told


@pytest.mark.parametrize("word", ["~foo.png", f"{'x' * 300}.csv", f"{'x' * 300}.png"])
def test_a_name_that_cannot_be_looked_at_is_a_mistake_and_no_bug(word, run, command):
    code, _, error = command("predict", run.path, word)
    assert code == 3
    assert "bug in vitclinic" not in error


def test_a_table_among_the_images_of_a_classifier_is_skipped_as_what_is_no_image(run, command, tmp_path):
    good = find_images([images_of(run)])[0]
    (tmp_path / "labels.csv").write_text("file,label\na.png,cat\n")
    code, printed, error = command("predict", run.path, tmp_path / "labels.csv", good)
    assert code == 8
    assert good in printed
    assert "labels.csv" in error
    assert "questions" not in error


def test_folders_on_standard_input_and_in_patterns_are_opened(run):
    folder = images_of(run)
    files = find_images([folder])
    assert find_images(["-"], io.StringIO(f"{folder}\n")) == files
    assert find_images([f"{folder}/*"]) == files


def test_the_words_of_the_command(run, command, tmp_path, monkeypatch):
    good, out = find_images([images_of(run)])[0], tmp_path / "new.csv"
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{good}\n{tmp_path / 'nope.png'}\n"))
    code, _, error = command("predict", run.path, "-", "-o", out)
    assert code == 8
    assert re.search(r"nope\.png: no such file\n", error)
    assert "1 prediction written to " in error
    assert "; 1 image skipped (" in error
    code, _, error = command("predict", run.path, good, "-o", tmp_path / "nodir" / "new.csv")
    assert code == 2
    assert f"folder '{tmp_path / 'nodir'}' does not exist" in error


def test_the_rate_is_that_of_the_predictions_without_the_calibration(run, command, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy, ignore=shutil.ignore_patterns("calibration.json"))
    clock = [0.0]
    fit = sys.modules["vitclinic.deployment.calibration"]._fit

    def slowly(*arguments):
        clock[0] += 1e6
        return fit(*arguments)

    monkeypatch.setattr(sys.modules["vitclinic.deployment.calibration"], "_fit", slowly)
    real = time.monotonic
    monkeypatch.setattr("vitclinic.cli.predict.time", SimpleNamespace(monotonic=lambda: real() + clock[0]))
    out = tmp_path / "new.csv"
    code, _, error = command("predict", copy, images_of(run), "-o", out, "--workers", "0")
    assert code == 0
    assert clock[0]
    rate = re.search(r"16 predictions written to .*new\.csv \(.*, (\d+) images/s\)", error.replace("\n", ""))
    assert int(rate[1]) > 0


def test_images_that_nothing_decodes_are_told_and_counted(run, tmp_path, command):
    folder = tmp_path / "new"
    shutil.copytree(images_of(run) / "cat", folder)
    for name in ("a.heic", "b.AVIF", "c.jp2", ".hidden.heic", "notes.txt"):
        (folder / name).write_bytes(b"x")
    code, out, err = command("predict", run.path, folder)
    assert code == 8
    assert out.count("\n") == 1 + len(list((images_of(run) / "cat").iterdir()))
    for name in ("a.heic", "b.AVIF", "c.jp2"):
        assert name in err


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"image": "a.png"}', b"\xff\xfe", b"[1]"])
def test_a_damaged_table_of_questions_is_a_sentence(content, tmp_path):
    (tmp_path / "q.jsonl").write_bytes(content)
    with pytest.raises(DataError):
        find_inputs([tmp_path / "q.jsonl"], True)
