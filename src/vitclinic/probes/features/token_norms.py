"""Norms of tokens by layer and position, and tokens that stand out by theirs (Darcet et al. 2024).

Shapes: B images, N patches (positions of the grid), C channels, H x W the grid, P prefix tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic._core.precision import upcast
from vitclinic._core.records import UnitRow
from vitclinic._core.registry import KeyScalars
from vitclinic._core.statistics import RunningMean
from vitclinic.anatomy import Site
from vitclinic.probes.features.states import State, spatial_states
from vitclinic.probes.probe import (
    DoesNotApply,
    Need,
    Result,
    StreamingProbe,
    Tally,
    check_finite,
    mean_scalar,
    register,
    unit_row,
)
from vitclinic.probes.subject import Subject

_NORMAL = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""

EDGES: NDArray[np.float64] = 10 ** np.linspace(-3, 5, 81)
"""Ends of the bins of the distribution, ten a decade; what lies outside counts in the first or the last bin."""


def token_norms(maps_bchw: Tensor) -> Tensor:
    """Return the l2 norm over channels at each position of feature maps [B, C, H, W], [B, H, W] in float64.

    Example:
        >>> token_norms(torch.tensor([3.0, 4.0]).view(1, 2, 1, 1)).item()
        5.0
    """
    maps_bchw = upcast(maps_bchw)
    if maps_bchw.stride(1) == 1:
        norms: Tensor = torch.linalg.vector_norm(maps_bchw, dim=1)
        return norms.double()
    return (maps_bchw * maps_bchw).sum(1).sqrt().double()  # PyTorch is slow at norms over strided channels


def find_outliers(norms_bn: Tensor, ratio: float, score: float) -> Tensor:
    """Return which tokens of each image have a norm far above that of the image's other tokens, bool [B, N].

    Token i stands out if log |h_i| - m > max(log ratio, score * 1.4826 * MAD), where m and MAD are the median of the
    image's log norms and the median of their distances from it. Tokens that are zero have no logarithm: they count in
    neither median, and do not stand out.
    """
    logs_bn = torch.where(norms_bn > 0, norms_bn.double().log(), torch.nan)
    above_bn = logs_bn - _median(logs_bn)[:, None]
    spread_b = _NORMAL * _median(above_bn.abs())
    return above_bn > (score * spread_b).clamp_min(math.log(ratio))[:, None]


def _median(x_bn: Tensor) -> Tensor:
    """Return the median of the numbers of each row that are not NaN, the mean of the middle two if their count is even.

    NaN if there is none.
    """
    ascending_bn = x_bn.sort(dim=1).values  # NaN last
    count_b = (~x_bn.isnan()).sum(1)
    middle_b2 = torch.stack(((count_b - 1).clamp_min(0) // 2, count_b // 2), dim=1).clamp_max(x_bn.shape[1] - 1)
    return ascending_bn.gather(1, middle_b2).mean(1)


@register
class TokenNorms(StreamingProbe):
    """L2 norm of every token by layer and position, and the share that stands out (Darcet et al. 2024, Fig. 3, 4).

    A patch stands out in the state after a unit if its norm is more than `ratio` times the median of the image's
    patches, and more than `score` robust standard deviations above it on a log scale; or, with `threshold`, if its norm
    is above that. Prefix tokens are reported apart. In a convolutional network, positions are the patches.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> TokenNorms()(model, loader).scalars["outliers_last"].value
        0.0
    """

    name = "token_norms"
    group = "Representation"
    rank = 75
    title = "Norms of tokens"
    question = "Do some patches stand out by their norm?"
    paper = "Darcet et al. 2024 (Fig. 3, 4)"
    key_scalars: ClassVar[KeyScalars] = {"outliers_most": "lower", "outliers_last": "lower", "peak_last": None}
    needs: ClassVar[frozenset[Need]] = frozenset({"anatomy"})

    ratio: Annotated[float, Field(gt=1, allow_inf_nan=False)] = Field(
        3.0, description="how many times the median norm of the image's patches an outlier has at least"
    )
    score: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        3.5, description="how many robust standard deviations of the log norms it lies above the median at least"
    )
    threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="count every norm above this number instead (150 for DINOv2 in the paper)"
    )

    def begin(self, subject: Subject) -> Tally:
        return _Tally(self, spatial_states(subject.anatomy))

    def outliers(self, norms_bn: Tensor) -> Tensor:
        """Return which tokens count as outliers, bool [B, N]."""
        if self.threshold is not None:
            return norms_bn > self.threshold
        return find_outliers(norms_bn, self.ratio, self.score)


class _Layer:
    """Running means of the state after one unit."""

    ROW = ("norm", "peak", "outliers", "images_with_outliers", "prefix_norm")

    def __init__(self) -> None:
        self.means = {part: RunningMean() for part in (*self.ROW, "map", "distribution", "prefix")}

    def add(self, norms_bhw: Tensor, outlying_bn: Tensor, prefix_bp: Tensor) -> None:
        norms_bn = norms_bhw.flatten(1)
        # Of the patches that are not zero: most positions of some feature maps are.
        peak_b = norms_bn.amax(1) / _median(norms_bn.where(norms_bn > 0, torch.nan))
        found = {
            "norm": norms_bn.mean(1),
            "peak": peak_b[~peak_b.isnan()],
            "outliers": outlying_bn.double().mean(1),
            "images_with_outliers": outlying_bn.any(1).double(),
            "prefix_norm": prefix_bp.mean(1) if prefix_bp.numel() else prefix_bp,
            "map": norms_bhw,
            "distribution": _distribution(norms_bn),
            "prefix": prefix_bp,
        }
        for part, values in found.items():
            if values.numel():
                self.means[part].add(values.cpu().numpy())

    def row(self, state: State) -> UnitRow:
        return unit_row(state.unit, **{part: mean_scalar(self.means[part]) for part in self.ROW if self.means[part].n})


def _distribution(norms_bn: Tensor) -> Tensor:
    """Return the share of each image's norms in each bin, [B, bins]."""
    bins, (images, tokens) = len(EDGES) - 1, norms_bn.shape
    inner = torch.from_numpy(EDGES[1:-1]).to(norms_bn.device)
    first_b1 = bins * torch.arange(images, device=norms_bn.device)[:, None]
    places = torch.bucketize(norms_bn.contiguous(), inner, right=True) + first_b1
    return torch.bincount(places.flatten(), minlength=images * bins).view(images, bins).double() / tokens


