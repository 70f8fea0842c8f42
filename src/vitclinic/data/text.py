"""Words of questions as numbers: the vocabulary, built from training questions or read from a file, and its tokenizer.

A question becomes [CLS] word ... word [SEP], filled up with [PAD] to one length for all. A vocabulary of one's own has
whole words; a file's, such as BERT's `vocab.txt`, has pieces, of which `##` marks those that go on with a word.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vitclinic._core.errors import DataError
from vitclinic._core.io import find_path, read_text

PAD, UNKNOWN, START, END = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
MOST_TOKENS = 40
"""Tokens of a question at most, as in ViLT; what is behind them is not read."""
_LONGEST_WORD = 100
"""Letters of a word at most, as in BERT's tokenizer; longer ones are unknown."""


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case without accents; every punctuation mark is a word.

    Example:
        >>> split_words("What's the café's colour?")
        ['what', "'", 's', 'the', 'cafe', "'", 's', 'colour', '?']
    """
    plain = unicodedata.normalize("NFD", text.lower())
    plain = "".join(letter for letter in plain if unicodedata.category(letter) != "Mn")
    return re.findall(r"[^\W_]+|[^\w\s]|_", plain)


_NUMERALS = ("none zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {word: str(number) for number, words in enumerate(_NUMERALS) for word in words.split()}
_ARTICLES = ("a", "an", "the")


def normalize_answer(text: str) -> str:
    """Return an answer as VQA compares them: lower case, without articles and marks at its ends, numerals as digits.

    Example:
        >>> normalize_answer("The red one."), normalize_answer("Two")
        ('red 1', '2')
    """
    words = (word.strip(".,;:!?\"'()") for word in text.lower().split())
    return " ".join(_DIGITS.get(word, word) for word in words if word and word not in _ARTICLES) or text.lower().strip()


@dataclass(frozen=True)
class TextSpec:
    """Facts that a network needs to read questions: the tokens by number, and how many a question has.

    Example:
        >>> spec = TextSpec.of_questions(["is there a star", "is there a circle"])
        >>> spec.length, spec.encode("is there a heart")
        (6, [2, 6, 8, 4, 1, 3])
        >>> spec.decode([2, 6, 8, 4, 7, 3])
        'is there a star'
    """

    tokens: tuple[str, ...]
    length: int
    """Tokens of a question, the first and the last mark included."""

    @staticmethod
    def of_questions(questions: Iterable[str]) -> TextSpec:
        """Return the vocabulary of all words of these questions, in alphabetical order."""
        found = [split_words(question) for question in questions]
        words = sorted({word for question in found for word in question})
        return TextSpec((*SPECIAL, *words), _fit_length(map(len, found)))

    @staticmethod
    def read(path: str, questions: Iterable[str]) -> TextSpec:
        """Return the vocabulary of a file with one token a line, such as BERT's vocab.txt.

        Raises:
            DataError: There is no such file, or it is no vocabulary.
        """
        found = find_path(path, DataError, "data.vocabulary")
        if found is None or not found.is_file():
            raise DataError(f"data.vocabulary: there is no file '{path}'; give one with a token a line.")
        tokens = _read_lines(found)
        if missing := [token for token in SPECIAL if token not in tokens]:
            raise DataError(f"data.vocabulary: '{path}' has no line {missing[0]}; give one with a token a line.")
        spec = TextSpec(tokens, MOST_TOKENS)
        return TextSpec(tokens, _fit_length(len(spec.tokenize(question)) for question in questions))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    @cached_property
    def _has_pieces(self) -> bool:
        return any(token.startswith("##") and len(token) > 2 for token in self.tokens)

    @property
    def padding(self) -> int:
        """The number of the token that fills questions up."""
        return self._numbers[PAD]

    def tokenize(self, question: str) -> list[str]:
        """Return the tokens of a question without marks; words that are not known are [UNK]."""
        words = split_words(question)
        if not self._has_pieces:
            return [word if word in self._numbers else UNKNOWN for word in words]
        return [piece for word in words for piece in self._cut(word)]

    def encode(self, question: str) -> list[int]:
        """Return the numbers of a question's tokens, `length` of them; of a longer one, those at the beginning."""
        tokens = [START, *self.tokenize(question)[: self.length - 2], END]
        tokens += [PAD] * (self.length - len(tokens))
        return [self._numbers[token] for token in tokens]

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the words of a question from the numbers of its tokens."""
        tokens = (self.tokens[number] for number in numbers)
        return " ".join(token for token in tokens if token not in (PAD, START, END)).replace(" ##", "")

    def is_cut(self, question: str) -> bool:
        """Return True if a question has more tokens than are read."""
        return len(self.tokenize(question)) > self.length - 2

    def _cut(self, word: str) -> list[str]:
        """Return the longest pieces from the left, or [UNK] if some part of the word is no piece."""
        pieces: list[str] = []
        start = 0
        while start < len(word) <= _LONGEST_WORD:
            ends = range(len(word), start, -1)
            found = (f"{'##' if start else ''}{word[start:end]}" for end in ends)
            piece = next((part for part in found if part in self._numbers), None)
            if piece is None:
                return [UNKNOWN]
            pieces.append(piece)
            start += len(piece) - (2 if start else 0)
        return pieces or [UNKNOWN]


def _fit_length(counts: Iterable[int]) -> int:
    return min(MOST_TOKENS, max(counts, default=0) + 2)


def _read_lines(path: Path) -> tuple[str, ...]:
    lines = read_text(path, DataError).splitlines()
    if repeated := [line for line, count in Counter(lines).items() if count > 1]:
        raise DataError(f"data.vocabulary: '{path}' has the line '{repeated[0]}' more than once.")
    return tuple(lines)
