"""Finding the weights of an attention: queries and keys of each head, values, and the projection behind them.

Which rows of which weight they are is not read from names. In one forward pass every linear layer returns noise that
has a gradient, and the gradients of the scores and of what enters the projection tell:

- score_ij of a head depends on its queries at token i and on its keys at token j, and on nothing else;
- what enters the projection depends, beside queries and keys, on the values, each of its channels on one of them.

So it does not matter whether queries, keys and values are one layer or three, in which order their rows lie, and
which function computes the map. Layers that do not see the image, such as those of a position bias, are left alone. Of
`multi_head_attention_forward` the weights are known.

Shapes: B images, H heads, Q queries, K keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitclinic._core.errors import first_line
from vitclinic.anatomy import Anatomy, eval_mode
from vitclinic.anatomy.maps import MHA_SIGNATURE
from vitclinic.anatomy.wrappers import call_with_images
from vitclinic.data import ImageSpec
from vitclinic.treatments.attention_edit import is_softmax_of_map
from vitclinic.treatments.parts import Attention, example_image, find_attentions, missing
from vitclinic.treatments.treatment import Treatment


class Rows(NamedTuple):
    """Some rows of the weight [out, in] of a linear layer."""

    weight: Tensor
    rows: Tensor

    @property
    def width(self) -> int:
        """Number of channels that enter the layer."""
        return int(self.weight.shape[1])

    def fill(self, values: Tensor) -> None:
        """Set the rows, [rows, in], or the first of them."""
        self.weight.data[self.rows[: len(values)]] = values.to(self.weight)


class Projections(NamedTuple):
    """The weights of one attention.

    Args:
        attention: The attention.
        queries: Rows of each head.
        keys: Rows of each head, in the order of its queries.
        values: Rows of all heads, in the order of the columns of `proj`.
        proj: The weight [out, in] of the projection behind the values.
    """

    attention: Attention
    queries: list[Rows]
    keys: list[Rows]
    values: Rows
    proj: Tensor


def find_projections(treatment: Treatment, anatomy: Anatomy, spec: ImageSpec) -> list[Projections]:
    """Return the weights of every attention of a network, in the order in which they run.

    Raises:
        TreatmentError: The network has no attention, or the weights of one cannot be told apart.
    """
    attentions = find_attentions(treatment, anatomy, spec)
    network, handles = anatomy.network, []
    image = example_image(network, spec).requires_grad_()
    recorder = _Recorder(image)
    for attention in attentions:
        handles.append(attention.module.register_forward_pre_hook(lambda *_, one=attention: recorder.enter(one)))
        handles.append(attention.module.register_forward_hook(lambda *_: recorder.leave(), always_call=True))
    try:
        with eval_mode(network), _frozen(network), torch.enable_grad(), recorder:
            call_with_images(network, image)
    except _UnknownWeightsError as error:
        raise missing(treatment, network, str(error)) from error
    except RuntimeError as error:  # of layers that have no gradient, or work in place on what they may not
        raise missing(treatment, network, f"a pass with gradients fails ({first_line(error)})") from error
    finally:
        for handle in handles:
            handle.remove()
    for attention in attentions:
        if attention.module not in recorder.found:
            why = f"no projection was seen behind {attention.unit.name}, or another treatment has changed its map:"
            raise missing(treatment, network, f"{why} list {treatment.name} before such treatments")
    return [recorder.found[attention.module] for attention in attentions]


@contextmanager
def _frozen(network: nn.Module) -> Iterator[None]:
    """Let no parameter require a gradient, so that only what depends on the image does."""
    learned = [parameter for parameter in network.parameters() if parameter.requires_grad]
    for parameter in learned:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)


class _UnknownWeightsError(Exception):
    """Why the weights of an attention cannot be told apart."""


class _Layer(NamedTuple):
    """A linear layer that ran: what entered it, its weight, and the noise that it returned, [..., out]."""

    entering: Tensor
    weight: Tensor
    noise: Tensor


class _Recorder(TorchFunctionMode):
    """Function mode of one pass, which finds the weights of each attention that is entered."""

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.found: dict[nn.Module, Projections] = {}
        self._generator = torch.Generator().manual_seed(0)
        self._current: Attention | None = None
        self._image = _Layer(image, image, image)
        self._layers = [self._image]
        self._before: list[_Layer] = []
        self._pending: tuple[Attention, list[Rows], list[Rows]] | None = None

    def enter(self, attention: Attention) -> None:
        """Begin an attention; one that runs again is known already."""
        self._current = None if attention.module in self.found else attention

    def leave(self) -> None:
        """End it; its projection may be still to come."""
        self._current = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(func(*args, **kwargs), *args, **kwargs)
        if self._current is not None:
            if func is F.multi_head_attention_forward:
                self.found[self._current.module] = _read_multi_head(self._current, args, kwargs)
            elif func is F.scaled_dot_product_attention:
                named = dict(zip(("query", "key"), args, strict=False)) | kwargs
                query, key = named["query"], named["key"]
                groups = query.shape[-3] // key.shape[-3]
                self._map(self._current, query @ key.repeat_interleave(groups, dim=-3).transpose(-2, -1))
            elif is_softmax_of_map(func, args, kwargs):
                self._map(self._current, args[0] if args else kwargs["input"])
        return func(*args, **kwargs)

    def _linear(self, output: Tensor, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return noise for the output of a linear layer, and note if it is the projection of an attention."""
        if not output.requires_grad:
            return output
        if self._pending is not None and (values := _find_values(input, self._layers, *self._pending)) is not None:
            name = self._pending[0].unit.name
            if any(used.any() for used in _depends(input, self._before, _draw(input.shape))):
                raise _UnknownWeightsError(f"no projection follows the values of {name}")
            _check_learned(weight, f"the projection of {name}")
            self.found[self._pending[0].module] = Projections(*self._pending, values, weight)
            self._pending, self._layers = None, [self._image]
        noise = _draw(output.shape, self._generator).to(output).requires_grad_()
        self._layers.append(_Layer(input, weight, noise))
        return noise.clone()  # networks work in place on it

    def _map(self, attention: Attention, scores: Tensor) -> None:
        """Find queries and keys from the scores of all heads, [B, H, Q, K], or [H, Q, K] of one image."""
        name = attention.unit.name
        scores_hqk = scores[0] if scores.ndim == 4 else scores
        if scores_hqk.shape[-1] < 2:
            raise _UnknownWeightsError(f"{name} attends to one token")
        found = [_find_query_key(score_qk, self._layers, name) for score_qk in scores_hqk]
        queries, keys = [query for query, _ in found], [key for _, key in found]
        for heads in (queries, keys):
            rows = [(id(head.weight), row) for head in heads for row in head.rows.tolist()]
            if len(set(rows)) != len(rows):
                raise _UnknownWeightsError(f"the heads of {name} share queries or keys")
        self._pending = attention, queries, keys
        # What enters the queries passes by the attention, too, as the state of its block.
        asked = [layer for layer in self._layers if layer.weight is queries[0].weight][-1]
        before = _depends(asked.entering, self._layers, _draw(asked.entering.shape))
        self._before = [layer for layer, used in zip(self._layers, before, strict=True) if used.any()]
        self._layers = [layer for layer, used in zip(self._layers, before, strict=True) if not used.any()]


