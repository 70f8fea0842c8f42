"""The output of a network: which of the tensors that it returns is measured, and whether that holds class scores.

A network may return a tensor, or tensors in a dict, tuple, list, named tuple, dataclass or Hugging Face output. In
these, class scores are called `logits`. Where there are none, the network is an encoder, and its features are
`pooler_output`, else `last_hidden_state`. Of a tuple or list without names it is the first tensor, with a warning; of a
dict without these names, the only one. Where a dict has several, nobody knows which holds class scores, and only what
needs none is measured. Features with positions, [B, N, D] or [B, C, H, W], are averaged over the positions: not every
encoder has a class token. For anything else users pass `output=`, a function of what the network returns.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitclinic._core.errors import ModelError, first_line
from vitclinic.anatomy.wrappers import call_with_images, image_keyword
from vitclinic.models import Headed, Normalized
from vitclinic.probes.guards import preserve_state

log = logging.getLogger(__name__)

OutputFunction = Callable[[Any], Tensor]
"""A function from what a network returns to the class scores, or features, of each image, [B, K]."""
SCORES = "logits"
FEATURES = ("pooler_output", "last_hidden_state")
"""Names of an encoder's features, the first that is there being taken."""
_MANY = 16
"""Logits of this many classes do not all lie in [0, 1] by accident."""
_AVERAGING = frozenset(("Add", "Stack", "Cat"))
_RESHAPING = frozenset(
    (
        *("View", "Reshape", "ReshapeAlias", "UnsafeView", "Squeeze", "Unsqueeze", "Select", "Slice", "Clone"),
        *("ToCopy", "Permute", "Transpose", "T", "Alias", "Expand", "Index"),
    )
)
_ROUGHENING = _AVERAGING | _RESHAPING | {"Sub", "Mul", "Div", "Clamp", "ClampMin", "ClampMax", "Round", "Mean"}
"""Operations with constants behind which the results of a softmax still are no logits."""
_ADVICE = "Pass output=, a function from what the network returns to its class scores [B, K], to choose."


_RETURNS = "The network returns "


class _UnnamedError(ModelError):
    """Several tensors without names, any of which may hold the class scores."""


