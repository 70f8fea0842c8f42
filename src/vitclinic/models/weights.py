"""Files of weights as people have them.

Files are safetensors, or torch's own: a state dict, or a training checkpoint (of timm, torchvision, Lightning or one's
own loop) with a state dict in it. Only tensors and plain values are unpickled.
"""

from __future__ import annotations

import argparse
import logging
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from vitclinic._core.errors import ModelError, RecipeError, first_line
from vitclinic._core.io import expand_path, find_path, read_json

log = logging.getLogger(__name__)

State = dict[str, Tensor]
_PREFERRED = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Names of state dicts in training checkpoints, the first that is there being taken."""
_SETTINGS = ("num_classes", "in_chans", "img_size", "mean", "std")
"""Options of timm's training script that say how the network was built and its images normalized."""


@dataclass(frozen=True)
class Weights:
    """The weights in a file, and what it says about their network."""

    file: Path
    state: State
    arch: str | None = None
    """Name of the architecture, as timm and torchvision note it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Keywords of the network, as timm notes them."""


def split_key(text: str) -> tuple[Path, str | None]:
    """Return the file and the key of the weights in it that `FILE[#KEY]` names.

    Example:
        >>> split_key("last.pth.tar#state_dict")[1]
        'state_dict'
    """
    whole = find_path(text, RecipeError, "weights")
    file, sharp, key = text.rpartition("#")
    if not sharp or whole is not None:  # a file's own name may hold a #
        return whole or expand_path(text, RecipeError), None
    return expand_path(file, RecipeError), key


def read_weights(file: Path, key: str | None = None) -> Weights:
    """Read a file of weights.

    Args:
        file: A safetensors or torch file.
        key: Which of several state dicts in it; the averaged one by default, with a message.

    Raises:
        ModelError: If the file is missing, is something else, or has no such state dict.
    """
    content = _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file)
    if not isinstance(content, Mapping):
        raise ModelError(f"'{file}' holds a {type(content).__name__}, not named tensors.")
    state = {name: value for name, value in _choose(content, key, file).items() if isinstance(value, Tensor)}
    noted = content.get("args")
    args = vars(noted) if isinstance(noted, argparse.Namespace) else {}
    arch = next((each for each in (content.get("arch"), args.get("model")) if isinstance(each, str)), None)
    return Weights(file, state, arch, {name: args[name] for name in _SETTINGS if args.get(name) is not None})


def _read_safetensors(file: Path) -> State:
    _check_file(file)
    try:
        state: State = load_file(file)
        return state
    except (SafetensorError, OSError) as error:
        raise ModelError(f"'{file}' cannot be read as a safetensors file: {first_line(error)}.") from error


def _read_torch(file: Path) -> Any:
    _check_file(file)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, "cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its text advises to run whatever the file says
        if found := _find_objects(file, error):
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise ModelError(
                f"'{file}' holds Python objects ({found[0]}{more}), and tensors only are read, since others may run"
                " code. Save its state dict alone: torch.save(network.state_dict(), FILE)."
            ) from error
        raise ModelError(f"'{file}' is not a torch checkpoint, or is damaged.") from error
    except Exception as error:  # damaged files raise anything
        reason = first_line(error)
        why = "" if "weights_only" in reason else f": {reason}"  # as above
        raise ModelError(f"'{file}' is not a torch checkpoint, or is damaged{why}.") from error


def _check_file(file: Path) -> None:
    if not file.is_file():
        raise missing(file)
    try:
        with file.open("rb") as stream:
            start = stream.read(64)
    except OSError as error:
        raise ModelError(f"'{file}' cannot be read: {error.strerror}.") from error
    if not start:
        raise ModelError(f"'{file}' is empty.")
    if start.isascii() and start.decode().replace("\n", " ").replace("\r", " ").replace("\t", " ").isprintable():
        line = start.decode().splitlines()[0]
        raise ModelError(f"'{file}' is a text file, not weights; it begins with '{line}'.")


