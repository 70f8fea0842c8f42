"""Semantic segmentation: a backbone with UPerNet or a linear head on its pyramid, and its use on large images.

Shapes: B images, C channels, K classes, H x W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitclinic._core.errors import MissingExtraError
from vitclinic._core.precision import upcast
from vitclinic._core.segmentation import VOID
from vitclinic.anatomy import eval_mode
from vitclinic.data import Batch, Dataset, ImageSpec, evaluation_batches
from vitclinic.models.headed import Headed
from vitclinic.models.pyramid import Pyramid, freeze_unread

Size = tuple[int, int]
_PIXELS = 2**20
"""Pixels that are scored at a time, at most, unless one image has more."""


class Segmenter(Headed):
    """A backbone that gives scores of the classes for each pixel.

    In training it returns `{"out": scores, "aux": scores}` if it has an auxiliary head, which reads the second
    coarsest map, else the scores alone.

    Args:
        backbone: The network, without a classifier.
        spec: The images it takes, and the number of classes.
        head: `upernet` [Xiao et al., ECCV 2018], or `linear`: all maps, brought to the finest, by one matrix.
        width: Channels of UPerNet and of the auxiliary head.
        auxiliary: Have an auxiliary head.
        norm: `group`, which does not depend on the batch, or `batch`, as the papers have it.

    Attributes:
        window: Height and width of the images that it takes; larger ones are seen by windows of this size (`slide`).

    Example:
        >>> import timm
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=0)
        >>> network = Segmenter(vit, ImageSpec(7, 3, (32, 32)), "linear").eval()
        >>> network(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 7, 32, 32])
    """

    def __init__(
        self,
        backbone: nn.Module,
        spec: ImageSpec,
        head: Literal["upernet", "linear"] = "upernet",
        width: int = 256,
        auxiliary: bool = False,
        norm: Literal["group", "batch"] = "group",
    ) -> None:
        super().__init__(backbone)
        self.window: Size = spec.img_size
        self.pyramid = Pyramid(backbone, spec)
        channels = self.pyramid.channels
        self.head: nn.Module
        if head == "upernet":
            self.head = nn.Sequential(_Decoder(channels, width, norm), nn.Conv2d(width, spec.num_classes, 1))
        else:
            self.head = nn.Sequential(_Concatenate(), nn.Conv2d(sum(channels), spec.num_classes, 1))
        self.auxiliary: nn.Module | None = None
        if auxiliary:
            convolution = nn.Conv2d(channels[-2], width, 3, padding=1, bias=False)
            self.auxiliary = nn.Sequential(
                convolution, _make_norm(norm, width), nn.ReLU(), nn.Conv2d(width, spec.num_classes, 1)
            )
        freeze_unread(self, spec)

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the scores [B, K, H, W]; in training with an auxiliary head, those of both."""
        scores = self.outputs(images, with_auxiliary=self.training)
        return scores[0] if len(scores) == 1 else {"out": scores[0], "aux": scores[1]}

    def outputs(self, images: Tensor, with_auxiliary: bool = True) -> list[Tensor]:
        """Return the scores of the head, and of the auxiliary head if there is one."""
        maps = self.pyramid(self.backbone, images)
        found = [self.head(maps)]
        if self.auxiliary is not None and with_auxiliary:
            found.append(self.auxiliary(maps[-2]))
        size = images.shape[2:]
        return [F.interpolate(scores, size, mode="bilinear", align_corners=False) for scores in found]


class _Decoder(nn.Module):
    """UPerNet's decoder, by segmentation-models-pytorch, on our maps."""

    def __init__(self, channels: Sequence[int], width: int, norm: str) -> None:
        super().__init__()
        if find_spec("segmentation_models_pytorch") is None:
            raise MissingExtraError("task.head=upernet", "dense")
        from segmentation_models_pytorch.decoders.upernet.decoder import UPerNetDecoder

        # It leaves out the first two of the maps that it is given, those at full and half size.
        self.decoder = UPerNetDecoder([0, 0, *channels], encoder_depth=1 + len(channels), decoder_channels=width)
        if norm == "group":
            _replace_norms(self.decoder)

    def forward(self, maps: list[Tensor]) -> Tensor:
        decoded: Tensor = self.decoder([maps[0], maps[0], *maps])
        return decoded


