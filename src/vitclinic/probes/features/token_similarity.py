"""Similarity of the tokens of an image, layer by layer [gong2021 Sec. 3; wang2022 Eq. 5].

Shapes: B images, N patches (positions of the grid), D channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic._core.errors import ModelError
from vitclinic._core.precision import upcast
from vitclinic._core.registry import FigureSpec, KeyScalars
from vitclinic._core.statistics import RunningMean
from vitclinic.anatomy import Site
from vitclinic.data import Batch
from vitclinic.data.randomness import generator
from vitclinic.probes.features.states import State, spatial_states
from vitclinic.probes.probe import DoesNotApply, Need, Result, StreamingProbe, Tally, mean_scalar, register, unit_row
from vitclinic.probes.subject import Subject

_BLOCK = 128
"""Maximum number of tokens whose pairwise products are computed at once."""


class Directions(NamedTuple):
    """Tokens as unit vectors, u_i = h_i / |h_i|; zero for tokens that are zero."""

    unit_bnd: Tensor
    defined_bn: Tensor
    """True for tokens that are not zero."""

    @property
    def count_b(self) -> Tensor:
        """Number of nonzero tokens of each image."""
        return self.defined_bn.sum(dim=1).double()


def directions(h_bnd: Tensor) -> Directions:
    """Return tokens as unit vectors, in float32 at least."""
    h_bnd = upcast(h_bnd)
    if h_bnd.stride(-1) == 1:
        lengths_bn: Tensor = torch.linalg.vector_norm(h_bnd, dim=-1)
    else:  # feature maps: PyTorch is slow at norms over strided channels
        lengths_bn = (h_bnd * h_bnd).sum(dim=-1).sqrt()
    if not lengths_bn.isfinite().all():
        raise ModelError("tokens of some image are not finite, or too large to normalize.")
    defined_bn = lengths_bn > 0
    return Directions(h_bnd * torch.where(defined_bn, 1 / lengths_bn, 0)[..., None], defined_bn)


def cosine(tokens: Directions) -> Tensor:
    """Return the mean cosine between two different tokens of each image, [B] [wang2022 Eq. 5], in O(ND).

        1 / (n (n - 1)) sum_{i != j} u_i . u_j = (|sum_i u_i|^2 - n) / (n (n - 1))

    over the n nonzero tokens; NaN if there are fewer than two.

    Example:
        >>> cosine(directions(torch.tensor([[[1.0, 0.0], [-2.0, 0.0], [0.0, 0.0]]]))).item()
        -1.0
    """
    total_bd = tokens.unit_bnd.sum(dim=1).double()
    return _per_pair(total_bd.square().sum(dim=1), tokens.count_b)


def absolute_cosine(tokens: Directions) -> Tensor:
    """Return the mean absolute cosine between two different tokens of each image, [B] [gong2021 Sec. 3].

        1 / (n (n - 1)) sum_{i != j} |u_i . u_j|

    over the n nonzero tokens; NaN if there are fewer than two. The Gram matrix is computed block by block.

    Example:
        >>> tokens = directions(torch.tensor([[[1.0, 0.0], [-2.0, 0.0], [0.0, 3.0]]]))
        >>> round(absolute_cosine(tokens).item(), 4)
        0.3333
    """
    return _per_pair(_gram_sum(tokens.unit_bnd), tokens.count_b)


def _per_pair(total_b: Tensor, count_b: Tensor) -> Tensor:
    """Return the mean over pairs of different tokens from a sum over all pairs, in which a token with itself adds 1."""
    return ((total_b - count_b) / (count_b * (count_b - 1))).masked_fill(count_b < 2, math.nan)


def _gram_sum(unit_bnd: Tensor) -> Tensor:
    """Return sum_ij |u_i . u_j| of each image, [B]; by symmetry, half of the off-diagonal blocks is enough."""
    tokens = unit_bnd.shape[1]
    if tokens <= _BLOCK:
        return _absolute_sum(unit_bnd, unit_bnd)
    first_bnd, second_bnd = unit_bnd[:, : tokens // 2], unit_bnd[:, tokens // 2 :]
    return _gram_sum(first_bnd) + _gram_sum(second_bnd) + 2 * _absolute_sum(first_bnd, second_bnd)


def _absolute_sum(first_bnd: Tensor, second_bnd: Tensor) -> Tensor:
    return (first_bnd @ second_bnd.mT).abs_().sum(dim=-1).sum(dim=-1, dtype=torch.float64)


@register
class TokenSimilarity(StreamingProbe):
    """Cosine between the patches of an image after each unit, absolute [gong2021] and signed [wang2022 Eq. 5].

    1 / (n (n - 1)) sum_{i != j} |u_i . u_j|, and the same without the absolute value, with u_i = h_i / |h_i|. The stem
    and the position embedding count as units. Prefix tokens and patches that are zero are left out. In a convolutional
    network, positions are the patches.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> 0 < TokenSimilarity()(model, loader).scalars["absolute_cosine_last"].value < 1
        True
    """

    name = "token_similarity"
    group = "Representation"
    rank = 70
    title = "Similarity of patches"
    question = "Do the patches of an image become alike with depth?"
    paper = "Gong et al. 2021, Fig. 1b, 3 (G1); Wang et al. 2022, Fig. 1 (W3)"
    key_scalars: ClassVar[KeyScalars] = {
        "absolute_cosine_last": "lower",
        "cosine_last": None,
        "absolute_cosine_rise": None,
    }
    figures = (
        FigureSpec(
            name="token-similarity-depth",
            kind="layers",
            values={"absolute_cosine": "absolute cosine", "cosine": "cosine"},
            title="Similarity of patches by depth",
            reading="Each point is the mean cosine between two patches of an image after a unit, stem and position"
            " embedding included: 1 if all point the same way, 0 if they are orthogonal. A line that climbs to the"
            " end is over-smoothing, which Gong et al. saw in deep ViTs and not in a ResNet; Wang et al. look at its"
            " beginning, where a convolutional stem should lower it.",
        ),
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"anatomy"})

    tokens: Annotated[int, Field(ge=2)] = Field(
        256,
        description="maximum number of patches per image for the absolute cosine (a random sample for each image)",
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
        self._batch: dict[State, NDArray[np.float64]] = {}

    def taps(self) -> Mapping[State, Site]:
        return {state: state.site for state in self.states}

    def begin_batch(self, batch: Batch) -> None:
        self.samples.start(int(batch.indices[0]))

    def update(self, key: State, activation: Tensor) -> None:
        try:
            tokens = directions(key.tokens(activation))
        except ModelError as error:
            raise ModelError(f"after {key.unit.name}, {error}") from error
        self._batch[key] = absolute_cosine(self.samples.of(tokens)).cpu().numpy()
        self.absolute[key].add(_drop_nan(self._batch[key]))
        self.signed[key].add(_drop_nan(cosine(tokens).cpu().numpy()))

    def end_batch(self, *_: object) -> None:
        inside = [state for state in self.states if state.unit.block is not None]
        if len(inside) > 1:
            self.rise.add(_drop_nan(self._batch[inside[-1]] - self._batch[inside[0]]))

    def sums(self) -> dict[str, RunningMean]:
        means = {"signed": self.signed, "absolute": self.absolute}
        by_name = {f"{name} {state.unit.name}": mean for name, found in means.items() for state, mean in found.items()}
        return {"rise": self.rise, **by_name}

    def finish(self) -> Result:
        layers = self._layers()
        if not layers:
            raise DoesNotApply("no image has two nonzero patches to compare.")
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
        """Return the states in which some image has two patches to compare."""
        return [state for state in self.states if self.absolute[state].n and self.signed[state].n]


def _drop_nan(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values of images with two tokens to compare."""
    return values[~np.isnan(values)]


