"""Progressive resizing: training images are smaller in the first part of a run, which makes its steps cheaper.

Which size a step has depends on the step alone, so that a resumed run goes on with the right one. Weights do not know
of sizes: a ViT resamples its position embedding to the smaller grid in the forward pass.

Shapes: B images, C channels, H x W pixels, N patches, K classes.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, model_validator

from vitclinic._core.config import Settings
from vitclinic._core.errors import ModelError, RecipeError, first_line
from vitclinic.training.schedule import Duration, in_steps

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitclinic.data import Batch, ImageSpec
    from vitclinic.models import Normalized

Size = tuple[int, int]


class ResizingConfig(Settings):
    """`progressive_resizing` of a recipe.

    Example:
        >>> ResizingConfig(start=0.5, stages=2).shares
        [0.5, 0.75]
    """

    main_key: ClassVar[str | None] = "start"

    start: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="side of the first training images, as a share of the full one; 1 is off"
    )
    until: Duration = Field("70%", description="when full size is reached: epochs, 'n steps' or 'n%'")
    stages: Annotated[int, Field(ge=1)] = Field(
        1, description="number of smaller sizes, in even steps from `start` to full size"
    )

    @model_validator(mode="after")
    def _check_unused_options(self) -> ResizingConfig:
        for name in ("until", "stages"):
            if self.start == 1 and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"'{name}' has no effect without a 'start' below 1")
        return self

    @property
    def shares(self) -> list[float]:
        """The smaller sizes in order, as shares of the full side; empty if resizing is off."""
        if self.start == 1:
            return []
        return [self.start + (1 - self.start) * stage / self.stages for stage in range(self.stages)]

    def ends(self, steps_per_epoch: float, total_steps: int) -> list[int]:
        """Return the step, counted from 0, at which each smaller size is given up for the next one.

        Example:
            >>> ResizingConfig(start=0.5, stages=2).ends(steps_per_epoch=10, total_steps=100)
            [35, 70]
        """
        until = in_steps(self.until, steps_per_epoch, total_steps)
        count = len(self.shares)
        return [min(total_steps, math.ceil(until * stage / count - 1e-9)) for stage in range(1, count + 1)]

    def lengths(self, steps_per_epoch: float, total_steps: int) -> list[int]:
        """Return the number of steps at each size; the last is the full one."""
        ends = self.ends(steps_per_epoch, total_steps)
        return [end - begin for begin, end in zip([0, *ends], [*ends, total_steps], strict=True)]

    def mean_area(self, steps_per_epoch: float, total_steps: int) -> float:
        """Return the pixels of a run's training images as a share of those at full size.

        Example:
            >>> ResizingConfig(start=0.5, until="50%").mean_area(steps_per_epoch=10, total_steps=100)
            0.625
        """
        lengths = self.lengths(steps_per_epoch, total_steps)
        return sum(count * side**2 for count, side in zip(lengths, [*self.shares, 1], strict=True)) / total_steps


class ImageSizes:
    """Size of the training images as a function of the step, counted from 0.

    Args:
        sizes: Height and width of each stage; the last is the full size.
        ends: The step at which each stage but the last ends.

    Example:
        >>> sizes = ImageSizes([(16, 16), (32, 32)], ends=[70])
        >>> sizes(69), sizes(70)
        ((16, 16), (32, 32))
    """

    def __init__(self, sizes: Sequence[Size], ends: Sequence[int]) -> None:
        self.sizes, self.ends = list(sizes), list(ends)

    def __call__(self, step: float) -> Size:
        return self.sizes[bisect.bisect_right(self.ends, step)]

    @property
    def full(self) -> Size:
        """The size of the last stage, at which the network is evaluated."""
        return self.sizes[-1]

    def describe(self) -> str:
        """Return a sentence about the sizes and the steps that they begin at, counted from 1."""
        begins = zip(self.sizes, [0, *self.ends], strict=True)
        parts = [f"{height} x {width} pixels from step {begin + 1}" for (height, width), begin in begins]
        return f"training images have {', '.join(parts)} (progressive_resizing)"


def choose_sizes(
    shares: Sequence[float], network: Normalized, spec: ImageSpec, cell: int | Sequence[int] | None = None
) -> list[Size]:
    """Return the smaller sizes and the full one, in multiples of what the network and CutMix need.

    Args:
        shares: The smaller sides, as shares of the full one.
        network: The network, which is run once at each size.
        spec: The images at full size.
        cell: The recipe's `data.augment.cutmix_cell`, whose cells have targets of their own.

    Raises:
        RecipeError: The first size is no smaller than the full one.
        ModelError: The network does not take smaller images.

    Example:
        >>> from vitclinic.data import ImageSpec
        >>> from vitclinic.models import create_model
        >>> choose_sizes([0.6], create_model("resnet18"), ImageSpec(1000, 3, (32, 32)))
        [(20, 20), (32, 32)]
    """
    from vitclinic.models.input_sizes import find_multiple, nearest_multiple

    full = spec.img_size
    if not shares:
        return [full]
    multiple = find_multiple(network.trunk, cell)
    sizes = [nearest_multiple(full, share, multiple) for share in shares]
    if sizes[0] == full:
        raise RecipeError(
            f"'progressive_resizing.start': {shares[0]:g} of {full[0]} x {full[1]} pixels, in multiples of"
            f" {multiple[0]} x {multiple[1]}, is full size; choose a smaller share."
        )
    for size in dict.fromkeys(sizes):
        _check_size(network, spec.in_chans, size)
    return [*sizes, full]


def _check_size(network: nn.Module, channels: int, size: Size) -> None:
    """Run a network once on images of a size; raise a ModelError if it does not take them."""
    import torch

    from vitclinic.anatomy import eval_mode

    like = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
    try:
        with torch.no_grad(), eval_mode(network):
            network(torch.full((2, channels, *size), 0.5, dtype=like.dtype, device=like.device))
    except Exception as error:  # whatever a network, or a treatment of it, says of images that it does not take
        reason = first_line(error)
        raise ModelError(
            f"'progressive_resizing' needs a network that takes smaller images, and this one does not take"
            f" {size[0]} x {size[1]} pixels ({reason}); leave it out, or choose another network."
        ) from error


def shrink(batch: Batch, size: Size, cell: int | Sequence[int] | None = None) -> Batch:
    """Return a batch with its images at a smaller size, by antialiased bilinear interpolation.

    Targets of patches follow: a patch of the smaller image has the mean of the targets that it covers, by area.

    Args:
        batch: Images with their targets.
        size: Height and width to shrink to.
        cell: Pixels of a patch that has a target of its own, the same in the full and in the smaller image.
    """
    import torch.nn.functional as F

    from vitclinic.models.input_sizes import as_pair

    images = F.interpolate(batch.images, size, mode="bilinear", align_corners=False, antialias=True)
    if batch.patch_targets is None:
        return replace(batch, images=images)
    full, sides = batch.images.shape[-2:], as_pair(cell)
    rows, columns = ((full[axis] // sides[axis], size[axis] // sides[axis]) for axis in (0, 1))
    return replace(batch, images=images, patch_targets=_average_targets(batch.patch_targets, rows, columns))


def _average_targets(targets_bnk: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    """Return targets on a coarser grid; rows and columns are given before and after."""
    import torch

    across = [_overlaps(*axis).to(targets_bnk) for axis in (rows, columns)]
    targets_bhwk = targets_bnk.reshape(len(targets_bnk), rows[0], columns[0], -1)
    return torch.einsum("ih,jw,bhwk->bijk", *across, targets_bhwk).flatten(1, 2)


def _overlaps(before: int, after: int) -> Tensor:
    """Return the share of each of `after` equal parts of a line that lies in each of `before`, [after, before]."""
    import torch

    part, old = before / after, torch.arange(before, dtype=torch.float64)
    low = torch.arange(after, dtype=torch.float64)[:, None] * part
    return ((low + part).clamp(max=old + 1) - low.clamp(min=old)).clamp(min=0) / part
