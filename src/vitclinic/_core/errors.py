"""The one tree of errors.

Every error a user can cause is a `VitclinicError` whose text is one sentence: what was wrong, where, and
what to do. The command line prints that sentence and exits with the class's `exit_code`; anything else that
escapes is a bug in vitclinic and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VitclinicError(Exception):
    """Base of all errors that vitclinic raises on purpose."""

    exit_code = 1


class RecipeError(VitclinicError):
    """A recipe, an option or an argument does not say something we can do."""

    exit_code = 2


class ModelError(RecipeError):
    """A network cannot be built, or does not fit the data."""


class AnatomyError(ModelError):
    """A network's structure is not known, or is not what its family promises."""


class UnknownStructureError(AnatomyError):
    """No family is known that says what a network's units are."""


class NoAttentionMapError(AnatomyError):
    """A unit's attention is not one softmax over tokens, so that there is no map of it."""


class TreatmentError(ModelError):
    """A treatment does not fit a network, or another treatment, or was applied before."""


class MissingExtraError(RecipeError):
    """An optional dependency is needed and not installed."""

    def __init__(self, purpose: str, extra: str) -> None:
        super().__init__(f"{purpose} needs an extra: pip install 'vitclinic[{extra}]'.")


class DataError(VitclinicError):
    """The data cannot be found or read, or contradicts itself."""

    exit_code = 3


class EmptySplitError(DataError):
    """A split of the data has no images."""

    def __init__(self, sentence: str, split: str) -> None:
        super().__init__(sentence)
        self.split = split


class RunError(VitclinicError):
    """A run directory cannot be used: locked, not writable, full, damaged or not a run."""

    exit_code = 4


class LockedError(RunError):
    """Another process is working in a run directory: whoever can wait may."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or the empty string when nothing known is close to `word`."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