class _Samples:
    """Random samples of at most `most` positions, one for each image.

    A sample depends on the seed, the number of positions and the image's index, not on the batch.
    """

    def __init__(self, seed: int, most: int) -> None:
        self.seed = seed
        self.most = most
        self.first = 0
        """Index of the first image of the current batch."""
        self._places: dict[int, Tensor] = {}

    def of(self, tokens: Directions) -> Directions:
        """Return `most` tokens of each image of the current batch, or all of them if there are no more."""
        batch, count = tokens.defined_bn.shape
        if count <= self.most:
            return tokens
        rows_b1 = torch.arange(batch, device=tokens.defined_bn.device)[:, None]
        places_bn = self._of_batch(batch, count).to(rows_b1.device)
        return Directions(tokens.unit_bnd[rows_b1, places_bn], tokens.defined_bn[rows_b1, places_bn])

    def start(self, first: int) -> None:
        """Start a batch whose first image has the index `first`."""
        self.first = first
        self._places = {}

    def _of_batch(self, batch: int, count: int) -> Tensor:
        """Return the sampled positions of each image, [B, most]; the same for all states with `count` positions."""
        if count not in self._places:
            images = range(self.first, self.first + batch)
            orders = [generator("token_similarity", self.seed, count, image).permutation(count) for image in images]
            self._places[count] = torch.from_numpy(np.stack(orders)[:, : self.most])
        return self._places[count]
