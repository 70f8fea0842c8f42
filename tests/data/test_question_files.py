"""Questions in files: rows of one image are one image, and whatever is wrong with a row is one sentence."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from vitclinic._core.errors import DataError
from vitclinic.data import DataConfig, open_data
from vitclinic.data.described import describe_data

GOOD = {"image": "0.png", "question": "What colour is it?", "answer": "Red."}


@pytest.fixture
def folder(tmp_path):
    for number in range(6):
        Image.fromarray(np.full((8, 8, 3), 40 * number, np.uint8)).save(tmp_path / f"{number}.png")
    return tmp_path


def write(path, rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def opened(path, **options):
    return open_data(DataConfig(source=str(path), target="questions", held_out=0, **options))


def test_rows_of_one_image_are_one_image(folder):
    rows = [GOOD, {**GOOD, "image": "1.png"}, {**GOOD, "question": "is it round", "answers": ["yes", "yes", "no"]}, ""]
    dataset = opened(write(folder / "train.jsonl", rows))
    assert len(dataset.train) == 2
    assert dataset.classes == ("red", "yes", "no")
    first, second = dataset.train.annotate(np.arange(2))
    assert [(q.text, q.answers) for q in first.questions] == [
        ("What colour is it?", ("red",)),
        ("is it round", ("yes", "yes", "no")),
    ]
    assert len(second.questions) == 1
    assert dataset.text.decode(dataset.text.encode("is it round")) == "is it round"
    assert (
        describe_data(DataConfig(source=str(folder / "train.jsonl"), target="questions", held_out=0)).spec
        == dataset.spec
    )


def test_splits_are_named_by_their_files_and_answers_are_those_of_training(folder):
    write(folder / "train.jsonl", [GOOD] * 2 + [{**GOOD, "answer": "blue"}])
    write(folder / "test.jsonl", [{**GOOD, "image": "1.png", "answer": "teal"}])
    dataset = opened(folder)
    assert (len(dataset.train), len(dataset.test)) == (1, 1)
    assert dataset.classes == ("red", "blue")
    assert opened(folder, answers=2).classes == ("red", "blue")


def test_parquet_with_bytes_or_paths(folder):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files = []
    for number in (0, 1, 0):
        buffer = io.BytesIO()
        Image.fromarray(np.full((8, 8, 3), 90 * number, np.uint8)).save(buffer, "PNG")
        files.append({"bytes": buffer.getvalue(), "path": f"{number}.png"})
    answers = [[{"answer": "red"}] * 10, [{"answer": "2"}], [{"answer": "yes"}]]
    table = {"question": ["a b", "how many", "is it"], "answers": answers}
    pq.write_table(pa.table({"image": files, **table}), folder / "bytes.parquet")
    pq.write_table(pa.table({"image": ["0.png", "1.png", "0.png"], **table}), folder / "paths.parquet")
    for name in ("bytes", "paths"):
        dataset = opened(folder / f"{name}.parquet")
        assert len(dataset.train) == 2
        assert dataset.classes == ("red", "2", "yes")
        assert [len(found.questions) for found in dataset.train.annotate(np.arange(2))] == [2, 1]
        assert dataset.train.read(np.array([1]))[0].mean() == (90 if name == "bytes" else 40)


WRONG = {
    "no answer": ({"image": "0.png", "question": "is it"}, "line 2: the question 'is it' has no answer"),
    "empty answer": ({**GOOD, "answer": " "}, "has no answer"),
    "no answers": ({**GOOD, "answers": []}, "has no answer"),
    "answer of a number": ({**GOOD, "answer": 2}, "is 2, a int; expected a text"),
    "answers of a text": ({**GOOD, "answers": "red"}, "is a str; expected a list"),
    "no question": ({"image": "0.png", "answer": "red"}, "'question' is None; expected a text"),
    "no image": ({**GOOD, "image": None}, "'image' is None; expected an image path"),
    "missing image": ({**GOOD, "image": "9.png"}, "there is no image"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_row_is_one_sentence_or_is_noted(folder, case):
    row, sentence = WRONG[case]
    path = write(folder / "train.jsonl", [GOOD, row])
    with pytest.raises(DataError) as error:
        opened(path)
    assert sentence in str(error.value)
    assert "line 2" in str(error.value)
    assert "data.on_error=skip" in str(error.value)
    dataset = opened(path, on_error="skip")
    assert len(dataset.skipped) == 1
    assert sentence.removeprefix("line 2: ") in dataset.skipped[0]


def test_what_is_no_set_of_questions_is_one_sentence(folder):
    for content, sentence in [("nonsense", "line 1 is not JSON"), ("[1]", "line 1 is not a JSON object")]:
        with pytest.raises(DataError, match=sentence):
            opened(write(folder / "a.jsonl", [content]))
    (folder / "none").mkdir()
    with pytest.raises(DataError, match="has no questions"):
        opened(folder / "none")
    with pytest.raises(DataError, match="come with questions, not with class labels"):
        open_data(str(write(folder / "a.jsonl", [GOOD])))


def test_a_published_set_of_questions_is_known_without_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    described = describe_data(DataConfig(source="vqa2", target="questions", held_out=0))
    assert (len(described.train), len(described.val)) == (82_783, 40_504)
    assert (described.spec.num_classes, len(described.text.tokens), described.text.length) == (3129, 30_522, 40)
    with pytest.raises(DataError, match="VQA v2 does not come with vitclinic"):
        opened("vqa2")
