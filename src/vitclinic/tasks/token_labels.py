"""Token labelling: patches learn soft labels of their own, beside the image's [Jiang et al. 2021; wang2022 Table 2].

    L = CE(class scores, target of the image) + w / N sum_i CE(scores of patch i, its target)

The patches are those of the last layer; one linear layer scores them. A network that has one, timm's VOLO, uses its
own, which its predictions read as well, and its first term is then of the class token alone, as published.
Shapes: B images, N patches, D channels, K classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from timm.layers import PatchDropout
from torch import Tensor, nn

from vitclinic._core.errors import AnatomyError, ModelError
from vitclinic.anatomy import Anatomy
from vitclinic.data import Batch, ImageSpec
from vitclinic.tasks.criterion import Criterion
from vitclinic.treatments.parts import example_image
from vitclinic.treatments.patch_losses import Patches, Reader

if TYPE_CHECKING:
    from vitclinic.tasks.classification import Classification
    from vitclinic.treatments import Losses

_PART_OF_PATCHES = 0.5
"""Weight of the best patch's scores in the predictions of timm's VOLO."""


def find_patches(network: nn.Module, spec: ImageSpec) -> Patches:
    """Return the patches of a network's last layer.

    Raises:
        ModelError: It has none on a grid, only one, or drops some in training.
    """
    trunk = cast(nn.Module, getattr(network, "trunk", network))
    refused = f"task.token_labels does not fit {type(trunk).__name__}:"
    try:
        patches = Patches.of(Anatomy.of(trunk, example_image(trunk, spec)), spec)
    except AnatomyError as error:
        raise ModelError(f"{refused} it needs patches on a grid; {str(error).rstrip('.')}.") from error
    if patches.grid == (1, 1):
        raise ModelError(f"{refused} it has one patch; use larger images or smaller patches.")
    if any(isinstance(module, PatchDropout) and module.prob for module in trunk.modules()):
        raise ModelError(f"{refused} it drops patches in training, and each has a label; train without dropping them.")
    return patches


class TokenLabelCriterion(Criterion):
    """The class loss, and that of the patches of the last layer.

    Args:
        task: The task, for its loss.
        weight: Weight of the patches' loss.
        network: The network to train.
        spec: Images and classes.
    """

    def __init__(self, task: Classification, weight: float, network: nn.Module, spec: ImageSpec) -> None:
        super().__init__()
        patches = find_patches(network, spec)
        self.task, self.weight, self.grid = task, weight, patches.grid
        self.reader = Reader(last=patches.last)
        trunk = cast(nn.Module, getattr(network, "trunk", network))
        own = getattr(trunk, "aux_head", None)
        self._borrowed = [own] if isinstance(own, nn.Linear) else []  # in a list, so that it stays the network's
        if not self._borrowed:
            self.head = nn.Linear(patches.width, spec.num_classes)
            nn.init.trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    def forward(self, network: nn.Module, batch: Batch) -> tuple[Tensor, Losses]:
        assert batch.patch_targets is not None  # by the task's stream
        outputs_bk: Tensor = network(batch.images)
        (last_bnd,) = self.reader.take()
        head = self._borrowed[0] if self._borrowed else self.head
        scores_bnk: Tensor = head(last_bnd.to(head.weight.dtype))
        class_bk = outputs_bk - _PART_OF_PATCHES * scores_bnk.amax(1) if self._borrowed else outputs_bk
        tokens = self.task.loss_of(scores_bnk.flatten(0, 1), batch.patch_targets.flatten(0, 1))
        losses = {"task": self.task.loss_of(class_bk, batch.targets), "tokens": self.weight * tokens}
        return outputs_bk, losses
