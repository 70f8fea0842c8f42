"""Questions as numbers: round trips, and pieces as BERT's tokenizer makes them."""

import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitclinic._core.errors import DataError
from vitclinic.data.text import SPECIAL, TextSpec, normalize_answer, split_words

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
WORDS = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=8)
QUESTIONS = st.lists(st.lists(WORDS, min_size=1, max_size=12).map(" ".join), min_size=1, max_size=6)


@PATIENT
@given(QUESTIONS)
def test_known_questions_come_back(questions):
    spec = TextSpec.of_questions(questions)
    for question in questions:
        numbers = spec.encode(question)
        assert len(numbers) == spec.length
        assert not spec.is_cut(question)
        assert spec.decode(numbers) == question
        assert numbers == spec.encode(question.upper() + " ")


@PATIENT
@given(QUESTIONS, st.text(max_size=80))
def test_any_text_becomes_numbers_of_the_vocabulary(questions, text):
    spec = TextSpec.of_questions(questions)
    numbers = spec.encode(text)
    assert len(numbers) == spec.length
    assert all(0 <= number < len(spec.tokens) for number in numbers)
    assert set(numbers[len(split_words(text)) + 2 :]) <= {spec.padding}


def test_unknown_words_and_long_questions():
    spec = TextSpec.of_questions(["is there a star"])
    assert spec.decode(spec.encode("is there a heart")) == "is there a [UNK]"
    assert spec.is_cut("is there a red star")
    assert spec.decode(spec.encode("is there a star there")) == "is there a star"


PIECES = [
    *SPECIAL,
    "what",
    "colour",
    "col",
    "##our",
    "##s",
    "is",
    "the",
    "star",
    "##fish",
    "?",
    "'",
    "un",
    "##aff",
    "##able",
]


@pytest.mark.parametrize(
    "text", ["What colours is the starfish?", "the unaffable star's", "UNAFFABLE xyz", "cólour ", ""]
)
def test_pieces_are_those_of_bert(text, tmp_path):
    transformers = pytest.importorskip("transformers")
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(PIECES) + "\n")
    theirs = transformers.BertTokenizer(str(file), do_lower_case=True)
    if len(theirs) != len(PIECES) + 1 and len(theirs) != len(PIECES):
        theirs = transformers.BertTokenizer(vocab=str(file), do_lower_case=True)
    spec = TextSpec.read(str(file), [text])
    assert spec.tokenize(text) == theirs.tokenize(text)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "there is no file"), ("a\nb\n", "has no line [PAD]"), ("[PAD]\nx\nx\n", "has the line 'x' more than once")],
)
def test_what_is_no_vocabulary_is_one_sentence(content, sentence, tmp_path):
    file = tmp_path / "vocab.txt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError) as error:
        TextSpec.read(str(file), [])
    assert sentence in str(error.value)
    assert str(error.value).count(".") <= 3


@PATIENT
@given(st.text(max_size=30))
def test_an_answer_is_normal_once(text):
    assert normalize_answer(normalize_answer(text)) == normalize_answer(text)