def _draw(shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
    return torch.randn(*shape, generator=generator or torch.Generator().manual_seed(1))


def _depends(output: Tensor, layers: Sequence[_Layer], outer: Tensor | None = None) -> list[Tensor]:
    """Return the numbers, of those that each layer returned, that an output depends on: True, [positions, out].

    The output is one number, or a tensor of which `outer` gives the share of each number.
    """
    noise = [layer.noise for layer in layers]
    if not output.requires_grad or not noise:
        return [torch.zeros_like(x, dtype=torch.bool).flatten(0, -2) for x in noise]
    outer = None if outer is None else outer.to(output)
    found = torch.autograd.grad(output, noise, outer, retain_graph=True, allow_unused=True)
    return [
        (torch.zeros_like(x) if gradient is None else gradient).ne(0).flatten(0, -2)
        for x, gradient in zip(noise, found, strict=True)
    ]


def _find_query_key(score_qk: Tensor, layers: Sequence[_Layer], name: str) -> tuple[Rows, Rows]:
    """Return the queries and keys of one head: score_01 and score_00 have the query in common, and not the key."""
    first, second = _depends(score_qk[0, 0], layers), _depends(score_qk[0, 1], layers)
    both = [one & other for one, other in zip(first, second, strict=True)]
    only = [other & ~one for one, other in zip(first, second, strict=True)]
    query, key = _rows_of(both, layers, f"the queries of {name}"), _rows_of(only, layers, f"the keys of {name}")
    if len(query.rows) != len(key.rows):
        raise _UnknownWeightsError(f"the queries and the keys of a head of {name} are not equally many")
    return query, key


def _rows_of(used: Sequence[Tensor], layers: Sequence[_Layer], what: str) -> Rows:
    """Return the rows of the one layer that were used."""
    chosen = [
        Rows(layer.weight, mask.any(0).nonzero().flatten())
        for layer, mask in zip(layers, used, strict=True)
        if mask.any()
    ]
    if len(chosen) != 1:
        layer = "no linear layer computes" if not chosen else "several linear layers compute"
        raise _UnknownWeightsError(f"{layer} {what}")
    _check_learned(chosen[0].weight, what)
    return chosen[0]


def _check_learned(weight: Tensor, what: str) -> None:
    if not isinstance(weight, nn.Parameter):
        raise _UnknownWeightsError(f"the weight of {what} is computed from others")


def _find_values(
    entering: Tensor, layers: Sequence[_Layer], attention: Attention, queries: list[Rows], keys: list[Rows]
) -> Rows | None:
    """Return the values behind what enters a linear layer, in the order of its channels; None if it reads none.

    Channel c is told by its binary digits, for each of which the channels that have it are asked for at once.
    """
    first, channels, name = entering.flatten(0, -2)[0], torch.arange(entering.shape[-1]), attention.unit.name

    def values_of(outer: Tensor) -> list[Tensor]:
        used = _depends(first, layers, outer)
        for layer, mask in zip(layers, used, strict=True):
            for part in (*queries, *keys):
                if part.weight is layer.weight:
                    mask[:, part.rows] = False
        return used

    used = values_of(_draw((len(channels),)))
    if not any(mask.any(1).sum() > 1 for mask in used):  # values come from several tokens
        return None
    values = _rows_of(used, layers, f"the values of {name}")
    numbers = torch.zeros(len(values.rows), dtype=torch.long)
    for digit in range((len(channels) - 1).bit_length()):
        masks = values_of((channels >> digit) & 1)
        numbers += torch.stack([mask.any(0)[values.rows].cpu() for mask in masks if mask.any()]).any(0).long() << digit
    if not torch.equal(numbers.sort().values, channels):
        raise _UnknownWeightsError(f"the values of {name} are not what its projection reads, channel by channel")
    return Rows(values.weight, values.rows[numbers.argsort().to(values.rows.device)])


def _read_multi_head(attention: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Projections:
    """Return the weights of PyTorch's `multi_head_attention_forward`."""
    call = MHA_SIGNATURE.bind(*args, **kwargs).arguments
    if call.get("use_separate_proj_weight"):
        weights = [call[f"{part}_proj_weight"] for part in "qkv"]
        query, key, value = (Rows(weight, torch.arange(len(weight))) for weight in weights)
    else:
        weight = call["in_proj_weight"]
        query, key, value = (Rows(weight, rows) for rows in torch.arange(len(weight)).chunk(3))
    heads = int(call["num_heads"])
    queries, keys = ([Rows(part.weight, rows) for rows in part.rows.chunk(heads)] for part in (query, key))
    return Projections(attention, queries, keys, value, call["out_proj_weight"])
