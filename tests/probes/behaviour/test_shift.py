"""Accuracy on other classes than the network's own: subsets, several for one, several right for one image."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn

from tests.probes.behaviour.trained import cnn, digits, subject, trained
from vitclinic._core.errors import DataError
from vitclinic.data import open_data
from vitclinic.probes import Subject, measure, parse_probes
from vitclinic.probes.behaviour.shift import Outputs, class_map, read_map

NAMES = ("cat", "dog", "wolf", "car")
OUTPUTS = Outputs(4, NAMES)


@pytest.mark.parametrize(
    ("given", "classes", "right"),
    [
        (None, ("car", "cat"), [[3], [0]]),  # a subset, by name
        (None, NAMES, [[0], [1], [2], [3]]),
        ({"canine": ["dog", "wolf"], "feline": 0}, ("canine", "feline"), [[1, 2], [0]]),  # several for one
        ({"poodle": "dog", "spitz": "dog"}, ("poodle", "spitz"), [[1], [1]]),  # one for several
        ({"poodle": "dog", "moon": None}, ("moon", "poodle"), [[], [1]]),
        ({1: "dog", 0: [3]}, ("a", "b"), [[3], [1]]),  # labels by number
        ({"1": "dog", "0": [3]}, ("a", "b"), [[3], [1]]),  # as JSON has numbers
        ({"1": "dog", "0": [3]}, ("1", "0"), [[1], [3]]),  # unless they are names
        ([["dog", 2], None], ("a", "b"), [[1, 2], []]),
    ],
)
def test_maps(given, classes, right):
    valid = class_map(given, classes, OUTPUTS)
    assert [np.flatnonzero(row).tolist() for row in valid] == right


@pytest.mark.parametrize(
    ("given", "classes", "names", "message"),
    [
        (None, ("cat", "moon", "sun"), NAMES, "The network has no classes 'moon', 'sun'; map them to outputs"),
        (
            {"a": "dog"},
            ("a", "b"),
            NAMES,
            "The class map lacks class 'b'. Map a class to null to leave it out.",
        ),
        ({"a": "dgo"}, ("a",), NAMES, "'a': the network has no class 'dgo'. Did you mean 'dog'?"),
        ({"a": "dog"}, ("a",), None, "the class names of the network are not known. Write a number for 'dog'"),
        ({"a": 4}, ("a",), NAMES, "there is no output 4; the network has 4 outputs, from 0"),
        ({"a": -1}, ("a",), NAMES, "there is no output -1"),
        ({"a": 1.5}, ("a",), NAMES, "expected the name or number of an output"),
        ({"a": True}, ("a",), NAMES, "expected the name or number of an output"),
        ({"aa": 1, "b": 1}, ("aaa", "b"), NAMES, "the data has no class 'aa'. Did you mean 'aaa'?"),
        ({2: 1}, ("a", "b"), NAMES, "the data has no class 2; it has 2 classes, from 0"),
        ({"a": 1, 0: 1}, ("a",), NAMES, "The class map has 'a' twice"),
        ({"a": 1, "0": 1}, ("a",), NAMES, "The class map has 'a' twice"),
        ({True: 1, 0: 1}, ("a", "b"), NAMES, "expected the name or number of a class (got True). Put names in quotes."),
        ({None: 1}, ("None",), NAMES, "expected the name or number of a class (got None)"),
        ("dog", ("a", "b", "c"), NAMES, "must be a list, or a mapping of classes to outputs (got str)"),
        (3, ("a", "b", "c"), NAMES, "must be a list, or a mapping of classes to outputs (got int)"),
        ([1], ("a", "b"), NAMES, "The class map has 1 entries, but the data has 2 classes"),
        ({"a": "crane"}, ("a",), ("crane", "crane", "x", "y"), "several classes 'crane'. Write the number"),
    ],
)
def test_wrong_and_missing_classes_are_sentences(given, classes, names, message):
    with pytest.raises(DataError) as caught:
        class_map(given, classes, Outputs(4, names))
    assert message in str(caught.value)
    assert str(caught.value).endswith((".", "?"))


def shifted(patient, **options):
    (found,) = measure(patient, parse_probes([{"shift": options}]))
    return found


def logits_of(network, dataset, split):
    images = torch.from_numpy(dataset.splits[split].read(np.arange(len(dataset.splits[split])))).permute(0, 3, 1, 2)
    with torch.no_grad():
        return network(images.float() / 255).numpy()


def test_on_its_own_data_it_is_the_accuracy():
    found = shifted(subject(cnn))
    (plain,) = measure(subject(cnn), parse_probes(["accuracy"]))
    assert found.scalars["accuracy"] == found.scalars["accuracy_among_mapped"] == plain.scalars["accuracy"]
    assert found.scalars["images_left_out"].value == 0


@pytest.fixture
def folder(tmp_path):
    """Digits as another set: dim images in four folders, of which one is of no digit's class."""
    split = digits().test
    kinds = {0: "round", 1: "straight", 6: "round", 7: "straight", 8: "eight", 9: "odd"}
    for number, label in enumerate(split.labels):
        if label in kinds:
            (tmp_path / kinds[label]).mkdir(exist_ok=True)
            pixels = split.read(np.array([number]))[0, :, :, 0] // 2
            Image.fromarray(pixels).save(tmp_path / kinds[label] / f"{number:04}.png")
    return tmp_path


