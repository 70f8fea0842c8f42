"""Mimetic initialization: attention that starts as trained attention looks, or as a convolution.

Shapes: N patches on a grid, D channels, K channels of a head. Weights are as in the papers, x W, so a product that a
token meets reads from left to right.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy, Unit, taps
from vitclinic.anatomy.removal import Erase
from vitclinic.data import ImageSpec
from vitclinic.treatments.attention_projections import Projections, find_projections
from vitclinic.treatments.parts import examine, missing, run_once
from vitclinic.treatments.treatment import Treatment, register

OFFSETS = ((0, 0), (-1, 0), (0, 1), (0, -1), (1, 0), (-1, -1), (-1, 1), (1, -1), (1, 1))
"""Rows and columns from a patch to the one that a head attends to, head by head, in the order of zheng2025's code."""
_IMPULSE, _NORM, _POSITION = 1000.0, 7.0, 0.36
"""zheng2025's code: scores 1000 at the impulse and 3 times a truncated normal of deviation 0.6 elsewhere, weights of
norm 7 a head, and positions 18 times as large as timm's, whose deviation is 0.02."""


def split_product(product_dd: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return L and R, both [D, rank], with L R^T the best approximation of that rank: U S^1/2 and V S^1/2."""
    u, s, vh = torch.linalg.svd(product_dd)
    root = s[:rank].sqrt()
    return u[:, :rank] * root, vh[:rank].mT * root


def mimetic_factors(noise_dd: Tensor, rank: int, alpha: float, beta: float) -> tuple[Tensor, Tensor]:
    """Return the factors of alpha Z + beta I, for noise Z of deviation 1 / sqrt(D)."""
    identity = torch.eye(len(noise_dd), dtype=noise_dd.dtype, device=noise_dd.device)
    return split_product(alpha * noise_dd + beta * identity, rank)


def impulse_scores(grid: tuple[int, int], offset: tuple[int, int], noise_nn: Tensor) -> Tensor:
    """Return the scores of a head that attends to the patch at an offset, [N, N]: 1000 there, noise elsewhere."""
    rows, columns = (torch.arange(length) for length in grid)
    at_row = rows[:, None] + offset[0] == rows
    at_column = columns[:, None] + offset[1] == columns
    impulse = torch.einsum("ab,cd->acbd", at_row, at_column).flatten(2).flatten(0, 1)
    return torch.where(impulse, _IMPULSE, noise_nn)


def convolution_factors(positions_nd: Tensor, scores_nn: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return W_Q and W_K, [D, K] of norm 7, with P W_Q W_K^T P^T near the scores up to a factor, P = LN(positions).

    They are the factors of P^+ scores P^+T, where P^+ = V_K S_K^-1 U_K^T is the pseudo-inverse by the first K singular
    values of P = U S V^T; K is `rank`, or less if P has fewer that are not zero.
    """
    return _fit_scores(*_invert_positions(positions_nd, rank), scores_nn)


def _invert_positions(positions_nd: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return V_K [D, K] and U_K S_K^-1 [N, K]; the pseudo-inverse is the first times the second transposed."""
    u, s, vh = torch.linalg.svd(F.layer_norm(positions_nd, positions_nd.shape[-1:]), full_matrices=False)
    kept = min(rank, int((s > s[0] * max(positions_nd.shape) * torch.finfo(s.dtype).eps).sum()))
    return vh[:kept].mT, u[:, :kept] / s[:kept]


def _fit_scores(basis_dk: Tensor, inverse_nk: Tensor, scores_nn: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of V_K (S_K^-1 U_K^T scores U_K S_K^-1) V_K^T, by decomposing what is in parentheses."""
    left, right = split_product(inverse_nk.mT @ scores_nn @ inverse_nk, inverse_nk.shape[1])
    return basis_dk @ left * (_NORM / left.norm()), basis_dk @ right * (_NORM / right.norm())


def sinusoidal_positions(grid: tuple[int, int], width: int) -> Tensor:
    """Return sine and cosine of column and row at width / 4 wavelengths from 2 pi to 10000 * 2 pi, [N, D]."""
    quarter = width // 4
    frequencies = 10000.0 ** -(torch.arange(quarter, dtype=torch.float64) / max(1, quarter - 1))
    rows, columns = (torch.arange(length, dtype=torch.float64) for length in grid)
    row_hwq = (rows[:, None, None] * frequencies).expand(*grid, -1)
    column_hwq = (columns[None, :, None] * frequencies).expand(*grid, -1)
    return torch.cat((column_hwq.sin(), column_hwq.cos(), row_hwq.sin(), row_hwq.cos()), dim=-1).flatten(0, 1)


@register
class MimeticInit(Treatment):
    """Attention initialized with W_Q W_K^T near the identity and W_V W_proj near minus it (Trockman & Kolter 2023).

    Attributes:
        kind: Queries and keys near the identity, or as a convolution (Zheng et al. 2025).
        alpha1: Weight of the noise in W_Q W_K^T.
        beta1: Weight of the identity in W_Q W_K^T.
        alpha2: Weight of the noise in W_V W_proj.
        beta2: Weight of the negative identity in W_V W_proj.
        positions: Keep the position embedding, or start it as sines and cosines.
    """

    name: ClassVar[str] = "mimetic_init"
    paper: ClassVar[str] = "trockman2023; zheng2025 (kind: convolution)"
    changes: ClassVar[str] = "attention starts with W_Q W_K^T near the identity and W_V W_proj near minus the identity"
    costs: ClassVar[str] = "nothing in training; a singular value decomposition for each head when a network is built"
    part: ClassVar[str] = "attention by one softmax over tokens, with linear queries, keys, values and projection"

    kind: Literal["mimetic", "convolution"] = Field(
        "mimetic",
        description="mimetic: W_Q W_K^T near the identity; convolution: each head attends to one of the nine nearest"
        " patches, by means of the position embedding",
    )
    alpha1: float = Field(0.7, ge=0, description="weight of the noise in W_Q W_K^T; of kind mimetic")
    beta1: float = Field(0.7, ge=0, description="weight of the identity in W_Q W_K^T; of kind mimetic")
    alpha2: float = Field(0.4, ge=0, description="weight of the noise in W_V W_proj")
    beta2: float = Field(0.4, ge=0, description="weight of the negative identity in W_V W_proj")
    positions: Literal["keep", "sinusoidal"] = Field(
        "keep", description="sinusoidal: the learned position embedding starts as sines and cosines of row and column"
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> MimeticInit:
        if self.kind == "convolution" and (self.alpha1, self.beta1) != (0.7, 0.7):
            raise ValueError("alpha1 and beta1 have no effect with kind convolution: remove them")
        if not (self.alpha1 + self.beta1 and self.alpha2 + self.beta2):
            raise ValueError("alpha and beta of a product cannot both be 0: its weights would never learn")
        return self

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        anatomy = examine(self, network, spec)
        found = find_projections(self, anatomy, spec)
        maps = [weights.attention.unit.attention for weights in found]
        if not any(one is None or one.seen is None or one.seen.queries.shape[1] for one in maps):
            raise missing(self, network, "only its class token attends to the grid")
        for weights in found:
            self._check(weights, network)
        positions = None
        if self.kind == "convolution" or self.positions == "sinusoidal":
            positions = _Positions.of(self, anatomy, spec)
        if positions is not None and self.kind == "convolution":
            for weights in found:
                positions.check(self, weights, spec)
        if positions is not None:
            positions.start(self.positions == "sinusoidal", self.kind == "convolution")
        for weights in found:
            self._initialize(weights, positions if self.kind == "convolution" else None)
        return network

    def _check(self, weights: Projections, network: nn.Module) -> None:
        """Raise if a product is not square, or has a higher rank than width."""
        name = weights.attention.unit.name
        for query, key in zip(weights.queries, weights.keys, strict=True):
            if query.width != key.width or len(query.rows) > query.width:
                of = f"{query.width} and {key.width} channels to {len(query.rows)}"
                raise missing(self, network, f"queries and keys of {name} lead from {of}")
        entering, inner = weights.values.width, len(weights.values.rows)
        if len(weights.proj) != entering or inner > entering:
            of = f"{entering} channels over {inner} to {len(weights.proj)}"
            raise missing(self, network, f"values and projection of {name} lead from {of}")

    @torch.no_grad()
    def _initialize(self, weights: Projections, positions: _Positions | None) -> None:
        for head, (query, key) in enumerate(zip(weights.queries, weights.keys, strict=True)):
            rank = len(query.rows)
            if positions is None:
                left, right = mimetic_factors(_noise(query.width), rank, self.alpha1, self.beta1)
            else:
                left, right = positions.factors(head, rank)
            query.fill(left.mT)
            key.fill(right.mT)
        left, right = mimetic_factors(_noise(weights.values.width), len(weights.values.rows), self.alpha2, -self.beta2)
        weights.values.fill(left.mT)
        weights.proj.data.copy_(right)


def _noise(width: int) -> Tensor:
    """Draw Z, [D, D], of deviation 1 / sqrt(D) from torch's generator."""
    return torch.randn(width, width, dtype=torch.float64) / math.sqrt(width)


class _Positions:
    """The learned position embedding of a network: its parameter, the grid, and the tokens before the patches."""

    def __init__(self, network: nn.Module, parameter: nn.Parameter, grid: tuple[int, int], prefix: int) -> None:
        self.network, self.parameter, self.grid, self.prefix = network, parameter, grid, prefix
        self._inverses: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def of(cls, treatment: MimeticInit, anatomy: Anatomy, spec: ImageSpec) -> _Positions:
        """Find it.

        Raises:
            TreatmentError: There is none, or it is not one vector for each patch.
        """
        network = anatomy.network
        asks = "positions sinusoidal" if treatment.positions == "sinusoidal" else "kind convolution"
        units = [unit for unit in anatomy.of_kind("position") if isinstance(unit.removal, Erase)]
        if len(units) != 1:
            raise TreatmentError(
                f"{treatment.name}: {asks} needs one learned position embedding, which {type(network).__name__} does"
                " not have."
            )
        (unit,) = units
        assert isinstance(unit.removal, Erase)
        parameter = unit.removal.parameter
        with taps({"state": unit.output}) as seen:
            run_once(network, spec)
        state_bchw = anatomy.grid(unit.output, seen["state"])
        channels, height, width = state_bchw.shape[1:]
        prefix = parameter.numel() // channels - height * width
        if parameter.shape[-1] != channels or not 0 <= prefix <= unit.output.layout.prefix:
            raise TreatmentError(
                f"{treatment.name}: {asks} needs one position of {channels} channels for each of {height} x {width}"
                f" patches, but the embedding is {tuple(parameter.shape)}."
            )
        if channels % 4 and treatment.positions == "sinusoidal":
            raise TreatmentError(f"{treatment.name}: {asks} needs a width that 4 divides, not {channels}.")
        found = cls(network, parameter, (height, width), prefix)
        if treatment.positions == "keep" and (found.values[prefix:] == found.values[prefix]).all():
            raise TreatmentError(
                f"{treatment.name}: {asks} tells patches apart by their positions, which are all the same: add"
                " positions: sinusoidal."
            )
        return found

    @property
    def values(self) -> Tensor:
        """The embedding as [tokens, D], without its gradient."""
        return self.parameter.data.view(-1, self.parameter.shape[-1])

    def check(self, treatment: Treatment, weights: Projections, spec: ImageSpec) -> None:
        """Raise unless an attention sees all patches of this grid at once."""
        unit: Unit = weights.attention.unit
        with taps({"state": unit.input}) as seen:
            run_once(self.network, spec)
        patches, spec_of = self.grid[0] * self.grid[1], unit.attention
        apart = spec_of is not None and (spec_of.windows or (spec_of.seen is not None and spec_of.seen.windows > 1))
        shape = seen["state"].shape
        if apart or len(shape) != 3 or shape[1:] != (patches + unit.input.layout.prefix, self.parameter.shape[-1]):
            raise missing(treatment, self.network, f"{unit.name} does not attend to the whole grid of positions")

    @torch.no_grad()
    def start(self, sinusoidal: bool, scaled: bool) -> None:
        """Set sines and cosines, or scale what there is to the size that a convolution needs."""
        values = self.values
        if sinusoidal:
            values[self.prefix :] = sinusoidal_positions(self.grid, values.shape[1]).to(values)
        elif scaled:
            values *= _POSITION / values[self.prefix :].double().square().mean().sqrt().to(values)

    def factors(self, head: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return W_Q and W_K of a head, with noise from torch's generator."""
        if rank not in self._inverses:
            self._inverses[rank] = _invert_positions(self.values[self.prefix :].double().cpu(), rank)
        patches = self.grid[0] * self.grid[1]
        noise_nn = 3 * nn.init.trunc_normal_(torch.empty(patches, patches, dtype=torch.float64), std=0.6)
        return _fit_scores(*self._inverses[rank], impulse_scores(self.grid, OFFSETS[head % len(OFFSETS)], noise_nn))
