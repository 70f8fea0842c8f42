"""Networks of timm, torchvision and Hugging Face, with their published weights or those of a file."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from timm.models import get_pretrained_cfg, is_model
from torch import nn

from vitclinic._core.errors import (
    MissingExtraError,
    MissingWeightsError,
    ModelError,
    RecipeError,
    VitclinicError,
    did_you_mean,
    first_line,
)
from vitclinic._core.io import parse_yaml
from vitclinic.data.decoding import Size
from vitclinic.models import Normalized, create_model
from vitclinic.models.factory import IMAGENET_MEAN, IMAGENET_STD
from vitclinic.models.filling import fill, find_classifier
from vitclinic.models.weights import Weights, json_object, metadata, number_list, read_weights, split_key

log = logging.getLogger(__name__)

N = TypeVar("N", bound=nn.Module)

RESERVED = frozenset({"pretrained", "weights", "checkpoint_path", "name", "model_name"})
"""Keywords of the libraries' factories, which say what the rest of a target says already."""


class Loaded(NamedTuple):
    """A network of a library."""

    network: Normalized
    size: Size | None
    """The size of its images, where only one will do."""
    name: str
    """The name under which `model=` of a recipe builds it."""
    keywords: dict[str, Any]
    """What it is built with besides."""
    drawn: tuple[str, ...] = ()
    """The classifier's parameters, if the weights have no classifier of this size and it was drawn at random."""


def open_library(text: str, random_weights: bool = False) -> Loaded:
    """Return the network that `LIBRARY:NAME[?KEYWORDS][@FILE[#KEY]]` names, with published or a file's weights.

    Args:
        text: Such as `timm:vit_tiny_patch16_224?img_size=32@last.pth.tar`, `torchvision:resnet18` or `hf:FOLDER`.
        random_weights: Draw the weights, the same at every call.

    Raises:
        RecipeError: The text is not of this form, or there is no such network, or no weights of it.
    """
    library, _, rest = text.partition(":")
    described, at, file = rest.partition("@")
    if at and random_weights:
        raise RecipeError(f"'{text}' names a file of weights; leave out `random_weights`.")
    name, _, query = described.partition("?")
    if at and not file:
        raise RecipeError(f"'{text}' names no file of weights after its '@'.")
    if not name and not (library == "timm" and at):  # a file of timm's may say what it is
        raise RecipeError(f"'{text}' names no network; write {library}:NAME{at}{file}.")
    keywords = _keywords(query, text)
    pretrained = not at and not random_weights
    if library == "hf":
        if at:
            raise RecipeError(f"hf: takes a name or a folder without '@' (got '{text}').")
        return from_hugging_face(name, keywords, pretrained)
    weights = read_weights(*split_key(file)) if at else None
    build = from_timm if library == "timm" else from_torchvision
    return build(name, keywords, weights, pretrained)


def _keywords(query: str, text: str) -> dict[str, Any]:
    """`img_size=32&patch_size=4`, values as YAML."""
    keywords = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier():
            raise RecipeError(f"'{part}' in '{text}' is not key=value.")
        if key in RESERVED:
            raise RecipeError(
                f"'{key}' in '{text}' is not the network's own; its weights are the published ones, a file's are @FILE,"
                " random ones `random_weights`."
            )
        keywords[key] = parse_yaml(value, f"'{part}' in '{text}'")
    return keywords


def from_timm(name: str, keywords: dict[str, Any], weights: Weights | None, pretrained: bool) -> Loaded:
    """Build timm's network `name`; a file of weights may name the network, its keywords, mean and std."""
    facts = {} if weights is None else metadata(weights.file)
    if weights is not None:
        name, keywords = _read_facts(name, keywords, weights, facts)

    def build(pretrained: bool) -> Normalized:
        cached: dict[str, Any] = {}
        if pretrained and _is_offline():
            cached["pretrained_cfg_overlay"] = {"file": _cached_weights(name)}
        return create_model(name, pretrained=pretrained, normalize=True, **{**cached, **keywords})

    network = _build(f"timm:{name}", build, pretrained, keywords)
    backbone: Any = network.backbone
    published = getattr(backbone, "pretrained_cfg", None) or {}
    drawn: tuple[str, ...] = ()
    if weights is not None:
        drawn = fill(backbone, weights, note=facts.get("note", ""))
    elif pretrained and published.get("num_classes") != backbone.num_classes:
        classifier = find_classifier(backbone)
        drawn = tuple(key for key in backbone.state_dict() if key.startswith(classifier))
    size = keywords.get("img_size") or (published.get("fixed_input_size") and published["input_size"][1:])
    return Loaded(network, _size(size), name, keywords, drawn)