class _Concatenate(nn.Module):
    """All maps at the size of the finest, one behind the other."""

    def forward(self, maps: list[Tensor]) -> Tensor:
        size = maps[0].shape[2:]
        return torch.cat([F.interpolate(each, size, mode="bilinear", align_corners=False) for each in maps], dim=1)


def _make_norm(norm: str, width: int) -> nn.Module:
    """Return a norm; groups have 16 channels, since a group of one on a map of one place would always be 0."""
    if norm == "batch":
        return nn.BatchNorm2d(width)
    return nn.GroupNorm(max(1, width // 16) if width % 16 == 0 else 1, width)


def _replace_norms(module: nn.Module) -> None:
    """Replace BatchNorm, which a batch of one image has no use for on a map of one place, by GroupNorm."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, _make_norm("group", child.num_features))
        else:
            _replace_norms(child)


def read_masks(batch: Batch) -> Tensor:
    """Return the class of each pixel of a batch, [B, H, W]."""
    assert batch.annotations is not None
    assert batch.annotations.masks is not None
    return batch.annotations.masks


def pixel_loss(scores: Tensor, masks: Tensor) -> Tensor:
    """Return the cross-entropy of scores [B, K, H, W], averaged over the known pixels of each image, then over images.

    So it does not depend on how a batch is divided. An image that is all void counts 0.
    """
    scores = upcast(scores)
    of_pixels = F.cross_entropy(scores, masks.long(), ignore_index=VOID, reduction="none")
    return (of_pixels.sum((1, 2)) / (masks != VOID).sum((1, 2)).clamp(min=1)).mean()


def score_pixels(
    network: nn.Module,
    dataset: Dataset,
    split: str,
    window: Size,
    batch_size: int = 256,
    part: int = 0,
    parts: int = 1,
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield the images of a split with their scores [B, K, H, W], a few large images or many small ones at a time.

    Args:
        network: The network, which takes pixels in [0, 1].
        dataset: The data.
        split: `train`, `val` or `test`.
        window: The size that the network takes; larger images are seen window by window.
        batch_size: Images at a time, at most.
        part: Which part of the images.
        parts: Into how many they are divided.
    """
    at_once = max(1, min(batch_size, _PIXELS // (dataset.size[0] * dataset.size[1])))
    parameter = next(network.parameters())
    with torch.no_grad(), eval_mode(network):
        for batch in evaluation_batches(dataset, split, at_once, part, parts):
            moved = batch.to(parameter.device, parameter.dtype)
            yield moved, slide(network, moved.images, window)


def slide(network: Callable[[Tensor], Tensor], images: Tensor, window: Size, stride: float = 2 / 3) -> Tensor:
    """Return the scores [B, K, H, W] of images of any size by a network that takes windows of one size.

    Where windows overlap, their scores are averaged. An image that is smaller than the window is continued by its last
    row and column, and the scores of what is added are left out.

    Args:
        network: From images [B, C, h, w] to scores [B, K, h, w].
        images: [B, C, H, W].
        window: Height h and width w.
        stride: The step from one window to the next, as a share of its side.

    Example:
        >>> brightness = lambda images: images.mean(1, keepdim=True)
        >>> images = torch.rand(1, 3, 9, 11)
        >>> torch.allclose(slide(brightness, images, (4, 4)), brightness(images))
        True
    """
    height, width = images.shape[2:]
    beyond = max(0, window[0] - height), max(0, window[1] - width)
    if any(beyond):
        images = F.pad(images, (0, beyond[1], 0, beyond[0]), mode="replicate")
    tops, lefts = (_starts(side, length, stride) for side, length in zip(images.shape[2:], window, strict=True))
    total: Tensor | None = None
    count = images.new_zeros(1, 1, *images.shape[2:])
    for top in tops:
        for left in lefts:
            rows, columns = slice(top, top + window[0]), slice(left, left + window[1])
            scores = network(images[:, :, rows, columns])
            if total is None:
                total = scores.new_zeros(*scores.shape[:2], *images.shape[2:])
            total[:, :, rows, columns] += scores
            count[:, :, rows, columns] += 1
    assert total is not None
    return (total / count)[:, :, :height, :width]


def _starts(side: int, length: int, stride: float) -> list[int]:
    """Return where windows start: evenly, and the last at the end."""
    step = max(1, int(stride * length))
    steps = math.ceil((side - length) / step)
    return [min(number * step, side - length) for number in range(steps + 1)]