class Adapted(nn.Module):
    """A network that is called with images [B, C, H, W] and returns class scores or features, [B, K].

    Args:
        backbone: The network, called in its own way.
        output: Function from what it returns to the tensor [B, K]; `read_output` by default.
    """

    def __init__(self, backbone: nn.Module, output: OutputFunction | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        self.output = output

    def forward(self, x_bchw: Tensor) -> Tensor:
        return read_output(call_with_images(self.backbone, x_bchw), self.output)


@dataclass(frozen=True)
class Output:
    """A network's output, as one image shows it."""

    network: nn.Module
    """A network that takes images and returns a tensor [B, K]: the given one, `Adapted` if it does not."""
    count: int
    """Number of class scores, or of features, K."""
    features: str | None
    """The name of the features if the network returns no class scores."""
    may_be_probabilities: bool
    """True if the scores of the image may be probabilities, of one class or of each; several images must tell."""


def observe_output(
    network: nn.Module, example: Tensor, output: OutputFunction | None = None, *, name: str = "The network"
) -> Output:
    """Call a network with one image, and return what is known of its output.

    Args:
        network: The network.
        example: One image, [1, C, H, W].
        output: Function from what the network returns to a tensor [B, K], if the user gave one.
        name: Name of the network in messages.

    Raises:
        ModelError: If the network cannot take the image, or returns nothing that can be measured.

    Example:
        >>> observe_output(nn.Flatten(), torch.zeros(1, 3, 2, 2)).count
        12
    """
    features, network = None, network if output is not None else _without_head(network)
    try:
        with preserve_state(network), torch.no_grad():
            returned = call_with_images(network, example)
            try:
                tensor = read_output(returned, output)
            except _UnnamedError as error:
                features, output = str(error).removeprefix(_RETURNS).rstrip("."), _read_any
                tensor = _read_any(returned)
    except ModelError:  # says what is wrong already
        raise
    except Exception as error:  # the user's own code may raise anything
        shape = " x ".join(str(side) for side in example.shape[1:])
        last = example.shape[-1] in (1, 3) and example.shape[1] not in (1, 3)
        hint = " If their channels come last, use images.permute(0, 3, 1, 2)." if last else ""
        raise ModelError(f"{name} cannot take the {shape} images of the data: {_reason(error)}.{hint}") from error
    if tensor.ndim != 2 or len(tensor) != len(example):
        raise ModelError(f"{name} returns shape {tuple(tensor.shape)} for one image; expected (1, classes).")
    plain = output is None and returned is tensor and image_keyword(network) is None
    adapted = network if plain else Adapted(network, output)
    if output is None:
        _warn_of_choice(returned, name)
        features = _find_features(network, returned)
    return Output(adapted, tensor.shape[1], features, bool((tensor >= 0).all()))


def _without_head(network: nn.Module) -> nn.Module:
    """Return the backbone of a network whose head returns no tensor, such as a detector's: probes see its features."""
    if not isinstance(network, Normalized) or not isinstance(network.backbone, Headed):
        return network
    if network.backbone.returns_tensor:
        return network
    bare = Normalized(network.trunk, network.mean.flatten().tolist(), network.std.flatten().tolist())
    return bare.to(network.mean.device).train(network.training)


def read_output(returned: Any, output: OutputFunction | None = None) -> Tensor:
    """Return the class scores in what a network returned, or its features if it has no head, [B, K].

    Args:
        returned: Whatever the network returned.
        output: The user's own function from that to the tensor.

    Raises:
        ModelError: If there is no such tensor, or no telling which.

    Example:
        >>> read_output({"logits": torch.zeros(2, 10), "features": torch.zeros(2, 64)}).shape
        torch.Size([2, 10])
    """
    if output is not None:
        return _check_tensor(output(returned))
    _, tensor = _select(returned)
    return _average_positions(tensor)


def _average_positions(tensor: Tensor) -> Tensor:
    if tensor.ndim == 4:
        return tensor.mean((2, 3))
    return tensor.mean(1) if tensor.ndim == 3 else tensor


def _read_any(returned: Any) -> Tensor:
    """Return one of several tensors without names, for probes that look at none of them."""
    tensors = [value for value in _by_name(returned).values() if isinstance(value, Tensor)]
    return _average_positions(next((tensor for tensor in tensors if tensor.ndim > 1), tensors[0]))


def are_probabilities(scores_bk: Tensor, traced_bk: Tensor | None = None) -> bool:
    """Return True if every row is in [0, 1] and sums to 1, to the rounding error of its dtype, or a softmax made it.

    Logits may be so for one image by accident, hardly for several. Computed with gradients, scores show a softmax also
    where they are rounded, scaled, raised, or without one of the classes.

    Args:
        scores_bk: Scores of several images.
        traced_bk: Those of one or some of them, computed with gradients; by default `scores_bk` is.

    Example:
        >>> are_probabilities(torch.rand(4, 10).softmax(1)), are_probabilities(torch.rand(4, 10))
        (True, False)
    """
    made = (scores_bk if traced_bk is None else traced_bk).grad_fn
    if bool((scores_bk >= 0).all()) and _ends_in(made, _is_softmax, _ROUGHENING):
        return True
    tolerance = max(1e-5, 4 * torch.finfo(scores_bk.dtype).eps)
    return lie_in_unit_interval(scores_bk) and bool(((scores_bk.double().sum(1) - 1).abs() <= tolerance).all())


def are_sigmoids(scores_bk: Tensor, traced_bk: Tensor | None = None) -> bool:
    """Return True if scores are probabilities of each class by itself, those of a multi-label network.

    They lie in [0, 1] and do not sum to 1. Logits of a few classes may lie there by accident, so that a sigmoid must be
    seen in the graph of the scores; of many classes, hardly.

    Args:
        scores_bk: Scores of several images.
        traced_bk: Those of one or some of them, computed with gradients; by default `scores_bk` is.

    Example:
        >>> logits = torch.randn(4, 3, requires_grad=True)
        >>> are_sigmoids(logits.sigmoid()), are_sigmoids(logits.softmax(1)), are_sigmoids(logits)
        (True, False, False)
    """
    if not lie_in_unit_interval(scores_bk) or are_probabilities(scores_bk, traced_bk):
        return False
    made = (scores_bk if traced_bk is None else traced_bk).grad_fn
    return _ends_in(made, _is_sigmoid, _RESHAPING) or scores_bk.shape[1] >= _MANY


def lie_in_unit_interval(scores_bk: Tensor) -> bool:
    """Return True if all scores lie in [0, 1]."""
    return bool(((scores_bk >= 0) & (scores_bk <= 1)).all())


def _ends_in(node: Any, is_end: Callable[[Any], bool], through: frozenset[str]) -> bool:
    """Return True if the graph leads from a result to such ends alone, through these operations.

    Several results may be averaged or put side by side.
    """
    if node is None or is_end(node):
        return node is not None
    inputs = [inner for inner, _ in node.next_functions if inner is not None]
    passing = _operation(node) in (through if len(inputs) < 2 else through & _AVERAGING)
    return bool(inputs) and passing and all(_ends_in(inner, is_end, through) for inner in inputs)


def _operation(node: Any) -> str:
    """Return the name of the operation whose derivative a node is."""
    return "" if node is None else str(node.name()).rstrip("0123456789").removesuffix("Backward")


def _is_softmax(node: Any) -> bool:
    return _operation(node) in ("Softmax", "SafeSoftmax")


def _is_sigmoid(node: Any) -> bool:
    """Return True for a sigmoid: torch's, or one written as 1 / (1 + exp(-x))."""
    if _operation(node) in ("Sigmoid", "Hardsigmoid"):
        return True
    for operation in ("Mul", "Reciprocal", "Add"):
        if _operation(node) != operation:
            return False
        node = node.next_functions[0][0]
    return _operation(node) == "Exp"


def _select(returned: Any) -> tuple[str | None, Tensor]:
    """Return the tensor to measure, and the name under which it was found, if any."""
    if isinstance(returned, Tensor):
        return None, returned
    named = _by_name(returned)
    for name in (SCORES, *FEATURES):
        if isinstance(named.get(name), Tensor):
            return name, named[name]
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor) and value.ndim}  # no loss
    if len(tensors) == 1 or (tensors and isinstance(returned, tuple | list)):
        return None, next(iter(tensors.values()))
    found = f"{len(tensors)} tensors ({_shapes(tensors)}), none of them called 'logits'" if tensors else "no tensor"
    raise (_UnnamedError if tensors else ModelError)(f"{_RETURNS}a {type(returned).__name__} with {found}. {_ADVICE}")