MAP = {"round": ["0", 6], "straight": [1, "7"], "eight": "8", "odd": None}


@pytest.mark.parametrize("kind", ["python", "json", "yaml"])
@pytest.mark.parametrize("batch_size", [9, 64])
def test_another_set_by_a_map(folder, tmp_path_factory, kind, batch_size):
    given = MAP
    if kind != "python":
        path = tmp_path_factory.mktemp("map") / f"map.{kind}"
        path.write_text(json.dumps(MAP))  # which is YAML, too
        given = str(path)
    patient = subject(cnn, batch_size=batch_size)
    found = shifted(patient, data=str(folder), classes=given)
    assert found.status == "ok", found.reason
    other = open_data(str(folder), size=8, channels=1)
    assert other.classes == ("eight", "odd", "round", "straight")
    valid, mapped = {0: [8], 2: [0, 6], 3: [1, 7]}, [0, 1, 6, 7, 8]
    right = among = total = 0
    for split in ("train", "val", "test"):  # a folder that is not divided is measured whole
        logits = logits_of(patient.network, other, split)
        for label, row in zip(other.splits[split].labels, logits, strict=True):
            if label in valid:
                total += 1
                right += row.argmax() in valid[label]
                among += mapped[row[mapped].argmax()] in valid[label]
    assert 0 < right < among <= total
    assert (found.scalars["accuracy"].value, found.scalars["accuracy"].n) == (right / total, total)
    assert found.scalars["accuracy_among_mapped"].value == among / total
    assert found.scalars["images_left_out"].value == sum(len(s) for s in other.splits.values()) - total
    assert found.provenance.images == total + found.scalars["images_left_out"].value
    assert ("classes" in found.conditions) == (kind != "python")


def test_several_right_outputs_for_one_image(tmp_path):
    """As in ReaL: of each image the outputs that are right, none for an image that is left out."""
    patient = subject(cnn)
    store = patient.images.images
    path = tmp_path / "real.json"
    random = np.random.default_rng(0)
    each = [sorted(set(random.integers(0, 9, random.integers(0, 4)).tolist())) for _ in store.kept]
    path.write_text(json.dumps(each))
    found = shifted(patient, labels=str(path))
    assert found.status == "ok", found.reason
    logits = logits_of(patient.network, patient.dataset, "test")
    rights = [each[row] for row in patient.images.rows]
    correct = [bool(row.argmax() in right) for row, right in zip(logits, rights, strict=True)]
    among = [bool(row[:9].argmax() in right) for row, right in zip(logits, rights, strict=True)]  # no image is a 9
    counted = sum(bool(right) for right in rights)
    assert found.scalars["accuracy"].value == sum(correct) / counted
    assert found.scalars["accuracy_among_mapped"].value == sum(among) / counted
    assert found.scalars["images_left_out"].value == len(rights) - counted
    path.write_text(json.dumps(each[:-1]))
    assert "one entry for each of the 1797 images (got 1796" in shifted(patient, labels=str(path)).reason
    path.write_text("{")
    assert "Cannot read" in shifted(patient, labels=str(path)).reason
    path.write_text(json.dumps([[] for _ in each]))
    assert shifted(patient, labels=str(path)).reason == "The labels leave out all images."
    assert "not both" in shifted(patient, labels=str(path), classes={"0": 1}).reason


@pytest.mark.parametrize(
    ("name", "text"), [("map.yaml", "a: 0\nb: 1\nb: 0\n"), ("map.json", '{"a": 0, "b": 1, "b": 0}')]
)
def test_a_class_that_is_there_twice_is_an_error(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match="duplicate key 'b'"):
        read_map(str(tmp_path / name))


