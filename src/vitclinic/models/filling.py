"""Putting weights into a network that may have other names, another grid, other classes or other parts."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from vitclinic._core.errors import ModelError
from vitclinic.models.weights import State, Weights

log = logging.getLogger(__name__)

LEAST_SHARE = 0.5
"""Of a network's parameters, its classifier aside, at least so many must be loaded."""


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
    problems += [
        f"{key} holds integers in the file, such as those of a quantized network, without their scales"
        for key in wanted
        if key in state and wanted[key].is_floating_point() and not state[key].is_floating_point()
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
    """Return the state with position embeddings of the network's size; one with other patches stays as it is."""
    converted = convert(network, state)
    changed = list_resampled(state, converted)
    if any("pos" not in key for key in changed):  # resampled patches are another network
        return state
    for key, sizes in changed.items():
        log.warning("'%s': %s is resampled from %s to %s, for another image size.", file, key, *sizes)
    return converted


def list_resampled(before: State, after: State) -> dict[str, tuple[list[int], list[int]]]:
    """Return the shapes before and after of the tensors that were resampled."""
    return {
        key: (list(before[key].shape), list(value.shape))
        for key, value in after.items()
        if key in before and value.numel() != before[key].numel()
    }


def convert(network: nn.Module, state: State) -> State:
    """Return weights as a network wants them, by its library's own function.

    Position embeddings, tables of relative positions and, of timm's networks, patch embeddings are resampled to the
    network's grid; old names are changed to new ones. What the library cannot convert stays as it is.
    """
    wanted = network.state_dict()
    if all(key in wanted and value.shape == wanted[key].shape for key, value in state.items()):
        return state
    try:
        return _convert(network, dict(state))
    except Exception as error:  # libraries expect their own files
        log.info("weights cannot be converted for %s", type(network).__name__, exc_info=error)
        return state


def _convert(network: nn.Module, state: State) -> State:
    filters = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
    if filters is not None:  # timm's
        converted: State = filters(state, network)
        return converted
    if type(network).__module__ == "torchvision.models.vision_transformer":
        from torchvision.models.vision_transformer import interpolate_embeddings

        vit: Any = network
        return dict(interpolate_embeddings(vit.image_size, vit.patch_size, state))
    if type(network).__module__.startswith("transformers."):
        return _resample_positions(network, state)
    return state


def _resample_positions(network: nn.Module, state: State) -> State:
    """Resample the position embeddings of Hugging Face's ViTs as these do in a forward pass at another size."""
    wanted, config = network.state_dict(), cast(Any, network).config
    sizes, patches = _pair(config.image_size), _pair(config.patch_size)
    rows, columns = sizes[0] // patches[0], sizes[1] // patches[1]
    resampled = dict(state)
    for key, value in state.items():
        if key.endswith("position_embeddings") and key in wanted and value.shape != wanted[key].shape:
            prefix = wanted[key].shape[1] - rows * columns  # class and distillation tokens
            side = math.isqrt(value.shape[1] - prefix)
            grid = value[:, prefix:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
            grid = F.interpolate(grid.float(), size=(rows, columns), mode="bicubic", align_corners=False)
            resampled[key] = torch.cat((value[:, :prefix], grid.flatten(2).transpose(1, 2).to(value)), dim=1)
    return resampled


def _pair(size: int | Sequence[int]) -> Sequence[int]:
    return (size, size) if isinstance(size, int) else size


@dataclass(frozen=True)
class Adoption:
    """Tensors of a network that starts from given weights: loaded, drawn anew and left over."""

    loaded: tuple[str, ...]
    drawn: tuple[str, ...]
    """The network's tensors that are not among the weights, or have another shape there."""
    unused: tuple[str, ...]
    """The weights that the network has no use for."""
    head: bool
    """True if the classifier was loaded, too."""
    head_names: tuple[str, ...] = ()
    """The classifier's tensors."""


def adopt(network: nn.Module, state: State, source: str, *, head: bool = True) -> Adoption:
    """Put all weights that fit into a network, which may have other classes and other parts.

    Args:
        network: The network, changed in place.
        state: The weights, as `convert` returns them.
        source: Where they come from, for messages.
        head: Also load the classifier, if it fits.

    Returns:
        What was loaded, and what was not.

    Raises:
        ModelError: The weights are for images of other channels, or less than half of the parameters would be loaded.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).state_dict()
        >>> adopt(network, other, "other").drawn
        ('1.weight', '1.bias')
    """
    wanted = network.state_dict()
    _check_channels(state, wanted, source)
    # The last linear layer of a network without a classifier, which a task's head reads, is a part of its last block.
    classifier = () if getattr(network, "num_classes", None) == 0 else find_classifier(network)
    fitting = {key for key, value in state.items() if key in wanted and value.shape == wanted[key].shape}
    of_head = {key for key in wanted if key.startswith(classifier)}
    if not head or not of_head <= fitting:
        fitting -= of_head
    counts = {key: parameter.numel() for key, parameter in network.named_parameters() if key not in of_head}
    share = sum(count for key, count in counts.items() if key in fitting) / max(1, sum(counts.values()))
    drawn = tuple(key for key in wanted if key not in fitting)
    if share < LEAST_SHARE:
        first = next(key for key in drawn if key not in of_head)
        there = f"of shape {list(state[first].shape)} in them" if first in state else "not in them"
        raise ModelError(
            f"The weights of '{source}' fit {share:.0%} of the network's parameters, and half is the least: {first}"
            f" {list(wanted[first].shape)} is {there}; choose the network that they are of as `model`."
        )
    network.load_state_dict({key: state[key] for key in fitting}, strict=False)
    unused = tuple(key for key in state if key not in fitting and key not in of_head)
    loaded = tuple(key for key in wanted if key in fitting)
    return Adoption(loaded, drawn, unused, of_head <= fitting, tuple(sorted(of_head)))


def _check_channels(state: State, wanted: State, source: str) -> None:
    for key, value in state.items():
        if value.ndim == 4 and key in wanted and wanted[key].ndim == 4:
            theirs, ours = value.shape[1], wanted[key].shape[1]
            if theirs != ours and {theirs, ours} == {1, 3}:
                raise ModelError(
                    f"The weights of '{source}' are for images of {theirs} channel{'s' * (theirs > 1)}, and the data"
                    f" has {ours}; set model.in_chans={theirs}."
                )
