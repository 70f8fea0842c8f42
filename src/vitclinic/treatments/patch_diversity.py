"""DiversePatch: three losses that keep the patches of the last layer different [gong2021 Sec. 4].

    task loss + a1 cosine + a2 contrastive + a3 mixing

The formulas, and the hooks that read the patches, are in `patch_losses`; `vitclinic.data.augment` has the CutMix that
gives every patch its own label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar

import torch
from pydantic import Field, model_validator
from timm.layers import PatchDropout
from torch import Tensor, nn

from vitclinic._core.config import validate
from vitclinic._core.errors import AnatomyError, TreatmentError
from vitclinic.data import Augment, Batch, ImageSpec
from vitclinic.data.augment import PatchMixing, soft_targets
from vitclinic.treatments.parts import examine, missing
from vitclinic.treatments.patch_losses import (
    Objective,
    Patches,
    Reader,
    contrastive_loss,
    cosine_loss,
    mask_loss,
    mixing_loss,
)
from vitclinic.treatments.surgery import image_spec
from vitclinic.treatments.treatment import Treatment, register

_WATCHED = "_vitclinic_patch_losses"

Weight = Annotated[float, Field(ge=0)]


class PatchObjective(Objective):
    """One weighted loss on the patches that `reader` holds from the latest training pass."""

    def __init__(self, weight: float, reader: Reader) -> None:
        super().__init__()
        self.weight, self.reader = weight, reader

    def forward(self, batch: Batch, logits: Tensor) -> Tensor:
        return self.weight * self.loss(batch.patch_targets)

    def loss(self, patch_targets: Tensor | None) -> Tensor:
        """Return the unweighted loss; `patch_targets` [B, N, K] are needed by the mixing loss only."""
        raise TypeError(f"{type(self).__name__} must implement loss().")


class CosineObjective(PatchObjective):
    """`cosine_loss` of the last layer's patches."""

    def loss(self, patch_targets: Tensor | None) -> Tensor:
        (last_bnd,) = self.reader.take()
        return cosine_loss(last_bnd)


class ContrastiveObjective(PatchObjective):
    """`contrastive_loss` between the patches of the first and the last layer."""

    def __init__(self, weight: float, reader: Reader, normalise: bool) -> None:
        super().__init__(weight, reader)
        self.normalise = normalise

    def loss(self, patch_targets: Tensor | None) -> Tensor:
        first_bnd, last_bnd = self.reader.take()
        if first_bnd.shape != last_bnd.shape:
            raise TreatmentError(
                f"The contrastive loss needs every patch of the first layer in the last; of {first_bnd.shape[1]}"
                f" patches, {last_bnd.shape[1]} are left: train without dropping patches."
            )
        return contrastive_loss(first_bnd, last_bnd, self.normalise)


class MixingObjective(PatchObjective):
    """`mixing_loss` with one linear head for all patches, which is saved in the run's state but not exported.

    Where images have masks, these say what each patch shows: `mask_loss`.
    """

    def __init__(self, weight: float, reader: Reader, patches: Patches, classes: int) -> None:
        super().__init__(weight, reader)
        self.grid, width = patches.grid, patches.width
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: Batch, logits: Tensor) -> Tensor:
        masks = None if batch.annotations is None else batch.annotations.masks
        if masks is None:
            return super().forward(batch, logits)
        (last_bnd,) = self.reader.take()
        return self.weight * mask_loss(self.head(last_bnd.to(self.head.weight.dtype)), masks, self.grid)

    def loss(self, patch_targets: Tensor | None) -> Tensor:
        (last_bnd,) = self.reader.take()
        if patch_targets is None:
            raise TreatmentError(
                "The mixing loss needs a target for every patch, but this batch has none: mix it with CutMix on patch"
                " borders, or set the weight of mixing to 0."
            )
        return mixing_loss(self.head(last_bnd.to(self.head.weight.dtype)), patch_targets)


