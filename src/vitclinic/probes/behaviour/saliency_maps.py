"""Saliency maps: where on its image the score of a class comes from, by attention, by gradients, or by both.

Deletion and insertion judge a map: how the probability of a class changes as an image's pixels go, or come, in its
order (RISE).

Shapes: B images, H heads, N = P prefix tokens + h * w patches, C channels, h x w the grid. Of deletion and insertion:
H x W pixels, S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as transforms

from vitclinic.anatomy import Anatomy, AttentionMap, Unit, record_attention, taps
from vitclinic.probes.attention.tally import attention_units
from vitclinic.probes.behaviour.predictions import check_logits
from vitclinic.probes.probe import DoesNotApply
from vitclinic.probes.subject import Subject


def attention_rollout(maps: Sequence[Tensor]) -> Tensor:
    """Return the product of the attention of all layers, [B, N, N] (Abnar and Zuidema 2020).

        R = A_L ... A_1,   A_l = (I + mean over heads of the attention of layer l) / 2

    `maps` are [B, H, N, N], the first layer first; row i of R says from which inputs token i was mixed in the end.
    """
    identity = torch.eye(maps[0].shape[-1], dtype=maps[0].dtype, device=maps[0].device)
    rolled = identity.expand(len(maps[0]), -1, -1)
    for weights in maps:
        rolled = (identity + weights.mean(1)) / 2 @ rolled
    return rolled


def gradient_rollout(maps: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return the relevance of each token for each token, [B, N, N] (Chefer et al. 2021, Eq. 5, 6).

        R <- R + mean over heads of max(0, dy/dA_l * A_l) R,   R = I before the first layer

    for the score y of a class; `gradients` are its derivatives in `maps`, both [B, H, N, N], the first layer first.
    """
    relevance = torch.eye(maps[0].shape[-1], dtype=maps[0].dtype, device=maps[0].device)
    relevance = relevance.expand(len(maps[0]), -1, -1)
    for weights, gradient in zip(maps, gradients, strict=True):
        relevance = relevance + (weights * gradient).clamp_min(0).mean(1) @ relevance
    return relevance


def grad_cam(maps_bchw: Tensor, gradient_bchw: Tensor) -> Tensor:
    """Return max(0, sum_c a_c A_c), a_c the mean over positions of dy/dA_c, [B, h, w] (Selvaraju et al. 2017)."""
    weights_bc = gradient_bchw.mean((2, 3))
    return torch.einsum("bc,bchw->bhw", weights_bc, maps_bchw).clamp_min(0)


_CUT = "the network computes it without (no_grad, or a function without a derivative)"


class Found(NamedTuple):
    """Saliency maps of a batch [B, h, w], in float64, and the unit they were read at, if it was one."""

    maps: Tensor
    unit: Unit | None = None


def score(subject: Subject, images: Tensor, classes: Tensor) -> Tensor:
    """Return the logit of each image's class, [B]."""
    logits = check_logits(subject.logits(images), subject.name)
    return logits.gather(1, classes[:, None])[:, 0]


def roll_attention(subject: Subject, images: Tensor) -> Found:
    """Return maps by attention rollout; they are the same for all classes."""
    seen: list[AttentionMap] = []
    with record_attention(_global_units(subject.anatomy), seen.append), torch.no_grad():
        subject.logits(images)
    _check_square(seen)
    return Found(_of_output(attention_rollout([_row_by_row(one, one.weights.double()) for one in seen]), seen[-1]))


def roll_gradients(subject: Subject, images: Tensor, classes: Tensor) -> Found:
    """Return maps by attention weighted with the gradient of the class."""
    seen: list[AttentionMap] = []
    # Images that require a gradient have a graph behind every map, also in a network that is frozen.
    with torch.enable_grad(), record_attention(_global_units(subject.anatomy), seen.append, grad=True):
        total = score(subject, images.detach().requires_grad_(), classes).sum()
    _check_square(seen)
    sources = [(one.source,) if isinstance(one.source, Tensor) else one.source or () for one in seen]
    flat = [source for group in sources for source in group]
    if total.requires_grad and not all(source.requires_grad for source in flat):
        raise DoesNotApply(f"attention maps have no gradient: {_CUT}; use method=rollout or method=grad_cam.")
    found = iter(torch.autograd.grad(total, flat, allow_unused=True, materialize_grads=True))
    gradients = [[next(found) for _ in group] for group in sources]
    pairs = list(zip(seen, gradients, strict=True))
    arranged = [_row_by_row(one, one.arrange(gradient).double()) for one, gradient in pairs]
    maps = [_row_by_row(one, one.weights.double()) for one in seen]
    return Found(_of_output(gradient_rollout(maps, arranged), seen[-1]))


def weigh_features(subject: Subject, images: Tensor, classes: Tensor, name: str | None) -> Found:
    """Return Grad-CAM's maps of the state after a unit; by default, the last with several positions that matters."""
    anatomy = subject.anatomy
    units = [unit for unit in anatomy.units if unit.output.layout.spatial] if name is None else [anatomy.unit(name)]
    if not all(unit.output.layout.spatial for unit in units) or not units:
        raise DoesNotApply(f"the output of {name or 'every unit'} has no grid, so that it has no map.")
    with torch.enable_grad(), taps({unit.name: unit.output for unit in units}, grad=True) as states:
        total = score(subject, images.detach().requires_grad_(), classes).sum()
        tensors = [states[unit.name] for unit in units]
    if total.requires_grad:
        reached = [(unit, state) for unit, state in zip(units, tensors, strict=True) if state.requires_grad]
        if not reached:
            raise DoesNotApply(f"the output of {name or 'every unit'} has no gradient: {_CUT}.")
        units, tensors = map(list, zip(*reached, strict=True))
    gradients = torch.autograd.grad(total, tensors, allow_unused=True, materialize_grads=True)
    for unit, state, gradient in reversed(list(zip(units, tensors, gradients, strict=True))):
        slope = anatomy.grid(unit.output, gradient)
        if name is not None or (slope[0, 0].numel() > 1 and bool((slope != 0).any())):
            return Found(grad_cam(anatomy.grid(unit.output, state.detach()).double(), slope.double()), unit)
    raise DoesNotApply("no feature map of more than one position has an influence on the class.")


