"""The three losses of DiversePatch, which keep patches from becoming alike [gong2021 Sec. 4].

They are plain functions of patch representations, without class and other prefix tokens. All compute in at least
float32, even under autocast; float64 stays float64. `Objective` is the base class of a loss that a treatment adds to a
training.

Shapes: B images, N patches, D channels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitclinic._core.errors import AnatomyError, TreatmentError
from vitclinic._core.precision import upcast
from vitclinic._core.segmentation import VOID
from vitclinic.anatomy import Anatomy, Site, Unit, eval_mode, out_of, taps
from vitclinic.anatomy.forward import Removable
from vitclinic.anatomy.sites import watch
from vitclinic.data import ImageSpec
from vitclinic.data.batch import Batch
from vitclinic.treatments.parts import run_once


class Objective(nn.Module):
    """An added loss; its parameters are trained and saved in the run's state, not in the exported network."""

    def forward(self, batch: Batch, logits: Tensor) -> Tensor:
        """Return the loss of this batch, a scalar; hidden states are read by hooks registered in the constructor."""
        raise TypeError(f"{type(self).__name__} must implement forward().")


def cosine_loss(h_bnd: Tensor) -> Tensor:
    """Return the mean absolute cosine between different patches of an image, averaged over images.

        P(h) = 1 / (n (n - 1)) sum_{i != j} |h_i . h_j| / (|h_i| |h_j|)

    A patch that is zero counts as orthogonal to all others [gong2021 Sec. 4].

    Args:
        h_bnd: Patches [B, N, D] with N > 1.

    Returns:
        The loss, a scalar.

    Raises:
        TreatmentError: There is only one patch.

    Example:
        >>> patches = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]])
        >>> round(cosine_loss(patches).item(), 4)  # one of the three pairs is parallel
        0.3333
    """
    count = _count_patches(h_bnd)
    with torch.autocast(h_bnd.device.type, enabled=False):
        unit_bnd = F.normalize(upcast(h_bnd), dim=-1)
        gram_bnn = unit_bnd @ unit_bnd.mT
        # The diagonal is a constant (1 for each patch with itself) and must not contribute a gradient.
        alike_b = gram_bnn.abs().sum(dim=(1, 2)) - gram_bnn.detach().diagonal(dim1=1, dim2=2).sum(dim=1)
        return alike_b.mean() / (count * (count - 1))


def contrastive_loss(first_bnd: Tensor, last_bnd: Tensor, normalise: bool = False) -> Tensor:
    """Return the loss that ties each last-layer patch to its own first-layer patch, against the other patches.

        -1/n sum_i log[ exp(h1_i . hL_i) / (exp(h1_i . hL_i) + exp(h1_i . mean_{j != i} hL_j)) ]
            = 1/n sum_i softplus(h1_i . (mean_{j != i} hL_j - hL_i))

    averaged over images; the second form cannot overflow. No gradient flows into `first_bnd` [gong2021 Sec. 4].

    Args:
        first_bnd: Patches of the first layer [B, N, D].
        last_bnd: Patches of the last layer [B, N, D].
        normalise: Scale all vectors to length 1 first; the paper uses raw dot products.

    Returns:
        The loss, a scalar.

    Raises:
        TreatmentError: There is only one patch.

    Example:
        >>> first = torch.eye(2)[None]
        >>> round(contrastive_loss(first, 10 * first).item(), 6)  # every patch is still itself
        4.5e-05
        >>> round(contrastive_loss(first, torch.ones(1, 2, 2)).item(), 4)  # all are the same: log 2
        0.6931
    """
    count = _count_patches(last_bnd)
    with torch.autocast(last_bnd.device.type, enabled=False):
        first_bnd, last_bnd = upcast(first_bnd.detach()), upcast(last_bnd)
        if normalise:
            first_bnd, last_bnd = F.normalize(first_bnd, dim=-1), F.normalize(last_bnd, dim=-1)
        # mean_{j != i} h_j - h_i = n / (n - 1) (mean_j h_j - h_i), without a sum for every i
        others_bnd = last_bnd.mean(dim=1, keepdim=True) - last_bnd
        margin_bn = (first_bnd * others_bnd).sum(dim=-1) * (count / (count - 1))
        return -F.logsigmoid(-margin_bn).mean()


