"""Images in the bytes of a parquet column, with questions; apart from `asked`, which does not need pyarrow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from PIL import Image

from vitclinic.data.annotations.annotation import Question
from vitclinic.data.parquet import TableRecords


class AskedRows(TableRecords):
    """Images in some rows of a table, with the questions of all rows that have the same image."""

    def __init__(
        self, source: str, images: pa.ChunkedArray, rows: Sequence[int], questions: Sequence[tuple[Question, ...]]
    ) -> None:
        super().__init__(source, images, np.zeros(len(rows), np.int64))
        self._rows, self._questions = rows, questions

    def name(self, index: int) -> str:
        return super().name(self._rows[index])

    def read(self, index: int) -> Image.Image:
        return super().read(self._rows[index])

    def contents(self) -> list[int]:
        lengths = super().contents()
        return [lengths[row] for row in self._rows]

    def questions(self, index: int) -> tuple[Question, ...]:
        """Return the questions about an image."""
        return self._questions[index]
