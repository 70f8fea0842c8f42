"""How alike the tokens of an image are, layer by layer [gong2021 Sec. 3; wang2022 Eq. 5].

Shapes: B images, N patches (positions of the grid), D channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vitclinic.anatomy import Site
from vitclinic.data.randomness import generator
from vitclinic.probes.features.states import State, spatial_states
from vitclinic.probes.probe import DoesNotApply, Need, Result, StreamingProbe, Tally, mean_scalar, unit_row
from vitclinic.probes.registry import register
from vitclinic.probes.subject import Subject
from vitclinic.statistics import RunningMean

Values = np.ma.MaskedArray[Any, np.dtype[np.float64]]

_BLOCK = 128
"""The most tokens whose products with one another are computed at once."""


def unit_vectors(h_bnd: Tensor) -> Tensor:
    """Each token at length 1, in float32 at least; one without a length stays zero."""
    h_bnd = h_bnd.float() if h_bnd.dtype.itemsize < 4 else h_bnd
    lengths_bn1: Tensor = torch.linalg.vector_norm(h_bnd, dim=-1, keepdim=True)
    return h_bnd / lengths_bn1.masked_fill_(lengths_bn1 == 0, 1)


def cosine(unit_bnd: Tensor) -> Tensor:
    """The mean cosine between two different tokens of each image [B] [wang2022 Eq. 5], in O(ND).

        1 / (n (n - 1)) sum_{i != j} u_i . u_j = (|sum_i u_i|^2 - n) / (n (n - 1))

    `unit_bnd` are vectors of length 1 or 0, of which those of length 1 count; NaN where they are fewer than two.

    Example:
        >>> cosine(unit_vectors(torch.tensor([[[1.0, 0.0], [-2.0, 0.0], [0.0, 0.0]]]))).item()
        -1.0
    """
    count_b = _count(unit_bnd)
    total_bd = unit_bnd.sum(dim=1, dtype=torch.float64)
    return _per_pair(total_bd.square().sum(dim=1) - count_b, count_b)


def absolute_cosine(unit_bnd: Tensor) -> Tensor:
    """The mean absolute cosine between two different tokens of each image [B] [gong2021 Sec. 3].

        1 / (n (n - 1)) sum_{i != j} |u_i . u_j|

    from the Gram matrix, of which never more than a block is kept. `unit_bnd` as for `cosine`.

    Example:
        >>> round(absolute_cosine(unit_vectors(torch.tensor([[[1.0, 0.0], [-2.0, 0.0], [0.0, 3.0]]]))).item(), 4)
        0.3333
    """
    count_b = _count(unit_bnd)
    return _per_pair(_gram_sum(unit_bnd) - count_b, count_b)


def _count(unit_bnd: Tensor) -> Tensor:
    """How many tokens of each image have a length, [B]."""
    lengths_bn: Tensor = torch.linalg.vector_norm(unit_bnd, dim=-1)
    return (lengths_bn != 0).sum(dim=1).double()


def _per_pair(total_b: Tensor, count_b: Tensor) -> Tensor:
    return (total_b / (count_b * (count_b - 1))).masked_fill(count_b < 2, math.nan)


def _gram_sum(unit_bnd: Tensor) -> Tensor:
    """sum_ij |u_i . u_j| of each image [B]. The matrix is symmetric: of what is off its diagonal blocks, half does."""
    tokens = unit_bnd.shape[1]
    if tokens <= _BLOCK:
        return _absolute_sum(unit_bnd, unit_bnd)
    first_bnd, second_bnd = unit_bnd[:, : tokens // 2], unit_bnd[:, tokens // 2 :]
    return _gram_sum(first_bnd) + _gram_sum(second_bnd) + 2 * _absolute_sum(first_bnd, second_bnd)


def _absolute_sum(first_bnd: Tensor, second_bnd: Tensor) -> Tensor:
    return (first_bnd @ second_bnd.mT).abs_().sum(dim=-1).sum(dim=-1, dtype=torch.float64)


@register
class TokenSimilarity(StreamingProbe):
    """Cosine between the patches of an image, absolute [gong2021] and signed [wang2022 Eq. 5], after each unit.

    The stem and the position embedding are layers of their own. Prefix tokens do not count, nor do patches that are
    zero. In a convolutional network the positions are the patches.
    """

    name: ClassVar[str] = "token_similarity"
    needs: ClassVar[frozenset[Need]] = frozenset({"anatomy"})

    tokens: Annotated[int, Field(ge=2)] = Field(
        256,
        description="the most patches of an image between which the absolute cosine is taken: others for each image",
    )

    def begin(self, subject: Subject) -> Tally:
        return _Tally(subject, self.tokens)


class _Tally(Tally):
    def __init__(self, subject: Subject, most: int) -> None:
        self.states = spatial_states(subject.anatomy)
        self.signed = {state: RunningMean() for state in self.states}
        self.absolute = {state: RunningMean() for state in self.states}
        self.rise = RunningMean()
        self.samples = _Samples(subject.seed, most)
        self._batch: dict[State, Values] = {}

    def taps(self) -> Mapping[State, Site]:
        return {state: state.site for state in self.states}

    def update(self, key: State, activation: Tensor) -> None:
        unit_bnd = unit_vectors(key.tokens(activation))
        self.signed[key].add(_of_pairs(cosine, unit_bnd).compressed())
        self._batch[key] = _of_pairs(absolute_cosine, self.samples.of(unit_bnd))
        self.absolute[key].add(self._batch[key].compressed())

    def end_batch(self, *_: object) -> None:
        self.samples.done += len(self._batch[self.states[0]])
        inside = [state for state in self._layers() if state.unit.block is not None]
        if len(inside) > 1:
            self.rise.add((self._batch[inside[-1]] - self._batch[inside[0]]).compressed())

    def finish(self) -> Result:
        layers = self._layers()
        if not layers:
            raise DoesNotApply("no image has two patches that are not zero, so that there is nothing to compare.")
        rows = [
            unit_row(
                state.unit,
                absolute_cosine=mean_scalar(self.absolute[state]),
                cosine=mean_scalar(self.signed[state]),
            )
            for state in layers
        ]
        scalars = {f"{name}_last": value for name, value in rows[-1].values.items()}
        if self.rise.n:
            scalars["absolute_cosine_rise"] = mean_scalar(self.rise)
        return Result(scalars, rows)

    def _layers(self) -> list[State]:
        """The states in which an image has two patches to compare."""
        return [state for state in self.states if self.absolute[state].n and self.signed[state].n]


def _of_pairs(measure: Callable[[Tensor], Tensor], unit_bnd: Tensor) -> Values:
    """What is measured of each image, masked where there are not two tokens to compare."""
    few = (_count(unit_bnd) < 2).cpu().numpy()
    return np.ma.masked_array(measure(unit_bnd).cpu().numpy(), few)


class _Samples:
    """For each image other positions, where there are more than `most`: all of them have had a turn after a while.

    Which ones depends on the seed, the number of positions and the image's place, not on the batch.
    """

    def __init__(self, seed: int, most: int) -> None:
        self.seed = seed
        self.most = most
        self.done = 0
        """Images of earlier batches."""
        self._orders: dict[int, Tensor] = {}

    def of(self, unit_bnd: Tensor) -> Tensor:
        batch, tokens, channels = unit_bnd.shape
        if tokens <= self.most:
            return unit_bnd
        if tokens not in self._orders:
            order = generator("token_similarity", self.seed, tokens).permutation(tokens)
            self._orders[tokens] = torch.from_numpy(order).to(unit_bnd.device)
        start_b1 = self.most * (self.done + torch.arange(batch, device=unit_bnd.device)[:, None])
        places_bn = self._orders[tokens][(start_b1 + torch.arange(self.most, device=unit_bnd.device)) % tokens]
        return unit_bnd.gather(1, places_bn[..., None].expand(-1, -1, channels))
