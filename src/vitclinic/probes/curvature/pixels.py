"""The loss of networks that predict masks, as a function of their weights: that of segmentation's training."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vitclinic.data import Batch
from vitclinic.models.segmenter import Segmenter, pixel_loss, read_masks, slide
from vitclinic.probes.probe import DoesNotApply
from vitclinic.probes.subject import Subject, find_headed


def predicts_masks(subject: Subject) -> bool:
    """Return True if the network predicts masks and the images have some, so that its loss is that of pixels."""
    try:
        find_headed(subject, Segmenter, "mask", "the network predicts no masks.")
    except DoesNotApply:
        return False
    return True


def choose_network(subject: Subject) -> nn.Module:
    """Return the network whose loss is measured: with its head if that predicts masks, else as one of class scores."""
    return subject.given if predicts_masks(subject) else subject.network


def sum_pixel_losses(network: nn.Module, batch: Batch) -> Tensor:
    """Return the sum over images of the mean cross-entropy of their known pixels."""
    segmenter: Any = network.backbone
    return len(batch) * pixel_loss(slide(network, batch.images, segmenter.window), read_masks(batch))