def _find_objects(file: Path, error: Exception) -> list[str]:
    """Return the names of the classes and functions that a file would call."""
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except (ValueError, RuntimeError, pickle.UnpicklingError):  # torch's old format
        found = re.findall(r"GLOBAL (\S+)", str(error))[:1]
    return sorted(set(found) - {"argparse.Namespace"})


def missing(file: Path) -> ModelError:
    """Return the error for a file that does not exist."""
    return ModelError(f"There is no file '{file}'.")


def _choose(content: Mapping[Any, Any], key: str | None, file: Path) -> Mapping[str, Any]:
    """Return the state dict in a checkpoint, or the checkpoint itself; `key` names it, or a prefix of its tensors."""
    states = _find_states(content)
    if key in states:
        return states[key]
    if not states:
        chosen, state = None, content
    else:
        last = {name.rpartition(".")[2]: name for name in states}
        known = [last[name] for name in _PREFERRED if name in last] or (list(states) if len(states) == 1 else [])
        if not known:
            raise ModelError(
                f"'{file}' has several state dicts ({', '.join(states)}); write FILE#{next(iter(states))}."
            )
        chosen, state = known[0], states[known[0]]
    if key is not None:
        under = {name: value for name, value in state.items() if name.startswith(f"{key}.")}
        if not under:
            raise ModelError(f"'{file}' has no weights '{key}'; it has {', '.join(states) or 'one state dict'}.")
        return under
    if len(states) > 1:
        others = " or ".join(f"{file.name}#{name}" for name in states if name != chosen)
        log.warning("'%s' has several weights; '%s' are taken. For the others, write %s.", file, chosen, others)
    return state


def _find_states(content: Mapping[Any, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the state dicts in a checkpoint, or in what it holds; none if it is a state dict itself.

    A few tensors beside them (the best accuracy, the state of a random generator) do not make it one.
    """
    found = {str(name): value for name, value in content.items() if _count_tensors(value)}
    if not found and not _count_tensors(content):
        inner = {name: value for name, value in content.items() if isinstance(value, Mapping) and name != "optimizer"}
        return {f"{name}.{key}": state for name, value in inner.items() for key, state in _states_in(value).items()}
    whole = max(map(_count_tensors, found.values()), default=0)
    return {} if _count_tensors(content) > whole else _without_single(found)


def _states_in(content: Mapping[Any, Any]) -> dict[str, Mapping[str, Any]]:
    return _without_single(
        {name: each for name, each in content.items() if isinstance(name, str) and _count_tensors(each)}
    )


def _without_single(states: dict[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the state dicts, without those of a single tensor (a counter, a decay) where there are larger ones."""
    several = {name: state for name, state in states.items() if _count_tensors(state) > 1}
    return several or states


def _count_tensors(value: Any) -> int:
    return sum(isinstance(each, Tensor) for each in value.values()) if isinstance(value, Mapping) else 0


def metadata(file: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file; empty for any other file."""
    if file.suffix != ".safetensors" or not file.is_file():
        return {}
    _check_file(file)
    try:
        with safe_open(file, framework="pt") as stored:
            return dict(stored.metadata() or {})
    except SafetensorError as error:
        raise ModelError(f"'{file}' cannot be read as a safetensors file: {first_line(error)}.") from error


def json_object(text: str, file: Path | None) -> dict[str, Any]:
    """Return keywords from the metadata of `file`."""
    try:
        value = read_json(text)
    except ValueError as error:
        raise ModelError(f"The metadata of '{file}' has keywords that are not JSON: {error}.") from error
    return value if isinstance(value, dict) else {}


def number_list(text: str, file: Path | None) -> list[float]:
    """Return numbers with commas between them, from the metadata of `file`."""
    try:
        return [float(value) for value in text.split(",")]
    except ValueError as error:
        raise ModelError(f"The metadata of '{file}' has a mean or std that is not numbers: {error}.") from error
