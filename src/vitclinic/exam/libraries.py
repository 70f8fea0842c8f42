"""Files of weights: safetensors with their metadata, and torch checkpoints. Only tensors are unpickled."""

from __future__ import annotations

import json
import logging
import pickle
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from timm.models import get_pretrained_cfg
from torch import Tensor, nn

from vitclinic._core.errors import MissingExtraError, ModelError, RecipeError, VitclinicError, did_you_mean
from vitclinic.data.decoding import Size
from vitclinic.models import Normalized, create_model
from vitclinic.models.factory import IMAGENET_MEAN, IMAGENET_STD

_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model")
_WRAPPED = ("_orig_mod.", "module.")


def metadata(file: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file; empty for any other file."""
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
    return {_strip_wrappers(key): value for key, value in state.items() if isinstance(value, Tensor)}


def missing(file: Path) -> ModelError:
    """Return the error for a file that does not exist."""
    return ModelError(f"There is no file '{file}'.")


def _strip_wrappers(key: str) -> str:
    for prefix in _WRAPPED:
        key = key.removeprefix(prefix)
    return key


log = logging.getLogger(__name__)

N = TypeVar("N", bound=nn.Module)

Loaded = tuple[Normalized, Size | None]
"""A network, and the size of its images where only one will do."""


def from_timm(name: str, keywords: dict[str, Any], file: Path | None, pretrained: bool) -> Loaded:
    """timm's network `name`; a file's metadata may name the network, its keywords, mean and std."""
    facts = {} if file is None else metadata(file)
    if "timm" in facts:
        name = name or facts["timm"]
        if name != facts["timm"]:
            raise RecipeError(f"'{file}' holds the weights of timm:{facts['timm']}, not of timm:{name}.")
        keywords = {**json_object(facts.get("kwargs", "{}"), file), **keywords}
        for key in {"mean", "std"} & set(facts):
            keywords[key] = number_list(facts[key], file)
    if not name:
        if file is not None and not file.is_file():
            raise missing(file)
        raise RecipeError(f"'{file}' does not say which network it is of; write timm:NAME@{file}.")

    def build(pretrained: bool) -> Normalized:
        cached: dict[str, Any] = {}
        if pretrained and _is_offline():
            cached["pretrained_cfg_overlay"] = {"file": _cached_weights(name)}
        return create_model(name, pretrained=pretrained, normalize=True, **{**cached, **keywords})

    network = _build(f"timm:{name}", build, pretrained, keywords)
    if file is not None:
        fill(network.backbone, file, note=facts.get("note", ""))
    published = getattr(network.backbone, "pretrained_cfg", None) or {}
    size = keywords.get("img_size") or (published.get("fixed_input_size") and published["input_size"][1:])
    return network, _size(size)


def from_torchvision(name: str, keywords: dict[str, Any], file: Path | None, pretrained: bool) -> Loaded:
    """Build torchvision's classifier `name`."""
    from torchvision import models

    if name not in models.list_models(module=models):
        raise ModelError(f"torchvision has no model '{name}'.{did_you_mean(name, models.list_models(module=models))}")
    published = models.get_model_weights(name).DEFAULT

    def build(pretrained: bool) -> nn.Module:
        network: nn.Module = models.get_model(name, weights=published if pretrained else None, **keywords)
        return network

    backbone = _build(f"torchvision:{name}", build, pretrained, keywords)
    if file is not None:
        fill(backbone, file)
    transforms = published.transforms() if pretrained else None
    mean, std = getattr(transforms, "mean", IMAGENET_MEAN), getattr(transforms, "std", IMAGENET_STD)
    return Normalized(backbone, mean, std), _size(getattr(backbone, "image_size", None))


def from_hugging_face(name: str, keywords: dict[str, Any], pretrained: bool) -> Loaded:
    """Load an image classifier from the hub or a local folder."""
    try:
        import transformers
    except ImportError:
        raise MissingExtraError(f"hf:{name}", "hf") from None
    auto: Any = transformers.AutoModelForImageClassification
    only = {"local_files_only": _is_offline()}
    with _published(f"hf:{name}", keywords), fixed_seed():
        if pretrained:
            backbone = auto.from_pretrained(name, **only, **keywords)
        else:
            backbone = auto.from_config(transformers.AutoConfig.from_pretrained(name, **only, **keywords))
    mean, std = _processing(transformers, name, only)
    return Normalized(backbone, mean, std), _size(getattr(backbone.config, "image_size", None))


def _processing(transformers: Any, name: str, only: Mapping[str, bool]) -> tuple[Sequence[float], Sequence[float]]:
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(name, use_fast=True, **only)
    except (OSError, ValueError, ImportError):
        log.warning("hf:%s has no preprocessor_config.json; its pixels are scaled to [-1, 1].", name)
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    if not getattr(processor, "do_normalize", True):
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return processor.image_mean, processor.image_std


def _build(target: str, build: Callable[[bool], N], pretrained: bool, keywords: Mapping[str, Any]) -> N:
    """`build(pretrained)`; what fails without weights too is the fault of the name or the keywords."""
    if pretrained:
        with _published(target, keywords, lambda: _build(target, build, False, keywords)):
            return build(True)
    try:
        with fixed_seed():
            return build(False)
    except VitclinicError:
        raise
    except Exception as error:  # libraries refuse keywords in as many ways as they use them
        if unexpected := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            raise ModelError(f"{target} takes no keyword '{unexpected[1]}'.") from error
        raise ModelError(f"{target} cannot be built with these keywords ({_first_line(error)}).") from error


@contextmanager
def fixed_seed() -> Iterator[None]:
    """Random weights, the same at every call: what was measured of them can be found again."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@contextmanager
def _published(
    target: str, keywords: Mapping[str, Any], find_fault: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Libraries fail in many ways where there are no weights or no network: one sentence for all of them.

    `find_fault` is called after a failure, to raise where it has another reason.
    """
    try:
        yield
    except Exception as error:  # urllib's, httpx's and the hub's errors have no common base
        find_fault()
        asked = f"{target} with these keywords" if keywords else target
        instead = "a local folder (hf:FOLDER)" if target.startswith("hf:") else f"a file ({target}@FILE)"
        raise ModelError(
            f"There are no pretrained weights for {asked} here ({_first_line(error)}). Give {instead}, or examine it at"
            " random weights (--random-weights)."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _is_offline() -> bool:
    """Tell whether the hub's name does not resolve: its client would try for a minute, so only its cache is asked."""
    from huggingface_hub import constants

    try:
        if not getproxies():  # behind a proxy, names may resolve only there
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return True
    return False


def _cached_weights(name: str) -> str | None:
    """Return the file of a timm network's weights in the hub's cache; None if timm has them from elsewhere.

    Raises:
        OSError: The hub has the weights, and its cache has not.
    """
    from huggingface_hub import try_to_load_from_cache

    published = get_pretrained_cfg(name, allow_unregistered=True)
    if published is None or not published.hf_hub_id:
        return None
    repository, _, revision = published.hf_hub_id.partition("@")
    names = [published.hf_hub_filename] if published.hf_hub_filename else ["model.safetensors", "pytorch_model.bin"]
    for file in names:
        found = try_to_load_from_cache(repository, file, revision=revision or None)
        if isinstance(found, str):
            return found
    raise OSError(f"the hub cannot be reached, and its cache has no weights of {repository}")


def _size(size: Any) -> Size | None:
    if not size:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)