def _read_facts(
    name: str, keywords: dict[str, Any], weights: Weights, facts: Mapping[str, str]
) -> tuple[str, dict[str, Any]]:
    """Return the name and the keywords of the network that a file is of; what the user wrote comes first."""
    file, noted = weights.file, facts.get("timm")
    if noted is not None:
        if name and name != noted:
            raise RecipeError(f"'{file}' holds the weights of timm:{noted}, not of timm:{name}.")
        numbers = {key: number_list(facts[key], file) for key in ("mean", "std") if key in facts}
        return noted, {**json_object(facts.get("kwargs", "{}"), file), **keywords, **numbers}
    arch = weights.arch if weights.arch and is_model(weights.arch) else None
    if not name and arch is None:
        raise RecipeError(f"'{file}' does not say which network it is of; write timm:NAME@{file}.")
    if arch is None or name.partition(".")[0] not in ("", arch.partition(".")[0]):
        if arch is not None:
            log.warning("'%s' says that its weights are of timm:%s, not of timm:%s.", file, arch, name)
        return name, keywords
    return name or arch, {**weights.settings, **keywords}


def from_torchvision(name: str, keywords: dict[str, Any], weights: Weights | None, pretrained: bool) -> Loaded:
    """Build torchvision's classifier `name`."""
    from torchvision import models

    check_torchvision(name)
    published = models.get_model_weights(name).DEFAULT

    def build(pretrained: bool) -> nn.Module:
        network: nn.Module = models.get_model(name, weights=published if pretrained else None, **keywords)
        return network

    backbone = _build(f"torchvision:{name}", build, pretrained, keywords)
    drawn = () if weights is None else fill(backbone, weights)
    transforms = published.transforms() if pretrained else None
    mean, std = getattr(transforms, "mean", IMAGENET_MEAN), getattr(transforms, "std", IMAGENET_STD)
    size = _size(getattr(backbone, "image_size", None))
    return Loaded(Normalized(backbone, mean, std), size, f"torchvision:{name}", keywords, drawn)


def from_hugging_face(name: str, keywords: dict[str, Any], pretrained: bool) -> Loaded:
    """Load an image classifier, or an encoder of which there is none, from the hub or a local folder."""
    transformers = import_transformers(f"hf:{name}")
    only = {"local_files_only": _is_offline()}
    lacking: Sequence[str] = ()
    with _published(f"hf:{name}", keywords), fix_seed():
        config: Any = transformers.AutoConfig.from_pretrained(name, **only, **keywords)
        has_head = type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        auto: Any = transformers.AutoModelForImageClassification if has_head else transformers.AutoModel
        if pretrained:
            backbone, report = auto.from_pretrained(name, output_loading_info=True, **only, **keywords)
            lacking = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
        else:
            backbone = auto.from_config(config)
    if inside := [key for key in lacking if not re.match(r"(\w*classifier|head|fc)\.", key)]:
        raise ModelError(
            f"The weights of hf:{name} lack {inside[0]} ({len(inside)} in all); they are of another network."
        )
    mean, std = _processing(transformers, name, only)
    size = _size(getattr(backbone.config, "image_size", None))
    stated, known = backbone.config.to_diff_dict(), type(config)()  # a file may state what its network does not have
    facts = {key: value for key, value in stated.items() if key not in _NOT_STRUCTURE and hasattr(known, key)}
    return Loaded(Normalized(backbone, mean, std), size, f"hf:{config.model_type}", facts, tuple(lacking))


_NOT_STRUCTURE = ("model_type", "architectures", "transformers_version", "dtype", "id2label", "label2id", "num_labels")
"""Entries of a Hugging Face config that are not about how the network is built."""


def check_torchvision(name: str) -> None:
    """Raise a ModelError if torchvision has no classifier of that name."""
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise ModelError(f"torchvision has no model '{name}'.{did_you_mean(name, known)}")


def import_transformers(purpose: str) -> Any:
    """Return the package transformers; without it, `purpose` needs an extra."""
    try:
        import transformers
    except ImportError:
        raise MissingExtraError(purpose, "hf") from None
    return transformers


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
    with fix_seed():
        return catch_keywords(target, lambda: build(False))


def catch_keywords(target: str, build: Callable[[], N]) -> N:
    """Return what `build` builds, without weights; what fails is the fault of the keywords."""
    try:
        return build()
    except VitclinicError:
        raise
    except Exception as error:  # libraries refuse keywords in as many ways as they use them
        if unexpected := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            raise ModelError(f"{target} takes no keyword '{unexpected[1]}'.") from error
        raise ModelError(f"{target} cannot be built with these keywords ({first_line(error)}).") from error


@contextmanager
def fix_seed() -> Iterator[None]:
    """Make random weights the same at every call: what was measured of them can be found again."""
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
        raise MissingWeightsError(
            f"There are no pretrained weights for {asked} here ({first_line(error)}). Give {instead}, or examine it at"
            " random weights (`random_weights`)."
        ) from error


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
