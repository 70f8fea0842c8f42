"""Attention maps of a handful of images [chen2022 Fig. 3, App. E.2].

Shapes: B images, W windows (1 where attention is global), H heads, Q queries, K keys, h x w the grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field
from torch import Tensor
from torch.nn import functional as F

from vitclinic._core.errors import ModelError, RecipeError
from vitclinic._core.images import Picture, beside
from vitclinic._core.records import Measurement, Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic.anatomy import AttentionMap, Unit, record_attention
from vitclinic.probes.attention.tally import attention_units
from vitclinic.probes.probe import Need, OwningProbe, Result, check_finite, register, unit_row
from vitclinic.probes.subject import Subject


def on_grid(seen: AttentionMap, heads: slice = slice(None)) -> Tensor:
    """Return the attention that each position of the grid receives, averaged over these heads, [B, h, w].

    It is the attention of the class token or, without one, the mean over all queries on the grid. Queries that cannot
    see a position count as 0, so that uniform attention gives a flat map, also in windows.
    """
    weights_bwhqk = seen.by_image()[:, :, heads]
    if seen.has_class:
        received_bwk = class_attention(weights_bwhqk)
    else:
        first = seen.prefix_queries
        received_bwk = mean_attention(weights_bwhqk, seen.visible()[:, first:], first)
    return _put_back(received_bwk[..., seen.prefix :], seen)


def heads_on_grid(seen: AttentionMap, heads: Sequence[int]) -> Tensor:
    """Return the attention that each position of the grid receives from each of the heads, [B, heads, h, w]."""
    count = seen.by_image().shape[2]
    if max(heads) >= count:
        raise RecipeError(f"'probes.attention_maps.heads' asks for head {max(heads)}, but there are {count}, from 0.")
    maps = [on_grid(seen, slice(head, head + 1)) for head in heads]
    return torch.stack(maps, dim=1)


def class_attention(weights_bwhqk: Tensor) -> Tensor:
    """Return the attention of the first query, the class token, averaged over heads, [B, W, K] in float64."""
    return weights_bwhqk[:, :, :, 0].double().mean(2)


def mean_attention(weights_bwhqk: Tensor, sees_wqk: Tensor, first: int = 0) -> Tensor:
    """Return the attention averaged over heads and over queries from number `first` on, [B, W, K] in float64.

    `sees_wqk` says which keys each of these queries may see; a query that sees none is padding and does not count.
    """
    queries = int(sees_wqk.any(-1).sum())
    return (weights_bwhqk.mean(2)[:, :, first:].double() * sees_wqk).sum(2) / queries


def _put_back(x_bwn: Tensor, seen: AttentionMap) -> Tensor:
    """Move values from windows back to the grid, without padding."""
    places_wn2 = seen.positions().to(x_bwn.device)
    real = places_wn2[..., 0] >= 0
    rows, columns = places_wn2[real].unbind(-1)
    grid_bhw = x_bwn.new_zeros(len(x_bwn), *seen.grid)
    grid_bhw[:, rows, columns] = x_bwn[:, real]
    return grid_bhw


def _check_images(images: Any) -> Any:
    """Check the option before pydantic does, whose message would list each type of the union."""
    listed = isinstance(images, list) and images and all(type(each) is int and each >= 0 for each in images)
    if not listed and not (type(images) is int and images >= 1):
        raise ValueError("takes a number of images, or a list of their indices in the split, from 0")
    return images


@register
class AttentionMaps(OwningProbe):
    """Attention of the class token on a handful of images, as arrays and pictures [chen2022 Fig. 3].

    The class token's attention to the patches in the last attention layer, averaged over heads and resized to the image
    (bilinear); without a class token, the mean over queries.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> AttentionMaps(images=2)(model, loader).arrays["maps"].shape
        (2, 32, 32)
    """

    name = "attention_maps"
    group = "Attention"
    rank = 110
    title = "Attention maps"
    question = "Where on an image does the last layer look?"
    paper = "Chen et al. 2022, Fig. 3 (App. E.2)"
    key_scalars: ClassVar[KeyScalars] = {"peak": None}
    needs: ClassVar[frozenset[Need]] = frozenset({"attention"})
    by_default: ClassVar[bool] = False

    images: Annotated[int | list[int], BeforeValidator(_check_images)] = Field(
        8, description="number of images (first of the split's stratified order), or a list of indices in the split"
    )
    layer: int = Field(-1, description="attention layer, from 0; negative numbers count from the last")

    heads: list[Annotated[int, Field(ge=0)]] = Field([], description="heads that are also shown alone, from 0")

    def view(self, subject: Subject) -> Subject:
        if isinstance(self.images, int):
            return subject.on(subject.split, self.images)
        everything = subject.on(subject.split)
        if max(self.images) >= len(everything):
            raise RecipeError(
                f"'probes.attention_maps.images' asks for image {max(self.images)}, but the {subject.split} split has"
                f" {len(everything)} images, from 0."
            )
        return everything.select(self.images)

    def forwards(self, subject: Subject) -> float:
        return float(len(subject))

    def measure(self, subject: Subject) -> Result:
        unit = self._unit(subject)
        maps: list[Tensor] = []
        of_heads: list[Tensor] = []
        pixels: list[Tensor] = []

        def keep(seen: AttentionMap) -> None:
            maps.append(on_grid(seen).cpu())
            if self.heads:
                of_heads.append(heads_on_grid(seen, self.heads).cpu())

        with record_attention([unit], keep), torch.no_grad():
            for batch in subject.batches():
                subject.logits(batch.images)
                pixels.append(batch.images.cpu())
        grids_nhw, images_nchw = torch.cat(maps), torch.cat(pixels)
        if len(grids_nhw) != len(images_nchw):
            raise ModelError(
                f"{unit.name} has {len(grids_nhw)} attention maps for {len(images_nchw)} images. Measure the network"
                " inside this one, which sees each image once."
            )
        check_finite(grids_nhw, unit)
        size = images_nchw.shape[-2:]
        resized = F.interpolate(grids_nhw[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]
        # No intervals: a handful of images is not a sample.
        shares = {"on_grid": grids_nhw.sum((1, 2)), "peak": grids_nhw.amax((1, 2))}
        scalars = {name: Scalar(value=float(share.mean()), n=len(share)) for name, share in shares.items()}
        arrays: dict[str, NDArray[Any]] = {
            "maps": resized.float().numpy(),
            "grid_maps": grids_nhw.float().numpy(),
            "images": as_bytes(images_nchw),
            "numbers": self._numbers(subject),
        }
        if of_heads:
            heads_nhhw = F.interpolate(torch.cat(of_heads), size=size, mode="bilinear", align_corners=False)
            arrays |= {"head_maps": heads_nhhw.float().numpy(), "heads": np.array(self.heads)}
        return Result({**scalars, "images": Scalar(value=len(grids_nhw))}, [unit_row(unit, **scalars)], arrays)

    def pictures(self, measurement: Measurement) -> Mapping[str, Picture]:
        """Return each image with its map beside it, by the image's index in the split."""
        arrays = measurement.arrays
        each = zip(arrays["numbers"], arrays["images"], arrays["maps"], strict=True)
        return {f"image-{number}": beside(image, attention) for number, image, attention in each}

    def _unit(self, subject: Subject) -> Unit:
        units = attention_units(subject.anatomy)
        if not -len(units) <= self.layer < len(units):
            raise RecipeError(
                f"'probes.attention_maps.layer' is {self.layer}, but the network has {len(units)} attention layers."
            )
        return units[self.layer]

    def _numbers(self, subject: Subject) -> NDArray[np.int64]:
        """Return the index of each image in the whole split."""
        if isinstance(self.images, list):
            return np.array(self.images)
        everything = subject.on(subject.split).images.rows
        return np.flatnonzero(np.isin(everything, subject.images.rows))


def as_bytes(images_nchw: Tensor) -> Picture:
    """Convert pixels in [0, 1] to bytes, [n, H, W, C], or [n, H, W] for one channel."""
    images = images_nchw.float().clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).numpy()
    return images[..., 0] if images.shape[-1] == 1 else images