def _by_name(returned: Any) -> Mapping[str, Any]:
    """Return the parts of what a network returned by their names, or by their numbers in a tuple or list."""
    if isinstance(returned, Mapping):
        return returned
    if dataclasses.is_dataclass(returned):
        return {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}
    if isinstance(returned, tuple | list):
        names = getattr(returned, "_fields", map(str, range(len(returned))))
        return dict(zip(names, returned, strict=True))
    return {name: getattr(returned, name) for name in (SCORES, *FEATURES) if hasattr(returned, name)}


def _warn_of_choice(returned: Any, name: str) -> None:
    """Say which of several tensors without a name is measured."""
    tensors = {} if isinstance(returned, Tensor) else _by_name(returned)
    tensors = {key: value for key, value in tensors.items() if isinstance(value, Tensor) and value.ndim}
    if len(tensors) > 1 and not tensors.keys() & {SCORES, *FEATURES}:
        log.warning(
            "%s returns %d tensors (%s); the first is measured. %s", name, len(tensors), _shapes(tensors), _ADVICE
        )


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name}: {list(tensor.shape)}" for name, tensor in tensors.items())


def _find_features(network: nn.Module, returned: Any) -> str | None:
    """Return what an encoder without a head returned; None if it holds class scores, as far as is known."""
    name, tensor = _select(returned)
    if name in FEATURES:
        return name
    if tensor.ndim != 2:
        return f"features of shape {list(tensor.shape[1:])}"
    # timm's networks say that they have no head; a backbone inside another network says nothing about that.
    inner: Any = network
    while isinstance(inner, Normalized) or hasattr(inner, "_orig_mod"):
        inner = inner.backbone if isinstance(inner, Normalized) else inner._orig_mod
    return "features (its num_classes is 0)" if getattr(inner, "num_classes", None) == 0 else None


def _check_tensor(value: Any) -> Tensor:
    """Return what the user's `output=` returned, if it is a tensor."""
    if not isinstance(value, Tensor):
        raise ModelError(f"output= returns a {type(value).__name__}; expected a tensor of class scores, [B, K].")
    return value


def _reason(error: Exception) -> str:
    """Return the first line of an error, with its type if the line alone says little."""
    line, kind = first_line(error), type(error).__name__
    return line if isinstance(error, RuntimeError | AssertionError | ValueError) or line == kind else f"{kind}: {line}"
