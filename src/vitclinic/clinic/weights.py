"""Files of weights: safetensors with their metadata, and torch checkpoints. Only tensors are unpickled."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from vitclinic.errors import ModelError

_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")
_WRAPPED = ("_orig_mod.", "module.")


def metadata(file: Path) -> dict[str, str]:
    """What a safetensors file says of itself; nothing for any other file."""
    if file.suffix != ".safetensors" or not file.is_file():
        return {}
    try:
        with safe_open(file, framework="pt") as stored:
            return dict(stored.metadata() or {})
    except SafetensorError as error:
        raise ModelError(f"'{file}' cannot be read: {error}.") from error


def json_object(text: str, file: Path | None) -> dict[str, Any]:
    """Keywords from the metadata of `file`."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelError(f"The metadata of '{file}' has keywords that are not JSON: {error}.") from error
    return value if isinstance(value, dict) else {}


def number_list(text: str, file: Path | None) -> list[float]:
    """Numbers with commas between them, from the metadata of `file`."""
    try:
        return [float(value) for value in text.split(",")]
    except ValueError as error:
        raise ModelError(f"The metadata of '{file}' has a mean or std that is not numbers: {error}.") from error


def fill(network: nn.Module, file: Path, note: str = "") -> None:
    """Put a file's weights into the network; what does not fit is a sentence that names the first tensor."""
    state, wanted = _read_state(file), network.state_dict()
    problems = [f"it lacks {key}" for key in wanted if key not in state]
    problems += [f"it has {key}, which the network does not" for key in state if key not in wanted]
    problems += [
        f"{key} is {list(state[key].shape)} in the file and {list(wanted[key].shape)} in the network"
        for key in wanted
        if key in state and state[key].shape != wanted[key].shape
    ]
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        hint = f" The file's note: '{note}'." if note else ""
        raise ModelError(
            f"The weights in '{file}' do not fit: {problems[0]}{more}.{hint} Keywords go before the file, as in"
            " timm:NAME?num_classes=10@FILE; for a network that was changed by hand, write module:function."
        )
    network.load_state_dict(state)


def _read_state(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file or of a torch checkpoint (tensors only: nothing else is unpickled)."""
    if not file.is_file():
        raise missing(file)
    try:
        content = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise ModelError(f"'{file}' cannot be read as a file of tensors only: {str(error).splitlines()[0]}") from error
    if not isinstance(content, Mapping):
        raise ModelError(f"'{file}' holds {type(content).__name__}, not named tensors.")
    state = next((content[key] for key in _NESTED if isinstance(content.get(key), Mapping)), content)
    return {_unwrapped(key): value for key, value in state.items() if isinstance(value, Tensor)}


def missing(file: Path) -> ModelError:
    """The error for a file that is not there."""
    return ModelError(f"There is no file '{file}'.")


def _unwrapped(key: str) -> str:
    for prefix in _WRAPPED:
        key = key.removeprefix(prefix)
    return key
