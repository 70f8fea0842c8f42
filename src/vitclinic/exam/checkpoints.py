"""Checkpoints as people have them: reading a file of weights, and putting it into a network.

Files are safetensors, or torch's own: a state dict, or a training checkpoint (of timm, torchvision, Lightning or one's
own loop) with a state dict in it. Only tensors and plain values are unpickled.
"""

from __future__ import annotations

import argparse
import json
import logging
import pickle
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from vitclinic._core.errors import ModelError

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
        raise ModelError(f"'{file}' cannot be read as a safetensors file: {_first_line(error)}.") from error


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
        raise ModelError(f"'{file}' is not a torch checkpoint, or is damaged: {_first_line(error)}.") from error


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
    states: dict[str, Mapping[str, Any]] = {name: value for name, value in content.items() if _is_state(value)}
    if key in states:
        return states[key]
    if _is_state(content) or not states:
        chosen, state = None, content
    else:
        known = [name for name in _PREFERRED if name in states] or (list(states) if len(states) == 1 else [])
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
        log.warning("'%s' has several weights; '%s' are examined. For the others, write %s.", file, chosen, others)
    return state


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(each, Tensor) for each in value.values())


def fill(network: nn.Module, weights: Weights, note: str = "") -> tuple[str, ...]:
    """Put weights into a network; what does not fit is a sentence that names the first tensor.

    Names may have a prefix; position embeddings of another image size are resampled. A classifier that the file does
    not have stays as it was drawn.

    Returns:
        The names of the classifier's parameters if the file does not have them.

    Raises:
        ModelError: If the weights do not fit.
    """
    wanted = network.state_dict()
    state = _resample(network, strip_prefix(weights.state, wanted, weights.file), weights.file)
    classifier = find_classifier(network)
    if not any(key.startswith(classifier) for key in wanted):  # an encoder has no use for a classifier
        state = {key: value for key, value in state.items() if not key.startswith(classifier)}
    lacking = [key for key in wanted if key not in state]
    surplus = [key for key in state if key not in wanted]
    drawn = tuple(key for key in lacking if key.startswith(classifier))
    problems = [f"it lacks {key}" for key in lacking if key not in drawn]
    problems += [f"it has {key}, which the network does not" for key in surplus]
    problems += [
        f"{key} is {list(state[key].shape)} in the file and {list(wanted[key].shape)} in the network"
        for key in wanted
        if key in state and state[key].shape != wanted[key].shape
    ]
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        hints = f" The file is of '{weights.arch}'." if weights.arch else ""
        hints += f" The file's note: '{note}'." if note else ""
        raise ModelError(
            f"The weights in '{weights.file}' do not fit: {problems[0]}{more}.{hints} Keywords go before the file, as"
            " in timm:NAME?num_classes=10@FILE; for a network that was changed by hand, write module:function."
        )
    network.load_state_dict(state, strict=False)
    return drawn


def strip_prefix(state: State, wanted: Iterable[str], file: Path) -> State:
    """Return the tensors under the prefix that most of the wanted names have in common, without it.

    Wrappers and training loops put their own names in front (`module.`, `model.`, `module.backbone.`), and other
    tensors beside these, such as a loss's.

    Raises:
        ModelError: If the weights are there under several prefixes, such as a network's and its average's.

    Example:
        >>> state = {"model.head.bias": torch.ones(1), "criterion.weight": torch.ones(1)}
        >>> list(strip_prefix(state, ["head.bias"], Path("last.ckpt")))
        ['head.bias']
    """
    state = {key.replace("_orig_mod.", ""): value for key, value in state.items()}  # of torch.compile, anywhere
    names = set(wanted)
    prefixes = Counter(
        key[:start]
        for key in state
        for start in (0, *(dot.end() for dot in re.finditer(r"\.", key)))
        if key[start:] in names
    )
    most = max(prefixes.values(), default=0)
    if 2 * most < len(names):  # the weights of another network share a few names by accident
        return state
    best = [prefix for prefix, count in prefixes.items() if count == most]
    if len(best) > 1:
        choices = " or ".join(f"{file.name}#{prefix.rstrip('.')}" for prefix in best if prefix)
        raise ModelError(f"'{file}' has the network's weights {len(best)} times. Write {choices}.")
    return {key.removeprefix(best[0]): value for key, value in state.items() if key.startswith(best[0])}


def find_classifier(network: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the classifier's parameters: as timm notes them, else of the last linear layer."""
    noted = (getattr(network, "pretrained_cfg", None) or {}).get("classifier") or ()
    names = (noted,) if isinstance(noted, str) else tuple(noted)
    if not names:
        names = tuple(name for name, module in network.named_modules() if isinstance(module, nn.Linear))[-1:]
    return tuple(f"{name}." for name in names)


def _resample(network: nn.Module, state: State, file: Path) -> State:
    """Return the state with position embeddings of the network's size, by its library's own function."""
    wanted = network.state_dict()
    if all(key in wanted and value.shape == wanted[key].shape for key, value in state.items()):
        return state
    try:
        converted = _convert(network, dict(state))
    except Exception as error:  # libraries expect their own files
        log.info("'%s' cannot be converted for %s", file, type(network).__name__, exc_info=error)
        return state
    changed = [key for key in converted if key in state and converted[key].numel() != state[key].numel()]
    if any("pos" not in key for key in changed):  # resampled patches are another network
        return state
    for key in changed:
        sizes = list(state[key].shape), list(converted[key].shape)
        log.warning("'%s': %s is resampled from %s to %s, for another image size.", file, key, *sizes)
    return converted


def _convert(network: nn.Module, state: State) -> State:
    filters = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
    if filters is not None:  # timm's
        converted: State = filters(state, network)
        return converted
    if type(network).__module__ == "torchvision.models.vision_transformer":
        from torchvision.models.vision_transformer import interpolate_embeddings

        vit: Any = network
        return dict(interpolate_embeddings(vit.image_size, vit.patch_size, state))
    return state


def metadata(file: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file; empty for any other file."""
    if file.suffix != ".safetensors" or not file.is_file():
        return {}
    _check_file(file)
    try:
        with safe_open(file, framework="pt") as stored:
            return dict(stored.metadata() or {})
    except SafetensorError as error:
        raise ModelError(f"'{file}' cannot be read as a safetensors file: {_first_line(error)}.") from error


def json_object(text: str, file: Path | None) -> dict[str, Any]:
    """Return keywords from the metadata of `file`."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelError(f"The metadata of '{file}' has keywords that are not JSON: {error}.") from error
    return value if isinstance(value, dict) else {}


def number_list(text: str, file: Path | None) -> list[float]:
    """Return numbers with commas between them, from the metadata of `file`."""
    try:
        return [float(value) for value in text.split(",")]
    except ValueError as error:
        raise ModelError(f"The metadata of '{file}' has a mean or std that is not numbers: {error}.") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
