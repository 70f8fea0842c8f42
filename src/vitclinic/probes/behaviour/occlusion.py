"""Accuracy with the centre of the image occluded [hyeonwoo2023 Table 8]."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vitclinic._core.registry import FigureSpec, KeyScalars
from vitclinic.data import Batch
from vitclinic.models import Normalized
from vitclinic.probes.behaviour.behaviour_probe import BehaviourProbe, divide_images
from vitclinic.probes.behaviour.intervals import drop, share_correct
from vitclinic.probes.behaviour.predictions import is_correct
from vitclinic.probes.probe import DoesNotApply, Result, register
from vitclinic.probes.subject import Subject


@register
class Occlusion(BehaviourProbe):
    """Accuracy with the centre of the image, half as high and half as wide, occluded [hyeonwoo2023 Table 8].

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> sorted(Occlusion()(model, loader).scalars)
        ['accuracy', 'clean_accuracy', 'drop']
    """

    name = "occlusion"
    group = "Behaviour"
    rank = 240
    title = "Hidden centre"
    question = "Does it recognise images whose centre is hidden?"
    paper = "Hyeon-Woo et al. 2023, Table 8 (H8)"
    key_scalars: ClassVar[KeyScalars] = {"accuracy": "higher", "drop": "lower"}
    figures = (
        FigureSpec(
            name="occlusion",
            kind="scalars",
            values={"clean_accuracy": "whole images", "accuracy": "centre hidden", "drop": "lost"},
            axis="accuracy",
            share=True,
            title="Accuracy with the centre hidden",
            reading="Bars are the accuracy on whole images, on the same images with their central quarter hidden, and"
            " the difference (paired), with 95% intervals. A network that uses the whole image loses little.",
        ),
    )

    value: Literal["black", "mean"] = Field("black", description="fill colour: black, or the mean colour")

    def forwards(self, subject: Subject) -> float:
        return 2.0 * len(subject)

    def measure(self, subject: Subject) -> Result:
        clean, hidden = np.zeros(len(subject), np.bool_), np.zeros(len(subject), np.bool_)
        colour = mean_colour(subject) if self.value == "mean" else torch.zeros(subject.dataset.channels)

        def measure_batch(batch: Batch) -> int:
            places = batch.indices.numpy()
            clean[places] = is_correct(subject, batch.images, batch.targets)
            hidden[places] = is_correct(subject, occlude(batch.images, colour), batch.targets)
            return len(batch)

        divide_images(subject, self.name, len(subject), subject.own_batches(), measure_batch, (clean, hidden))
        scalars = {
            "accuracy": share_correct(hidden),
            "clean_accuracy": share_correct(clean),
            "drop": drop(clean, hidden),
        }
        return Result(scalars, arrays={"clean": clean, "occluded": hidden})


def occlude(images_bchw: Tensor, colour_c: Tensor) -> Tensor:
    """Return images with their centre, half as high and half as wide, in one colour: 112 x 112 of 224 x 224."""
    hidden = images_bchw.clone()
    rows, columns = (_middle(side) for side in images_bchw.shape[2:])
    hidden[:, :, rows, columns] = colour_c.to(hidden)[:, None, None]
    return hidden


def _middle(side: int) -> slice:
    length = max(1, side // 2)
    start = (side - length) // 2
    return slice(start, start + length)


def mean_colour(subject: Subject) -> Tensor:
    """Return the colour that the network normalizes to zero or, if not known, the mean of the training images."""
    if isinstance(subject.network, Normalized):
        return subject.network.mean.flatten()
    if not len(subject.dataset.train):
        raise DoesNotApply("no mean colour is known: the network has no normalization, and the data no train images.")
    return torch.tensor(subject.dataset.statistics[0])
