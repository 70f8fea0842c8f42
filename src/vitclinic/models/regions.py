"""The two stages of Mask R-CNN, torchvision's, with losses and draws that belong to each image.

torchvision averages its losses over all sampled regions of a batch and samples with torch's generator. Here each loss
is torchvision's of one image, averaged over images, and an image's draws derive from its key: a batch divided among
processes or micro-batches is the same computation, and a second pass sees the same regions. Regions that lie in a crowd
are neither objects nor background.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler
from torchvision.models.detection.roi_heads import RoIHeads, project_masks_on_boxes
from torchvision.models.detection.rpn import RegionProposalNetwork

from vitclinic.data.randomness import torch_seed

Objects = dict[str, Tensor]
"""The objects of an image: `boxes`, `labels` (from 1, as torchvision counts), `crowd` boxes and perhaps `masks`."""

_BETA = 1 / 9
_IGNORED = -1


class KeyedSampler(BalancedPositiveNegativeSampler):  # type: ignore[misc]
    """torchvision's sampler of positive and negative regions, whose draws for an image derive from its key."""

    def __init__(self, count: int, positive: float, purpose: str) -> None:
        super().__init__(count, positive)
        self.purpose = purpose
        self.keys: Sequence[int] = ()

    def __call__(self, matched_idxs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return, for each image, which of its regions are drawn as positive and as negative ones."""
        # A generator of its own: seeding torch's notes the whole Python stack for CUDA each time.
        positive, negative, generator = [], [], torch.Generator()
        for labels, key in zip(matched_idxs, self.keys, strict=True):
            generator.manual_seed(torch_seed(self.purpose, key))
            most = int(self.batch_size_per_image * self.positive_fraction)
            positive.append(_draw(labels >= 1, most, generator))
            negative.append(_draw(labels == 0, self.batch_size_per_image - int(positive[-1].sum()), generator))
        return positive, negative


def _draw(among: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Return flags of at most so many places, drawn from those where `among` is true."""
    places = torch.where(among)[0]
    drawn = torch.randperm(len(places), generator=generator)[:most].to(places.device)
    chosen = torch.zeros_like(among, dtype=torch.uint8)
    chosen[places[drawn]] = 1
    return chosen


def _leave_out_crowds(labels: list[Tensor], regions: list[Tensor], targets: Sequence[Objects]) -> list[Tensor]:
    """Return the labels with background regions ignored of which at least half lies in a crowd."""
    changed = []
    for label, boxes, target in zip(labels, regions, targets, strict=True):
        crowd = target["crowd"].to(boxes)
        low, high = torch.maximum(boxes[:, None, :2], crowd[:, :2]), torch.minimum(boxes[:, None, 2:], crowd[:, 2:])
        inside = (high - low).clamp(min=0).prod(-1).sum(1)
        crowded = (label == 0) & (inside >= 0.5 * (boxes[:, 2:] - boxes[:, :2]).prod(-1)) & bool(len(crowd))
        changed.append(torch.where(crowded, torch.full_like(label, _IGNORED), label))
    return changed


def _image_weights(counts: Sequence[int], like: Tensor) -> Tensor:
    """Return the weight of each region, [sum of counts], by which a sum is the mean over images of their means."""
    return torch.cat([like.new_full((count,), 1 / (count * len(counts))) for count in counts if count] or [like[:0]])


class Proposals(RegionProposalNetwork):  # type: ignore[misc]
    """torchvision's region proposal network."""

    def assign_targets_to_anchors(
        self, anchors: list[Tensor], targets: list[Objects]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return label and box of each anchor; those in a crowd are ignored."""
        labels, boxes = super().assign_targets_to_anchors(anchors, targets)
        return _leave_out_crowds(labels, anchors, targets), boxes

    def compute_loss(
        self, objectness: Tensor, pred_bbox_deltas: Tensor, labels: list[Tensor], regression_targets: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the losses of objectness and boxes, averaged over images."""
        positive, negative = (torch.cat(drawn).bool() for drawn in self.fg_bg_sampler(labels))
        chosen, objectness = positive | negative, objectness.flatten()
        weights = torch.zeros_like(objectness)
        counts = [int(each.sum()) for each in torch.split(chosen, [len(each) for each in labels])]
        weights[chosen] = _image_weights(counts, objectness)
        every, boxes = torch.cat(labels).to(objectness), torch.cat(regression_targets)
        wrong = F.binary_cross_entropy_with_logits(objectness[chosen], every[chosen], reduction="none")
        off = F.smooth_l1_loss(pred_bbox_deltas[positive], boxes[positive], beta=_BETA, reduction="none").sum(1)
        return (weights[chosen] * wrong).sum(), (weights[positive] * off).sum()


class Regions(RoIHeads):  # type: ignore[misc]
    """torchvision's heads on regions: their classes, boxes and masks."""

    def select_training_samples(self, proposals: list[Tensor], targets: list[Objects]) -> Any:
        """Return the regions to train on, with the object, label and box of each; those in a crowd are left out."""
        self._targets = targets
        try:
            return super().select_training_samples(proposals, targets)
        finally:
            del self._targets

    def assign_targets_to_proposals(
        self, proposals: list[Tensor], gt_boxes: list[Tensor], gt_labels: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return object and label of each region; those in a crowd are ignored."""
        matched, labels = super().assign_targets_to_proposals(proposals, gt_boxes, gt_labels)
        return matched, _leave_out_crowds(labels, proposals, self._targets)

    def compute_losses(
        self, maps: dict[str, Tensor], proposals: list[Tensor], size: tuple[int, int], targets: list[Objects]
    ) -> dict[str, Tensor]:
        """Return the losses of classes, boxes and masks, each averaged over images.

        Args:
            maps: The feature maps by name.
            proposals: Boxes of each image, from the first stage.
            size: Height and width of the images.
            targets: The objects of each image.
        """
        sizes = [size] * len(targets)
        regions, matched, labels, offsets = self.select_training_samples(proposals, targets)
        class_logits, box_deltas = self.box_predictor(self.box_head(self.box_roi_pool(maps, regions, sizes)))
        weights = _image_weights([len(each) for each in labels], class_logits[:, 0])
        every, target = torch.cat(labels), torch.cat(offsets)
        objects = every > 0
        own = box_deltas.unflatten(1, (-1, 4))[objects, every[objects]]
        off = F.smooth_l1_loss(own, target[objects], beta=_BETA, reduction="none").sum(1)
        losses = {
            "classes": (weights * F.cross_entropy(class_logits, every, reduction="none")).sum(),
            "boxes": (weights[objects] * off).sum(),
        }
        if self.has_mask():
            kept = [label > 0 for label in labels]
            boxes = [each[rows] for each, rows in zip(regions, kept, strict=True)]
            found = [each[rows] for each, rows in zip(matched, kept, strict=True)]
            losses["masks"] = self._mask_loss(maps, boxes, sizes, targets, found)
        return losses

    def _mask_loss(
        self,
        maps: dict[str, Tensor],
        boxes: list[Tensor],
        sizes: list[tuple[int, int]],
        targets: list[Objects],
        found: list[Tensor],
    ) -> Tensor:
        """Return the cross-entropy of the masks of regions with an object; an image without any counts as 0."""
        logits = self.mask_predictor(self.mask_head(self.mask_roi_pool(maps, boxes, sizes)))
        if not len(logits):
            return 0 * torch.sum(logits)
        labels = torch.cat([each["labels"][rows] for each, rows in zip(targets, found, strict=True)])
        shown = [
            project_masks_on_boxes(each["masks"], box, rows, logits.shape[-1])
            for each, box, rows in zip(targets, boxes, found, strict=True)
            if len(rows)
        ]
        own = logits[torch.arange(len(labels), device=labels.device), labels]
        wrong = F.binary_cross_entropy_with_logits(own, torch.cat(shown).to(own), reduction="none").mean((1, 2))
        return (_image_weights([len(each) for each in boxes], wrong) * wrong).sum()