def _global_units(anatomy: Anatomy) -> list[Unit]:
    units = attention_units(anatomy)
    windowed = any(unit.attention is not None and unit.attention.is_windowed for unit in units)
    mixing = len(anatomy.of_kind("msa")) != len(units) or anatomy.of_kind("conv", "token_mlp", "pool")
    if not units or windowed or mixing:
        raise DoesNotApply(
            "attention cannot be followed through this network: it needs global attention in every layer, and nothing"
            " else that mixes positions; use method=grad_cam."
        )
    return units


def _check_square(seen: Sequence[AttentionMap]) -> None:
    shapes = {tuple(one.weights.shape[2:]) for one in seen}
    tokens = {(one.prefix, one.prefix_queries, one.grid, one.query_grid) for one in seen}
    alike = [queries == keys for keys, queries, *_ in tokens] + [grid == queries for *_, grid, queries in tokens]
    if len(shapes) != 1 or len(set(next(iter(shapes)))) != 1 or len(tokens) != 1 or not all(alike):
        raise DoesNotApply("attention cannot be followed through layers with other tokens; use method=grad_cam.")


def _row_by_row(one: AttentionMap, map_bhqk: Tensor) -> Tensor:
    """Return a map, or its gradient, with the patches of both axes row by row: some networks order them otherwise."""
    queries = _order(one.query_positions()[0], one.prefix_queries, one.query_grid[1])
    keys = _order(one.positions()[0], one.prefix, one.grid[1])
    return map_bhqk[:, :, queries.to(map_bhqk.device)][..., keys.to(map_bhqk.device)]


def _order(cells_n2: Tensor, prefix: int, columns: int) -> Tensor:
    """Return which token comes where: those off the grid, and then the cells of each row."""
    cells = (cells_n2[:, 0] * columns + cells_n2[:, 1]).argsort(stable=True)
    return torch.cat((torch.arange(prefix, device=cells.device), prefix + cells))


def _of_output(relevance_bnn: Tensor, last: AttentionMap) -> Tensor:
    """Return the row of the class token or, without one, the mean over the patches, on the grid."""
    rows = relevance_bnn[:, :1] if last.has_class else relevance_bnn[:, last.prefix :]
    return rows.mean(1)[:, last.prefix :].reshape(-1, *last.grid)


Predict = Callable[[Tensor], Tensor]
"""From images [B, C, H, W] to the probability of each one's class, [B]."""

_BLUR = 0.1
"""Standard deviation of the blur, in shorter sides of the image."""


def resize(maps_bhw: Tensor, size: tuple[int, int]) -> Tensor:
    """Return maps on the pixels of an image, bilinearly."""
    return F.interpolate(maps_bhw[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]


def replacement_curve(predict: Predict, start: Tensor, end: Tensor, maps_bhw: Tensor, steps: int) -> Tensor:
    """Return the probabilities as pixels of `start` become those of `end`, highest of the maps first, [B, S + 1].

    The maps are as large as the images. After step s, round(s H W / S) pixels are those of `end`; equal values keep the
    order of the pixels.
    """
    pixels = maps_bhw[0].numel()
    order = maps_bhw.flatten(1).argsort(dim=1, descending=True, stable=True)
    ranks_bhw = order.argsort(dim=1).view_as(maps_bhw)
    counts = [round(step * pixels / steps) for step in range(steps + 1)]
    return torch.stack([predict(torch.where((ranks_bhw < count)[:, None], end, start)) for count in counts], dim=1)


def deletion_curve(predict: Predict, images: Tensor, maps_bhw: Tensor, steps: int) -> Tensor:
    """Return the probabilities as pixels are replaced by the mean colour of their image, [B, S + 1]."""
    return replacement_curve(predict, images, images.mean((2, 3), keepdim=True).expand_as(images), maps_bhw, steps)


def insertion_curve(predict: Predict, images: Tensor, maps_bhw: Tensor, steps: int) -> Tensor:
    """Return the probabilities as pixels of a blurred image become those of the image, [B, S + 1]."""
    return replacement_curve(predict, blur(images), images, maps_bhw, steps)


def blur(images: Tensor) -> Tensor:
    """Return images blurred by a Gaussian of a tenth of their shorter side, mirrored at the borders."""
    side = min(images.shape[2:])
    sigma = _BLUR * side
    reach = max(1, min(round(3 * sigma), side - 1))
    kernel = [2 * reach + 1] * 2
    blurred: Tensor = transforms.gaussian_blur(images, kernel, [sigma, sigma])
    return blurred


def area_under(curve: Tensor) -> Tensor:
    """Return the area under curves [B, S + 1] over the share of pixels, by trapezoids, [B]."""
    return torch.trapezoid(curve, dx=1 / (curve.shape[1] - 1))
