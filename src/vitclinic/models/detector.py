"""A backbone with Mask R-CNN's head: feature pyramid, region proposals, boxes and masks [He et al., ICCV 2017].

The parts are torchvision's, without its wrapper, which would resize and normalize images again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import MultiScaleRoIAlign

from vitclinic._core.precision import upcast
from vitclinic.data import ImageSpec
from vitclinic.models.headed import Headed
from vitclinic.models.pyramid import Pyramid, freeze_unread
from vitclinic.models.regions import KeyedSampler, Objects, Proposals, Regions

_RATIOS = (0.5, 1.0, 2.0)
_POSITIVE = 0.25
"""Share of the regions of an image that show an object, at most."""
_PRIOR = 0.01
"""Probability of each class that an untrained head gives a region, below the score from which on it says something."""
_USUAL_ANCHORS = 8.0
"""Side of anchors in pixels of their level: 32, 64, 128 and 256 pixels."""
_CANONICAL = 28
"""Side, in anchors' factors, of a region that is read at the third level: 224 pixels for the usual factor of 8."""


@dataclass(frozen=True)
class DetectorOptions:
    """Sizes of a detector.

    Attributes:
        masks: Predict the pixels of objects, too.
        width: Channels of the pyramid.
        anchors: Side of an anchor in pixels of its level; 8, or less for small images, unless given.
        samples: Regions of an image that are trained on.
        proposals: Regions of an image that the second stage looks at.
    """

    masks: bool = True
    width: int = 256
    anchors: float | None = None
    samples: int = 512
    proposals: int = 1000