@register
class PatchDiversityTreatment(Treatment):
    """Three losses against patches that become alike: cosine, contrastive and mixing [gong2021 Sec. 4].

    Attributes:
        cosine: Weight of the cosine loss.
        contrastive: Weight of the contrastive loss; by default 1, or 0 for networks that merge patches.
        mixing: Weight of the mixing loss, which also sets the augmentation to CutMix on patch borders; the patches of
            the task segmentation have classes without that.
        normalise: Use vectors of length 1 in the contrastive loss.
        cutmix: Alpha of CutMix's Beta distribution.
        probability: Share of the images that are mixed.
    """

    name: ClassVar[str] = "patch_diversity"
    paper: ClassVar[str] = "gong2021 Sec. 4, Table 5"
    changes: ClassVar[str] = "adds three losses on the patches; CutMix on patch borders instead of mixup and repeats"
    costs: ClassVar[str] = "no pass more; O(N^2 D) for the N patches' cosines and one linear head on every patch"
    tasks = ("classification", "segmentation")
    part: ClassVar[str] = "patches on a grid, mixed by attention or MLPs"

    cosine: Weight = Field(1.0, description="weight of the cosine loss; 0 is off")
    contrastive: Weight | None = Field(
        None, description="weight of the contrastive loss; 0 is off; by default 1, and off where patches are merged"
    )
    mixing: Weight = Field(1.0, description="weight of the mixing loss; 0 is off and leaves the augmentation alone")
    normalise: bool = Field(False, description="vectors of length 1 in the contrastive loss; the paper's are raw")
    cutmix: Annotated[float, Field(gt=0)] | None = Field(
        None, description="alpha of CutMix's Beta distribution; by default the recipe's, or 1 where it has none"
    )
    probability: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="share of the images that are mixed; by default the recipe's mix_probability"
    )

    @model_validator(mode="after")
    def _check_unused_options(self) -> PatchDiversityTreatment:
        if self.cosine == self.contrastive == self.mixing == 0:
            raise ValueError("the weights of all three losses are 0: set one of them, or leave the treatment out")
        if self.normalise and self.contrastive == 0:
            raise ValueError("'normalise' is only for the contrastive loss, whose weight is 0: leave it out")
        for name in ("cutmix", "probability"):
            if getattr(self, name) is not None and self.mixing == 0:
                raise ValueError(f"'{name}' is only for the mixing loss, whose weight is 0: leave it out")
        return self

    def objectives(self, network: nn.Module, spec: ImageSpec) -> Mapping[str, Objective]:
        objectives = self.patch_objectives(self.locate(network, spec), spec.num_classes)
        dropping = any(isinstance(module, PatchDropout) and module.prob for module in network.modules())
        if dropping and objectives.keys() - {"patch_cosine"}:
            raise TreatmentError(
                f"{self.name}: the contrastive and the mixing loss need every patch, but this network drops some in"
                " training: set both weights to 0, or train without dropping patches."
            )
        return objectives

    def locate(self, network: nn.Module, spec: ImageSpec) -> Patches:
        """Locate the patches of a network.

        Raises:
            TreatmentError: The network has no patches on a grid.
        """
        anatomy = examine(self, network, spec)
        if not anatomy.of_kind("msa", "mlp", "token_mlp"):
            raise missing(self, network)
        try:
            return Patches.of(anatomy, spec)
        except AnatomyError as error:
            raise missing(self, network, str(error)) from error

    def patch_objectives(self, patches: Patches, classes: int) -> dict[str, PatchObjective]:
        """Build the losses with a nonzero weight, by name.

        Raises:
            TreatmentError: There is one patch only, patches are merged, or the patches do not divide the image.
        """
        if patches.grid == (1, 1):
            raise TreatmentError(
                f"{self.name} needs at least two patches, but at {patches.size[0]} x {patches.size[1]} pixels this"
                " network has one: use larger images or smaller patches."
            )
        alone = self.cosine == self.mixing == 0
        if (alone or self.contrastive or self.normalise) and not patches.kept:
            advice = f"leave {'contrastive' if self.contrastive else 'normalise'} out"
            raise TreatmentError(
                f"{self.name}: the contrastive loss does not apply to a network that merges patches;"
                f" {'give cosine or mixing a weight' if alone else advice}."
            )
        objectives: dict[str, PatchObjective] = {}
        contrastive = float(patches.kept) if self.contrastive is None else self.contrastive
        if self.mixing:
            _ = patches.cell  # raises if the patches do not divide the image
        if self.cosine:
            objectives["patch_cosine"] = CosineObjective(self.cosine, Reader(last=patches.last))
        if contrastive:
            reader = Reader(first=patches.first, last=patches.last)
            objectives["patch_contrastive"] = ContrastiveObjective(contrastive, reader, self.normalise)
        if self.mixing:
            reader = Reader(last=patches.last)
            objectives["patch_mixing"] = MixingObjective(self.mixing, reader, patches, classes)
        return objectives

    def augmentation(self, augment: Augment, network: nn.Module, spec: ImageSpec) -> Augment:
        """Return CutMix on patch borders with patch targets, without mixup or repeated augmentation [Sec. 5.1]."""
        if not self.mixing:
            return augment
        height, width = self.locate(network, spec).cell
        changes = {
            "mixup": 0.0,
            "cutmix": self.cutmix or augment.cutmix or 1.0,
            "cutmix_cell": height if height == width else [height, width],
            "repeats": 1,
        }
        if self.probability is not None:
            changes["mix_probability"] = self.probability
        return Augment(**{**augment.model_dump(), **changes})


