"""How a target is written: a run directory, a library's network or a function of one's own. Read without torch."""

from __future__ import annotations

from pathlib import Path

from vitclinic._core.errors import RecipeError, did_you_mean
from vitclinic._core.sources import read_model_names

LIBRARIES = ("timm", "torchvision", "hf")


def find_run(text: str) -> tuple[Path, str] | None:
    """Return the run directory and the checkpoint that `DIRECTORY[@CHECKPOINT]` names, if there is such a run."""
    before, _, after = text.rpartition("@")
    for folder, checkpoint in ((text, ""), (before, after)):  # a folder's own name may hold an @
        path = Path(folder).expanduser()
        if folder and (path / "recipe.yaml").is_file():
            return path, checkpoint
    return None


def check_target(text: str) -> None:
    """Raise a RecipeError, with advice, where a text cannot be a target."""
    library, colon, rest = text.partition(":")
    if find_run(text) is None and library not in LIBRARIES and not (colon and library and rest):
        raise RecipeError(f"'{text}' is not a target: {advise(text)}")


def check_stored(text: str) -> None:
    """Raise a RecipeError where a text names neither a run nor a folder with measurements."""
    if find_run(text) is None and not any(Path(text).expanduser().glob("*.json")):
        raise nothing_stored(text)


def nothing_stored(text: str) -> RecipeError:
    """Return the error for a text that names neither a run nor a folder with measurements."""
    return RecipeError(
        f"'{text}' is neither a run directory nor a folder with measurements; write RUN, RUN@CHECKPOINT or, of"
        " another network that was examined, exams/NAME-DIGEST."
    )


def advise(text: str) -> str:
    """Return what to write instead of a text that is no target."""
    if text.partition(".")[0] in read_model_names():
        return f"write timm:{text}."
    if Path(text).suffix == ".py":
        return f"write {Path(text).stem}:FUNCTION, a function in it that returns a network."
    if Path(text).exists():
        return "it has no recipe.yaml, so it is no run directory; for a file of weights write timm:NAME@FILE."
    prefix, colon, rest = text.partition(":")
    close = did_you_mean(prefix, LIBRARIES).replace("'?", f":{rest}'?") if colon else ""
    return f"write a run directory, timm:NAME[@FILE], torchvision:NAME[@FILE], hf:NAME or module:function.{close}"
