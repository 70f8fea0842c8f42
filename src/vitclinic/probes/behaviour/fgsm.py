"""The one-step attack: the fast gradient sign method."""

from __future__ import annotations

from typing import ClassVar

from vitclinic._core.registry import KeyScalars
from vitclinic.probes.behaviour.attacks import Attack, AttackProbe
from vitclinic.probes.probe import register


@register
class FGSM(AttackProbe):
    """Accuracy under the fast gradient sign method [hyeonwoo2023 Table 8; Goodfellow et al. 2015].

    x' = clip(x + epsilon sign(g)) with g the gradient of the cross-entropy in the pixels x in [0, 1]; epsilon g / |g|
    in the l2 norm.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> scalars = FGSM(epsilon=4 / 255)(model, loader).scalars
        >>> scalars["robust_accuracy"].value <= scalars["clean_accuracy"].value
        True
    """

    name = "fgsm"
    group = "Behaviour"
    rank = 230
    title = "One-step attack (FGSM)"
    question = "How often does one step along the gradient fool it?"
    paper = "Hyeon-Woo et al. 2023, Table 8 (H8)"
    key_scalars: ClassVar[KeyScalars] = {"robust_accuracy": "higher", "drop": "lower"}

    @property
    def attack(self) -> Attack:
        return Attack(self.ball, steps=1, step=self.ball.epsilon)
