"""The class that a network predicts, and whether it is right."""

from __future__ import annotations

import torch
from torch import Tensor

from vitclinic._core.errors import ModelError
from vitclinic.probes.behaviour.intervals import Correct
from vitclinic.probes.subject import Subject


def check_logits(logits: Tensor, name: str) -> Tensor:
    """Return the logits; raise a ModelError if any of them is NaN or infinite."""
    if not logits.isfinite().all():
        raise ModelError(f"{name} returns logits that are not finite (NaN or infinity).")
    return logits


@torch.no_grad()
def predict(subject: Subject, images: Tensor) -> Tensor:
    """Return the predicted class [B] of images in [0, 1]; ties go to the first class."""
    return check_logits(subject.logits(images.to(subject.dtype)), subject.name).argmax(1)


def is_correct(subject: Subject, images: Tensor, targets: Tensor) -> Correct:
    """Return which images [B] are classified correctly."""
    correct: Correct = (predict(subject, images) == targets).cpu().numpy()
    return correct