class _Tally(Tally):
    def __init__(self, probe: TokenNorms, states: tuple[State, ...]) -> None:
        self.probe = probe
        self.states = states
        self.layers = {state: _Layer() for state in states}

    def taps(self) -> Mapping[State, Site]:
        return {state: state.site for state in self.states}

    def update(self, key: State, activation: Tensor) -> None:
        norms_bhw = token_norms(key.maps(activation))
        check_finite(norms_bhw.cpu(), key.unit)
        if norms_bhw[0].numel() == 1:  # a single position cannot stand out
            return
        prefix_bp = norms_bhw.new_zeros(len(norms_bhw), 0)
        if activation.ndim == 3:
            prefix_bpc = key.anatomy.prefix(key.site, activation)
            prefix_bp = token_norms(prefix_bpc.transpose(1, 2)[..., None])[..., 0]
            check_finite(prefix_bp.cpu(), key.unit)
        self.layers[key].add(norms_bhw, self.probe.outliers(norms_bhw.flatten(1)), prefix_bp)

    def sums(self) -> dict[str, RunningMean]:
        layers = ((state.unit.name, layer) for state, layer in self.layers.items())
        return {f"{part} {name}": mean for name, layer in layers for part, mean in layer.means.items()}

    def finish(self) -> Result:
        layers = {state: layer for state, layer in self.layers.items() if layer.means["norm"].n}
        if not layers:
            raise DoesNotApply("every feature map of the network has a single position, so none can stand out.")
        rows = [layer.row(state) for state, layer in layers.items()]
        # Before the blocks norms are the image's own contrast.
        inside = [row for state, row in zip(layers, rows, strict=True) if state.unit.block is not None] or rows
        last, most = rows[-1].values, max(inside, key=lambda row: row.values["outliers"].value).values
        scalars = {f"{name}_last": last[name] for name in ("outliers", "images_with_outliers", "peak") if name in last}
        scalars |= {"outliers_most": most["outliers"], "images_with_outliers_most": most["images_with_outliers"]}
        arrays = {
            "mean_norm": _pad([layer.means["map"].mean for layer in layers.values()]),
            "distribution": np.stack([layer.means["distribution"].mean for layer in layers.values()]),
            "edges": EDGES,
        }
        prefix = [layer.means["prefix"] for layer in layers.values()]
        if any(each.n for each in prefix):
            arrays["prefix_norm"] = _pad([each.mean if each.n else np.zeros(0) for each in prefix])
        return Result(scalars, rows, arrays)


def _pad(values: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Stack arrays of different sizes, padded at the end of each axis with NaN."""
    shape = np.max([value.shape for value in values], axis=0)
    wide = [[(0, int(most - size)) for most, size in zip(shape, value.shape, strict=True)] for value in values]
    return np.stack([np.pad(one, by, constant_values=np.nan) for one, by in zip(values, wide, strict=True)])