class Detector(Headed):
    """A backbone with Mask R-CNN's head.

    In training mode it returns feature maps by name, from which `compute_losses` goes on. In evaluation mode it returns
    for each image `boxes` [n, 4] (left, top, right, bottom, in pixels), `labels` [n] from 0, `scores` [n] and, with
    masks, `masks` [n, height, width], by falling score.

    Args:
        backbone: The network, without a classifier.
        spec: The images it takes, and the number of classes.
        options: Sizes of the head.

    Example:
        >>> import timm
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=0)
        >>> network = Detector(vit, ImageSpec(6, 3, (64, 64)), DetectorOptions(width=16, proposals=20)).eval()
        >>> sorted(network(torch.rand(1, 3, 64, 64))[0])
        ['boxes', 'labels', 'masks', 'scores']
    """

    returns_tensor = False

    def __init__(self, backbone: nn.Module, spec: ImageSpec, options: DetectorOptions) -> None:
        super().__init__(backbone)
        self.options = options
        self.pyramid = Pyramid(backbone, spec)
        self.neck = TopDown(self.pyramid.channels, options.width)
        freeze_unread(self, spec)  # before the head is here, since all of that is trained
        strides = [max(stride) for stride in self.pyramid.strides]
        # The largest anchor is as large as the image: at 64 pixels they are 8, 16, 32 and 64 pixels wide.
        anchors = options.anchors or min(_USUAL_ANCHORS, max(spec.img_size) / strides[-1])
        self.proposals = _make_proposals([anchors * stride for stride in strides], options)
        self.regions = _make_regions(len(strides), round(_CANONICAL * anchors), spec.num_classes + 1, options)

    def outputs(self, images: Tensor) -> list[Tensor]:
        """Return the feature maps, from the finest to the coarsest."""
        return self.neck(self.pyramid(self.backbone, images))  # type: ignore[no-any-return]

    def forward(self, images: Tensor) -> Any:
        """Return feature maps by name in training mode, else what is found in each image [B, C, H, W]."""
        maps = {str(level): each for level, each in enumerate(self.outputs(images))}
        if self.training:
            return maps
        size = (images.shape[2], images.shape[3])
        with torch.autocast(images.device.type, enabled=False):
            maps = _in_single(maps)
            regions, _ = self.proposals(_shapes_only(len(images), size, maps["0"]), maps)
            found, _ = self.regions(maps, regions, [size] * len(images))
        return [_finish(each, size) for each in found]

    def compute_losses(
        self, maps: dict[str, Tensor], size: tuple[int, int], objects: Sequence[Objects], keys: Tensor
    ) -> dict[str, Tensor]:
        """Return the losses of a batch by name, each the mean over images of torchvision's loss of the image.

        Args:
            maps: What `forward` returned in training mode.
            size: Height and width of the images.
            objects: Objects of each image, as `Annotations` has them.
            keys: Key of each image [B], from which the draws of its regions derive.
        """
        if isinstance(maps["0"], FakeTensor):
            return self._pretend_losses(maps)
        self.proposals.fg_bg_sampler.keys = self.regions.fg_bg_sampler.keys = keys.tolist()
        targets = [_as_target(each) for each in objects]
        with torch.autocast(maps["0"].device.type, enabled=False):
            maps = _in_single(maps)
            regions, first = self.proposals(_shapes_only(len(objects), size, maps["0"]), maps, targets)
            second = self.regions.compute_losses(maps, regions, size, targets)
        return {"objectness": first["loss_objectness"], "proposals": first["loss_rpn_box_reg"], **second}

    def _pretend_losses(self, maps: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return losses whose course depends on no numbers, to plan a run by: all regions that may be drawn are."""
        count = len(maps["0"]) * self.options.samples
        like = torch.stack([each.mean() for each in maps.values()]).sum()
        scores, deltas = self.proposals.head(list(maps.values()))
        pooled = like.expand(count, self.options.width, 7, 7)
        logits, boxes = self.regions.box_predictor(self.regions.box_head(pooled))
        outputs = [*scores, *deltas, logits, boxes]
        if self.options.masks:
            pooled = like.expand(round(count * _POSITIVE), self.options.width, 14, 14)
            outputs.append(self.regions.mask_predictor(self.regions.mask_head(pooled)))
        return {str(number): output.mean() for number, output in enumerate(outputs)}


def _in_single(maps: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the maps in at least single precision: boxes are not rounded to the 8 bits of half precision."""
    return {name: upcast(each) for name, each in maps.items()}


def _shapes_only(images: int, size: tuple[int, int], like: Tensor) -> ImageList:
    """Return what torchvision's parts ask of images: how many there are, and how large."""
    return ImageList(like.new_empty((1, 1, 1, 1)).expand(images, 1, *size), [size] * images)


def _as_target(objects: Objects) -> Objects:
    """Return the objects of an image with labels from 1, its crowd regions apart."""
    single = ~objects["iscrowd"]
    target = {"boxes": objects["boxes"][single], "labels": objects["labels"][single] + 1}
    if "masks" in objects:
        target["masks"] = objects["masks"][single]
    return {**target, "crowd": objects["boxes"][~single]}


def _finish(found: dict[str, Tensor], size: tuple[int, int]) -> dict[str, Tensor]:
    result = {"boxes": found["boxes"], "labels": found["labels"] - 1, "scores": found["scores"]}
    if "masks" in found:
        result["masks"] = paste_masks(found["masks"][:, 0], found["boxes"], size)
    return result


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the pixels of objects in an image: probabilities [n, m, m] stretched over their boxes, at least 0.5.

    Args:
        masks: Probability of each cell of a box.
        boxes: Left, top, right and bottom, [n, 4].
        size: Height and width of the image.

    Returns:
        Which pixels belong to each object, [n, height, width].

    Example:
        >>> paste_masks(torch.ones(1, 28, 28), torch.tensor([[1.0, 2.0, 3.0, 3.0]]), (4, 4)).nonzero()[:, 1:].tolist()
        [[2, 1], [2, 2]]
    """
    extent = (boxes[:, 2:] - boxes[:, :2]).clamp(min=1e-6)
    down, across = (
        2 * (torch.arange(length, device=boxes.device) + 0.5 - boxes[:, None, axis]) / extent[:, None, axis] - 1
        for length, axis in ((size[0], 1), (size[1], 0))
    )
    shape = (len(masks), *size)
    where = torch.stack([across[:, None, :].expand(shape), down[:, :, None].expand(shape)], dim=-1)
    inside = (where.abs() <= 1).all(-1)
    placed = F.grid_sample(masks[:, None], where.to(masks), "bilinear", "border", align_corners=False)[:, 0]
    return (placed >= 0.5) & inside


class TopDown(nn.Module):
    """Maps of equal width, each with what the coarser ones say added [Lin et al., CVPR 2017].

    Args:
        channels: Channels of the maps, from the finest to the coarsest.
        width: Channels of the results.
    """

    def __init__(self, channels: Sequence[int], width: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Conv2d(each, width, 1), nn.GroupNorm(1, width)) for each in channels
        )
        self.outer = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in channels)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return the maps in the same order and sizes."""
        found = [inner(each) for inner, each in zip(self.inner, maps, strict=True)]
        for finer in reversed(range(len(found) - 1)):
            size = found[finer].shape[2:]
            found[finer] = found[finer] + F.interpolate(found[finer + 1], size, mode="nearest")
        return [outer(each) for outer, each in zip(self.outer, found, strict=True)]


def _make_proposals(sides: Sequence[float], options: DetectorOptions) -> Proposals:
    """Return the first stage, with anchors of these sides at the levels."""
    anchors = AnchorGenerator(tuple((side,) for side in sides), (_RATIOS,) * len(sides))
    head = RPNHead(options.width, anchors.num_anchors_per_location()[0])
    count = {"training": 2 * options.proposals, "testing": options.proposals}
    made = Proposals(anchors, head, 0.7, 0.3, 256, 0.5, count, count, nms_thresh=0.7)
    made.fg_bg_sampler = KeyedSampler(256, 0.5, "proposals")
    return made


def _make_regions(levels: int, canonical: int, outputs: int, options: DetectorOptions) -> Regions:
    """Return the second stage; a region of side `canonical` is read at the third level."""
    names = [str(level) for level in range(levels)]

    def pool(cells: int) -> MultiScaleRoIAlign:
        return MultiScaleRoIAlign(names, cells, 2, canonical_scale=canonical)

    width, mask_parts = options.width, {}
    if options.masks:
        mask_parts = {
            "mask_roi_pool": pool(14),
            "mask_head": MaskRCNNHeads(width, (width,) * 4, 1),
            "mask_predictor": MaskRCNNPredictor(width, width, outputs),
        }
    made = Regions(
        pool(7),
        TwoMLPHead(width * 7 * 7, 4 * width),
        FastRCNNPredictor(4 * width, outputs),
        0.5,
        0.5,
        options.samples,
        _POSITIVE,
        None,
        0.05,
        0.5,
        100,
        **mask_parts,
    )
    made.fg_bg_sampler = KeyedSampler(options.samples, _POSITIVE, "regions")
    _prefer_background(made.box_predictor.cls_score)
    return made


def _prefer_background(classifier: nn.Linear) -> None:
    """Start with background nearly everywhere, as most regions are [Lin et al., ICCV 2017, Sec. 3.3].

    A head that finds all classes equally probable says a hundred things of every image, each with a mask.
    """
    classes = classifier.out_features - 1
    prior = min(_PRIOR, 0.5 / classes)
    nn.init.normal_(classifier.weight, std=0.01)
    nn.init.zeros_(classifier.bias)
    with torch.no_grad():
        classifier.bias[0] = math.log((1 - classes * prior) / prior)