def mixing_loss(logits_bnk: Tensor, targets_bnk: Tensor) -> Tensor:
    """Return the cross-entropy of every patch's prediction with its own target, averaged over patches and images.

        1/n sum_i CE(g(h_i), y_i)

    Args:
        logits_bnk: Predictions of the patches [B, N, K].
        targets_bnk: Soft targets of the patches [B, N, K].

    Returns:
        The loss, a scalar.

    Raises:
        TreatmentError: Predictions and targets differ in shape.

    Example:
        >>> targets = torch.eye(2)[None]  # two patches, the first of class 0, the second of class 1
        >>> round(mixing_loss(torch.zeros(1, 2, 2), targets).item(), 4)
        0.6931
    """
    if logits_bnk.shape != targets_bnk.shape:
        raise TreatmentError(
            f"The patches' predictions are {tuple(logits_bnk.shape)} (images, patches, classes) and their targets"
            f" {tuple(targets_bnk.shape)}: CutMix's cells must be the network's patches."
        )
    logits_bnk = upcast(logits_bnk)
    return F.cross_entropy(logits_bnk.flatten(0, 1), targets_bnk.flatten(0, 1).to(logits_bnk.dtype))


def mask_loss(logits_bnk: Tensor, masks_bhw: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the cross-entropy of every patch's prediction with the shares of classes in its pixels.

    It is averaged over the patches of an image that show known pixels, then over images: `mixing_loss` where pixels
    have classes, so that no image need be mixed with another.

    Args:
        logits_bnk: Predictions of the patches [B, N, K], row by row.
        masks_bhw: Class of each pixel [B, H, W], 255 for void.
        grid: Rows and columns of patches.

    Returns:
        The loss, a scalar.

    Example:
        >>> masks = torch.tensor([[[0, 0, 1, 255]]])  # two patches of two pixels, the second half void
        >>> round(mask_loss(torch.zeros(1, 2, 2), masks, (1, 2)).item(), 4)
        0.6931
    """
    targets_bnk = share_classes(masks_bhw, grid, logits_bnk.shape[2]).to(upcast(logits_bnk).dtype)
    wrong_bkn = F.cross_entropy(upcast(logits_bnk).mT, targets_bnk.mT, reduction="none")
    known_b = (targets_bnk.sum(2) > 0).sum(1)
    return (wrong_bkn.sum(1) / known_b.clamp(min=1)).mean()


def share_classes(masks_bhw: Tensor, grid: tuple[int, int], classes: int) -> Tensor:
    """Return the shares of classes in the known pixels of each patch, [B, N, K]; zeros where none is known.

    Example:
        >>> share_classes(torch.tensor([[[0, 1, 1, 255]]]), (1, 2), 2).tolist()
        [[[0.5, 0.5], [0.0, 1.0]]]
    """
    (height, width), count = masks_bhw.shape[1:], grid[0] * grid[1]
    rows, columns = (
        torch.arange(side, device=masks_bhw.device) * patches // side
        for side, patches in zip((height, width), grid, strict=True)
    )
    patch_hw = rows[:, None] * grid[1] + columns
    image_b = torch.arange(len(masks_bhw), device=masks_bhw.device)
    place_bhw = (image_b[:, None, None] * count + patch_hw) * classes + masks_bhw.long()
    found = torch.bincount(place_bhw[masks_bhw != VOID], minlength=len(masks_bhw) * count * classes)
    pixels_bnk = found.reshape(len(masks_bhw), count, classes).float()
    return pixels_bnk / pixels_bnk.sum(2, keepdim=True).clamp(min=1)


def _count_patches(h_bnd: Tensor) -> int:
    """Return the number of patches per image, which must be more than one."""
    if h_bnd.shape[1] < 2:
        raise TreatmentError("The patch losses need at least two patches; this image has one.")
    return h_bnd.shape[1]


@dataclass(frozen=True, eq=False)
class Patches:
    """The patches of a network for one image size.

    `first` is the patch embedding before the position embedding. `last` is the output of the final norm, or of the
    last block if that norm acts on pooled features or does not exist.
    """

    first: Site
    last: Site
    size: tuple[int, int]
    """The images' height and width."""
    grid: tuple[int, int]
    """Rows and columns of patches in `last`."""
    width: int
    """The channels of `last`."""
    kept: bool
    """True if `first` and `last` have the same patches and channels; False if patches are merged."""

    @classmethod
    def of(cls, anatomy: Anatomy, spec: ImageSpec) -> Patches:
        """Locate the patches in the anatomy of a network, with a forward pass of one image."""
        stems, head = anatomy.of_kind("stem"), anatomy.of_kind("head")[-1]
        spatial = [unit.output for unit in anatomy.units if unit.block is not None and unit.output.layout.spatial]
        state = head.input if head.input.layout.spatial or not spatial else spatial[-1]  # a class token alone (CaiT)
        if not stems:
            raise AnatomyError("its patch embedding cannot be told from the rest")
        sites = {"first": stems[0].output, "block": state}
        normed = _find_normed(head, anatomy.network, spec) if state is head.input else None
        if normed is not None:
            sites["norm"] = normed
        with taps(sites) as seen:
            run_once(anatomy.network, spec)
        last = "norm" if normed is not None else "block"
        rows, columns = anatomy.grid(state, seen["block"]).shape[2:]
        before, after = (patch_tokens(sites[end], seen[end]) for end in ("first", last))
        kept = before.shape == after.shape
        return cls(stems[0].output, sites[last], spec.img_size, (rows, columns), after.shape[2], kept)

    @property
    def cell(self) -> tuple[int, int]:
        """Height and width of one patch in pixels; raises a TreatmentError if patches do not divide the image."""
        if self.size[0] % self.grid[0] or self.size[1] % self.grid[1]:
            raise TreatmentError(
                f"Images of {self.size[0]} x {self.size[1]} pixels do not divide into the network's"
                f" {self.grid[0]} x {self.grid[1]} last patches, so CutMix cannot follow their borders: choose a size"
                " that divides, or switch the mixing loss off."
            )
        return self.size[0] // self.grid[0], self.size[1] // self.grid[1]


def _find_normed(head: Unit, network: nn.Module, spec: ImageSpec) -> Site | None:
    """Return where the last state leaves the final norm; None if that acts on something else, as on a class token.

    Tokens that lie in an order of their own keep it in the norm, if not always their axes.
    """
    if head.norm is None:
        return None
    with taps({"state": head.input, "norm": out_of(head.norm)}) as seen:
        run_once(network, spec, batch=2)
    state, norm, given = seen["state"], seen["norm"], head.input.arrangement
    if given is None:
        return out_of(head.norm, head.input.layout) if norm.shape == state.shape else None
    with torch.no_grad(), eval_mode(network):
        expected = head.norm(state)
    for way in (given, replace(given, axes=tuple(range(len(given.axes))))):
        if norm.ndim == len(way.axes) and _is_close(way.apply(norm), expected):
            return out_of(head.norm, head.input.layout, arrangement=way)
    return None


def _is_close(one: Tensor, other: Tensor) -> bool:
    near = max(1e-4, 8 * torch.finfo(one.dtype).eps)
    return one.shape == other.shape and torch.allclose(one, other, rtol=near, atol=near)


def patch_tokens(site: Site, activation: Tensor) -> Tensor:
    """Return the activation at `site` as patches [B, N, D], row by row, without prefix tokens."""
    if activation.ndim == 3:
        return activation[:, site.layout.prefix :]
    x_bhwd = activation if site.layout.channels_last else activation.permute(0, 2, 3, 1)
    return x_bhwd.flatten(1, 2)


class Reader:
    """Hooks that keep the patches of a training pass until the loss takes them; other passes leave nothing."""

    def __init__(self, **sites: Site) -> None:
        self._sites = sites
        self._held: dict[str, Tensor] = {}
        self._handles: list[Removable] = []
        for name, site in sites.items():
            self._handles += watch(site, self._holder(name, site))

    def _holder(self, name: str, site: Site) -> Callable[[Tensor], None]:
        def hold(activation: Tensor) -> None:
            if site.module.training and torch.is_grad_enabled():
                self._held[name] = activation

        return hold

    def take(self) -> list[Tensor]:
        """Return the patches [B, N, D] of each site, in order, and release them.

        Raises:
            TreatmentError: There was no training pass since the last call.
        """
        held, self._held = self._held, {}
        if held.keys() != self._sites.keys():
            raise TreatmentError(
                "There are no patches to compare: call the network in training mode, with gradients, before each call"
                " of its patch losses."
            )
        return [patch_tokens(site, held[name]) for name, site in self._sites.items()]

    def remove(self) -> None:
        """Remove the hooks from the network."""
        for handle in self._handles:
            handle.remove()
