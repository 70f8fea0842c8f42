"""The error classes.

Every error that a user can cause is a `VitclinicError` whose text is one sentence: what is wrong, where, and
what to do. The command line prints that sentence and exits with the class's `exit_code`; any other exception
is a bug in vitclinic and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VitclinicError(Exception):
    """Base of all errors that vitclinic raises deliberately."""

    exit_code = 1


class RecipeError(VitclinicError):
    """Invalid recipe, option or argument."""

    exit_code = 2


class ModelError(RecipeError):
    """Network that cannot be built, or that does not fit the data."""


class MissingWeightsError(ModelError):
    """Published weights that are not here and cannot be fetched."""


class AnatomyError(ModelError):
    """Network whose structure is unknown, or not what its family describes."""


class UnknownStructureError(AnatomyError):
    """Network for which no family is registered."""


class NoAttentionMapError(AnatomyError):
    """Unit without an attention map, because its attention is not one softmax over tokens."""


class TreatmentError(ModelError):
    """Treatment that does not fit a network or another treatment, or that was already applied."""


class MissingExtraError(RecipeError):
    """Missing optional dependency."""

    def __init__(self, purpose: str, extra: str) -> None:
        super().__init__(f"{purpose} needs an extra: pip install 'vitclinic[{extra}]'.")


class DataError(VitclinicError):
    """Data that cannot be found or read, or that is inconsistent."""

    exit_code = 3


class EmptySplitError(DataError):
    """Split of the data without images."""

    def __init__(self, sentence: str, split: str) -> None:
        super().__init__(sentence)
        self.split = split


class RunError(VitclinicError):
    """Run directory that cannot be used: locked, not writable, full, damaged or not a run."""

    exit_code = 4


class DamagedFileError(RunError):
    """File of ours whose content is not what was written: a broken disk, a cut-off copy, an edit by hand."""


class LostProcessError(RunError):
    """Process of a group that is gone, so that the others cannot go on."""


class LockedError(RunError):
    """Run directory that another process is using; a caller may wait and try again."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?`, or the empty string if no known word is close to `word`."""
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)
    return f" Did you mean '{lower[close[0]]}'?" if close else ""


def shorten(value: object, most: int = 200) -> str:
    """Return what a user gave on one line, for an error message: as Python writes it, cut where it is too long to read.

    Example:
        >>> shorten(list(range(100)), most=12)
        '[0, 1, 2, 3, ...'
    """
    text = repr(value)
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= most else f"{text[:most].rstrip()} ..."


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error without its full stop, for a sentence of ours; of one without text, its type.

    Example:
        >>> first_line(ValueError("Expected 3 channels.\\nGot 4."))
        'Expected 3 channels'
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