class PatchDiversity(nn.Module):
    """The patch losses of [gong2021 Sec. 4] for your own training loop.

    It registers hooks in `network`: copy the network (for averaged weights) before, and call `remove()` when training
    is over.

    Args:
        network: A network with patches on a grid.
        classes: Number of classes.
        size: Height and width of the images; the network's own size unless given.
        **options: The options of the treatment `patch_diversity`.

    Raises:
        TreatmentError: The losses do not fit the network, or it already has them.

    Example:
        >>> import timm, torch.nn.functional as F
        >>> network = timm.models.VisionTransformer(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2)
        >>> diversity = PatchDiversity(network, classes=1000)
        >>> optimizer = torch.optim.AdamW([*network.parameters(), *diversity.parameters()])
        >>> images, labels = torch.rand(4, 3, 32, 32), torch.tensor([7, 3, 9, 3])
        >>> images, targets, patch_targets = diversity.mix(images, labels)
        >>> task = F.cross_entropy(network(images), targets)
        >>> losses = diversity(patch_targets)  # weighted losses of the pass just made
        >>> sorted(losses)
        ['patch_contrastive', 'patch_cosine', 'patch_mixing']
        >>> (task + sum(losses.values())).backward()
    """

    def __init__(
        self,
        network: nn.Module,
        classes: int,
        size: tuple[int, int] | None = None,
        **options: float | bool | None,
    ) -> None:
        super().__init__()
        self.classes = classes
        self.treatment = validate(PatchDiversityTreatment, options)
        if getattr(network, _WATCHED, False):
            raise TreatmentError("This network already has patch losses: remove() them before adding others.")
        spec = image_spec(network)
        self.patches = self.treatment.locate(network, spec if size is None else replace(spec, img_size=size))
        like = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
        self._named = self.treatment.patch_objectives(self.patches, classes)
        self.objectives = nn.ModuleDict(self._named).to(like.device, like.dtype)
        self._unmark = partial(setattr, network, _WATCHED, False)  # an attribute would make it a child of this module
        setattr(network, _WATCHED, True)

    def forward(self, patch_targets: Tensor | None = None) -> dict[str, Tensor]:
        """Return the weighted losses of the latest training pass, by name."""
        return {name: objective.weight * objective.loss(patch_targets) for name, objective in self._named.items()}

    def mix(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mix every image with the next one by CutMix on patch borders.

        Args:
            images: [B, C, H, W].
            targets: Class indices [B] or soft targets [B, K].

        Returns:
            Images, targets [B, K] and patch targets [B, N, K]. Randomness comes from torch's global generator.
        """
        alpha, probability = self.treatment.cutmix or 1.0, self.treatment.probability
        size = (images.shape[2], images.shape[3])
        mixing = PatchMixing(alpha, 1.0 if probability is None else probability, self.patches.cell, size)
        shares = soft_targets(targets.cpu(), self.classes).to(images) if targets.ndim == 1 else targets
        keys = torch.randint(2**62, (len(images),)).numpy().astype("uint64")
        return mixing(images, shares, torch.arange(len(images)).roll(-1).numpy(), keys)

    def remove(self) -> None:
        """Remove the hooks from the network."""
        for objective in self._named.values():
            objective.reader.remove()
        self._unmark()