def test_what_is_wrong_is_said(folder):
    patient = subject(cnn)
    found = shifted(patient, data=str(folder))
    assert found.status == "failed"
    assert "The network has no classes 'eight', 'odd', 'round' and 1 more" in found.reason
    assert "There is no data at" in shifted(patient, data=str(folder / "nowhere")).reason
    nothing = shifted(patient, data=str(folder), classes=dict.fromkeys(MAP))
    assert nothing.reason == "The class map leaves out all images."
    assert "cannot be read" in shifted(patient, classes=str(folder / "map.json")).reason


def test_a_network_of_other_classes_is_no_failure_unless_something_was_asked_for():
    names = tuple(f"digit {number}" for number in range(10))
    patient = subject(cnn, output_names=names)
    found = shifted(patient)
    assert found.status == "does_not_apply"
    assert found.reason.startswith("the network has no classes '0', '1', '2' and 7 more; map them to outputs")
    assert shifted(patient, data="digits").status == "failed"
    assert shifted(patient, classes={"0": "digit 0"}).status == "failed"
    assert shifted(patient, classes=list(names)).status == "ok"


@pytest.mark.parametrize("text", ["0: '0'\none: 1\n", '{"0": "0", "one": 1}'])
def test_a_file_may_mix_names_and_numbers(tmp_path, text):
    path = tmp_path / "map.yaml"
    path.write_text(text)
    dataset = replace(digits(), classes=("zero", "one", *"23456789"))
    classes = {**read_map(str(path)), **{str(number): number for number in range(2, 10)}}
    path.write_text(yaml.safe_dump(classes, sort_keys=False))
    found = shifted(Subject(trained(cnn), dataset, output_names=digits().classes), classes=str(path))
    assert found.status == "ok", found.reason
    assert found.scalars["accuracy"] == shifted(subject(cnn)).scalars["accuracy"]


def test_an_empty_file_is_no_map(tmp_path):
    (tmp_path / "map.yaml").write_text("# to be written\n")
    for option in ("classes", "labels"):
        found = shifted(subject(cnn), **{option: str(tmp_path / "map.yaml")})
        assert (found.status, found.reason) == ("failed", f"'{tmp_path / 'map.yaml'}' is empty.")


def test_the_classes_of_the_exam_are_what_a_network_without_names_means(tmp_path):
    patient = subject(cnn)
    assert patient.output_names is None
    found = shifted(patient, classes={name: [name] for name in digits().classes})
    assert found.status == "ok", found.reason
    assert found.scalars["accuracy"] == shifted(patient).scalars["accuracy"]


def test_the_other_set_is_opened_once_and_limited(folder):
    patient = subject(cnn)
    view = patient.on_source(str(folder), 30)
    assert patient.on_source(str(folder), 30) is view
    assert len(view) == 30
    assert (view.dataset.size, view.dataset.channels) == ((8, 8), 1)
    assert view.output_names == digits().classes
    assert len(patient.on_source(str(folder))) == sum(len(split) for split in open_data(str(folder)).splits.values())


def test_a_source_with_a_test_split_is_measured_on_that():
    shapes = open_data("shapes:50")
    assert len(shapes.unseen) == 1000
    assert len(digits().unseen) == 1797
    assert (np.sort(digits().unseen.rows) == np.arange(1797)).all()
    at = np.flatnonzero(digits().unseen.rows == digits().test.rows[3])
    assert digits().unseen.labels[at] == digits().test.labels[3]


def test_a_network_without_names_is_told_numbers():
    class Two(nn.Module):
        def forward(self, x):
            logits = trained(cnn)(x)
            return torch.stack([logits[:, :5].amax(1), logits[:, 5:].amax(1)], 1)

    patient = Subject(Two(), digits())
    found = shifted(patient)
    assert found.status == "does_not_apply"
    assert found.reason.startswith("the network has 2 outputs without names, and the data 10 classes; map classes")
    found = shifted(patient, data="digits")
    assert (found.status, found.reason[:41]) == ("does_not_apply", "the network has 2 outputs without names, ")
    found = shifted(patient, classes=[0] * 5 + [1] * 5)
    assert found.status == "ok", found.reason
    assert found.scalars["accuracy"].value > 0.9


@pytest.mark.parametrize("path", ["/dev/zero", "pipe.json", "~nobody-of-this-name", "a\0b"])
def test_a_map_that_is_no_file_is_told_at_once(path, tmp_path, monkeypatch, ends_soon):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.json")
    with pytest.raises(DataError):
        read_map(path)
