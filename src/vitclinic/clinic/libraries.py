"""Networks of timm, torchvision and Hugging Face, taking pixels in [0, 1], with weights from the library or a file."""

from __future__ import annotations

import json
import logging
import pickle
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from vitclinic.data.decoding import Size
from vitclinic.errors import MissingExtraError, ModelError, RecipeError, did_you_mean
from vitclinic.models import Normalised, create_model
from vitclinic.models.factory import IMAGENET_MEAN, IMAGENET_STD

log = logging.getLogger(__name__)

Loaded = tuple[Normalised, Size | None]
"""A network, and the size of its images where only one will do."""

_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")
_WRAPPED = ("_orig_mod.", "module.")


def from_timm(name: str, keywords: dict[str, Any], file: Path | None, pretrained: bool) -> Loaded:
    """timm's network `name`; a file's metadata may name the network, its keywords, mean and std."""
    facts = {} if file is None else _metadata(file)
    if "timm" in facts:
        name = name or facts["timm"]
        if name != facts["timm"]:
            raise RecipeError(f"'{file}' holds the weights of timm:{facts['timm']}, not of timm:{name}.")
        keywords = {**_json_object(facts.get("kwargs", "{}"), file), **keywords}
        for key in {"mean", "std"} & set(facts):
            keywords[key] = [float(value) for value in facts[key].split(",")]
    if not name:
        raise RecipeError(f"'{file}' does not say which network it is of; write timm:NAME@{file}.")
    with _published(f"timm:{name}") if pretrained else _seeded():
        network = create_model(name, pretrained=pretrained, **keywords)
    if file is not None:
        _fill(network.backbone, file, note=facts.get("note", ""))
    published = getattr(network.backbone, "pretrained_cfg", None) or {}
    size = keywords.get("img_size") or (published.get("fixed_input_size") and published["input_size"][1:])
    return network, _size(size)


def from_torchvision(name: str, keywords: dict[str, Any], file: Path | None, pretrained: bool) -> Loaded:
    """torchvision's classifier `name`."""
    from torchvision import models

    if name not in models.list_models(module=models):
        raise ModelError(f"torchvision has no model '{name}'.{did_you_mean(name, models.list_models(module=models))}")
    weights = models.get_model_weights(name).DEFAULT if pretrained else None
    with _published(f"torchvision:{name}") if pretrained else _seeded():
        backbone = models.get_model(name, weights=weights, **keywords)
    if file is not None:
        _fill(backbone, file)
    transforms = weights.transforms() if weights is not None else None
    mean, std = getattr(transforms, "mean", IMAGENET_MEAN), getattr(transforms, "std", IMAGENET_STD)
    return Normalised(backbone, mean, std), _size(getattr(backbone, "image_size", None))


def from_hugging_face(name: str, keywords: dict[str, Any], pretrained: bool) -> Loaded:
    """An image classifier of the hub, or of a local folder."""
    try:
        import transformers
    except ImportError:
        raise MissingExtraError(f"hf:{name}", "hf") from None
    auto: Any = transformers.AutoModelForImageClassification
    with _published(f"hf:{name}"), _seeded():
        if pretrained:
            backbone = auto.from_pretrained(name, **keywords)
        else:
            backbone = auto.from_config(transformers.AutoConfig.from_pretrained(name, **keywords))
    mean, std = _processing(transformers, name)
    return Normalised(backbone, mean, std), _size(getattr(backbone.config, "image_size", None))


def _processing(transformers: Any, name: str) -> tuple[Sequence[float], Sequence[float]]:
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(name, use_fast=True)
    except (OSError, ValueError, ImportError):
        log.warning("hf:%s has no preprocessor_config.json; its pixels are scaled to [-1, 1].", name)
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    if not getattr(processor, "do_normalize", True):
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return processor.image_mean, processor.image_std


@contextmanager
def _seeded() -> Iterator[None]:
    """Random weights, the same at every call: what was measured of them can be found again."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@contextmanager
def _published(target: str) -> Iterator[None]:
    """Libraries fail in many ways where there are no weights or no network: one sentence for all of them."""
    try:
        with _hub_without_waiting():
            yield
    except Exception as error:  # urllib's, httpx's and the hub's errors have no common base
        if "There is no model" in str(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        instead = "a local folder (hf:FOLDER)" if target.startswith("hf:") else f"a file ({target}@FILE)"
        raise ModelError(
            f"There are no pretrained weights for {target} here ({reason}). Give {instead}, or examine it at random"
            " weights (--random-weights)."
        ) from error


def _hub_without_waiting() -> AbstractContextManager[Any]:
    """Where the hub's name does not resolve, only its cache is asked: its client would try for a minute."""
    from huggingface_hub import constants

    try:
        if not getproxies():  # behind a proxy, names may resolve only there
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return mock.patch.object(constants, "HF_HUB_OFFLINE", True)
    return nullcontext()


def _metadata(file: Path) -> dict[str, str]:
    if file.suffix != ".safetensors" or not file.is_file():
        return {}
    try:
        with safe_open(file, framework="pt") as stored:
            return dict(stored.metadata() or {})
    except SafetensorError as error:
        raise ModelError(f"'{file}' cannot be read: {error}.") from error


def _json_object(text: str, file: Path | None) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelError(f"The metadata of '{file}' has keywords that are not JSON: {error}.") from error
    return value if isinstance(value, dict) else {}


def _fill(network: nn.Module, file: Path, note: str = "") -> None:
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
        raise ModelError(f"There is no file '{file}'.")
    try:
        content = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise ModelError(f"'{file}' cannot be read as a file of tensors only: {str(error).splitlines()[0]}") from error
    if not isinstance(content, Mapping):
        raise ModelError(f"'{file}' holds {type(content).__name__}, not named tensors.")
    state = next((content[key] for key in _NESTED if isinstance(content.get(key), Mapping)), content)
    return {_unwrapped(key): value for key, value in state.items() if isinstance(value, Tensor)}


def _unwrapped(key: str) -> str:
    for prefix in _WRAPPED:
        key = key.removeprefix(prefix)
    return key


def _size(size: Any) -> Size | None:
    if not size:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)
