"""The attack of several steps: projected gradient descent."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from vitclinic._core.registry import KeyScalars
from vitclinic.probes.behaviour.attacks import FARTHEST, Attack, AttackProbe
from vitclinic.probes.probe import Cheaper, register


@register
class PGD(AttackProbe):
    """Accuracy under projected gradient descent, 10 steps by default [chen2022 App. B; Madry et al. 2018].

    x <- project(x + step d) onto the epsilon-ball around the image and [0, 1], with d = sign(g) (linf) or g / |g| (l2).

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> scalars = PGD(steps=2, step=0.5)(model, loader).scalars
        >>> scalars["robust_accuracy"].value <= scalars["clean_accuracy"].value
        True
    """

    name = "pgd"
    group = "Behaviour"
    rank = 260
    title = "Iterative attack (PGD)"
    question = "How often does a stronger attack of several steps fool it?"
    paper = "Chen et al. 2022, Table 7 (C10)"
    key_scalars: ClassVar[KeyScalars] = {"robust_accuracy": "higher", "drop": "lower"}
    cheaper: ClassVar[Cheaper] = ({"images": 64}, {"images": 256})

    steps: Annotated[int, Field(ge=1)] = Field(10, description="steps per attempt")
    step: Annotated[float, Field(gt=0, le=FARTHEST)] = Field(
        0.125, description="step length in units of epsilon: 0.25/255 for an epsilon of 2/255"
    )

    @property
    def attack(self) -> Attack:
        return Attack(self.ball, steps=self.steps, step=self.step * self.ball.epsilon)
