"""Augmentation: crop, flip, RandAugment and erasing of single images; mixup and CutMix of pairs; random per sample.

Levels:
  none   nothing
  light  crop and flip: shifts by up to 1/8 with zero padding up to 64 pixels (CIFAR's pad 4),
         random resized crops above
  deit   light, RandAugment m9 n2, random erasing, mixup, CutMix, label smoothing and repeated augmentation
         [park2022 App. A, hyeonwoo2023 Sec. 4, gong2021 Sec. 5]

RandAugment's operations are timm's; which of them an image gets derives from the sample's key.
Shapes: B images, H x W pixels as stored, h x w as the network takes them, C channels, K classes.

For mixup and CutMix each image has a partner (see `stream`: its neighbour in the training stream) and its own
lambda ~ Beta(a, a) and method, so that its mixed image does not depend on the batch it happens to be in. CutMix on the
cells of a grid also gives targets for patches.

    mixup:  x = lambda x_i + (1 - lambda) x_j
    CutMix: a box of area 1 - lambda of x_i shows x_j; lambda becomes the share of x_i that is left
    y = lambda y_i + (1 - lambda) y_j
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitclinic._core.errors import RecipeError
from vitclinic.data.config import Augment
from vitclinic.data.decoding import Images, Pixels, Size, as_image, centre_boxes, centre_view, is_photo, with_channels
from vitclinic.data.randomness import Keys, uniforms
from vitclinic.data.token_labels import Frames


class Augmenter:
    """Augmentation that turns stored pixels into the images of a training batch, [B, C, h, w] in [0, 1]."""

    def __init__(self, config: Augment, size: Size) -> None:
        self.config = config.resolve()
        self.size = size
        policy = self.config.randaugment
        self.randaugment = None if policy in (None, "off") else RandAugment(str(policy), size)

    @property
    def is_heavy(self) -> bool:
        """True if augmentation works image by image, which is slow enough to be worth worker processes."""
        return self.randaugment is not None or (self.config.level != "none" and is_photo(self.size))

    def __call__(self, images: Images, keys: Keys) -> Tensor:
        return self._change(self._frame(images, keys)[0], keys)

    def augment(self, images: Images, keys: Keys) -> tuple[Tensor, Frames]:
        """Return the images of a batch, and what they show of the stored ones.

        RandAugment may turn and shift an image a little further, which the frames do not tell.
        """
        x_bhwc, boxes = self._frame(images, keys)
        boxes = centre_boxes(images, self.size) if boxes is None else boxes
        mirrored = is_mirrored(keys) if self.config.flip else np.zeros(len(keys), bool)
        return self._change(x_bhwc, keys), Frames(boxes, mirrored)

    def _frame(self, images: Images, keys: Keys) -> tuple[NDArray[np.uint8], NDArray[np.float64] | None]:
        """Return the framed images, and what they show as `Frames.boxes`, or None for the centre."""
        if self.config.level == "none":
            return centre_view(images, self.size), None
        if is_photo(self.size):
            cropped, boxes = crop_and_resize(images, keys, self.size)
        else:
            padding = self.size[0] // 8
            cropped, boxes = shift_crop(np.asarray(images), keys, padding), shift_boxes(keys, padding, self.size)
        return flip(cropped, keys) if self.config.flip else cropped, boxes

    def _change(self, x_bhwc: NDArray[np.uint8], keys: Keys) -> Tensor:
        if self.randaugment is not None:
            x_bhwc = self.randaugment(x_bhwc, keys)
        return erase(to_unit_interval(x_bhwc), keys, self.config.erasing or 0.0)


def to_unit_interval(x_bhwc: NDArray[np.uint8] | NDArray[np.float32]) -> Tensor:
    """Turn bytes, or floats in [0, 1] already, [B, h, w, C] into floats [B, C, h, w] in [0, 1]."""
    if x_bhwc.dtype == np.float32:
        return torch.from_numpy(x_bhwc).permute(0, 3, 1, 2).contiguous()
    return torch.from_numpy(x_bhwc).permute(0, 3, 1, 2).contiguous().float().div_(255)


def shift_crop(x_bhwc: NDArray[np.uint8], keys: Keys, padding: int) -> NDArray[np.uint8]:
    """Pad by zeros on all sides and crop back to the old size at a random place."""
    b, h, w, _ = x_bhwc.shape
    offset = _shifts(keys, padding)
    padded = np.pad(x_bhwc, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (h, w), axis=(1, 2))  # [B, y, x, C, h, w]
    return windows[np.arange(b), offset[:, 0], offset[:, 1]].transpose(0, 2, 3, 1)


def _shifts(keys: Keys, padding: int) -> NDArray[np.int64]:
    """Return where `shift_crop` cuts the padded images, (top, left)."""
    return (uniforms(keys, "shift", 2) * (2 * padding + 1)).astype(np.int64)


def shift_boxes(keys: Keys, padding: int, size: Size) -> NDArray[np.float64]:
    """Return what `shift_crop` leaves of images of `size`, as `Frames.boxes`."""
    top, left = (_shifts(keys, padding) - padding).T
    height, width = size
    return np.stack([left / width, top / height, left / width + 1, top / height + 1], axis=1)


def flip(x_bhwc: NDArray[np.uint8], keys: Keys) -> NDArray[np.uint8]:
    """Mirror half of the images left to right."""
    mirrored, flipped = is_mirrored(keys), x_bhwc.copy()
    flipped[mirrored] = x_bhwc[mirrored, :, ::-1]
    return flipped


def is_mirrored(keys: Keys) -> NDArray[np.bool_]:
    """Return which images `flip` mirrors."""
    mirrored: NDArray[np.bool_] = uniforms(keys, "flip", 1)[:, 0] < 0.5
    return mirrored


def random_resized_crop(
    images: Images, keys: Keys, size: Size, scale: tuple[float, float] = (0.08, 1.0)
) -> NDArray[np.uint8]:
    """Crop a share of the area within `scale` at an aspect ratio of 3/4 to 4/3, and resize to `size`."""
    return crop_and_resize(images, keys, size, scale)[0]


def crop_and_resize(
    images: Images, keys: Keys, size: Size, scale: tuple[float, float] = (0.08, 1.0)
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Return what `random_resized_crop` does, and what it left of the images, as `Frames.boxes`."""
    crops, boxes = [], []
    for image, draw in zip(images, uniforms(keys, "resized crop", 4), strict=True):
        box = _crop_box(image.shape, draw, scale)
        crops.append(_resize(image, box, size))
        boxes.append(np.divide(box, (image.shape[1], image.shape[0]) * 2))
    return np.stack(crops), np.stack(boxes)


def _crop_box(
    shape: tuple[int, ...], draw: NDArray[np.float64], scale: tuple[float, float]
) -> tuple[float, float, float, float]:
    height, width = shape[:2]
    area = (scale[0] + (scale[1] - scale[0]) * draw[0]) * height * width
    aspect = np.exp(np.log(3 / 4) + draw[1] * (np.log(4 / 3) - np.log(3 / 4)))
    w = min(float(np.sqrt(area * aspect)), width)
    h = min(float(np.sqrt(area / aspect)), height)
    left, top = draw[2] * (width - w), draw[3] * (height - h)
    return left, top, left + w, top + h


def _resize(image: Pixels, box: tuple[float, float, float, float], size: Size) -> Pixels:
    view = as_image(image)
    resized = np.asarray(view.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=box))
    return resized.reshape(*size, image.shape[2])


class RandAugment:
    """RandAugment or AutoAugment as in timm, with one policy per sample, drawn from the sample's key."""

    def __init__(self, policy: str, size: Size) -> None:
        from timm.data.auto_augment import auto_augment_transform, rand_augment_transform

        check_magnitude(policy)
        hparams = {"translate_const": int(min(size) * 0.45), "img_mean": (124, 116, 104)}
        try:
            build = rand_augment_transform if policy.startswith("rand") else auto_augment_transform
            self.transform = build(policy, hparams)
        except (AssertionError, ValueError) as error:
            raise RecipeError(
                f"'data.augment.randaugment': timm cannot parse the policy '{policy}' ({error})."
            ) from error
        keep_a_bit(self.transform)

    def __call__(self, x_bhwc: NDArray[np.uint8], keys: Keys) -> NDArray[np.uint8]:
        # timm draws from the global generators: seed them for each sample, then give them back as they were.
        states = random.getstate(), np.random.get_state()
        try:
            return np.stack([self._one(image, int(key)) for image, key in zip(x_bhwc, keys, strict=True)])
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])

    def _one(self, image: Pixels, key: int) -> Pixels:
        random.seed(key)
        np.random.seed(key % 2**32)
        changed = self.transform(as_image(image).convert("RGB"))
        return with_channels(changed, image.shape[2])


def check_magnitude(policy: str) -> None:
    """Raise a RecipeError for a magnitude that timm would lower in silence: to 10, unless `mmax` is raised."""
    strength, limit = (re.search(rf"-{key}([\d.]+)", policy) for key in ("m", "mmax"))
    most = limit[1] if limit else "10"
    if strength and float(strength[1]) > float(most):
        raise RecipeError(
            f"'data.augment.randaugment': timm would lower the magnitude of {policy} to {most}; write"
            f" {policy}-mmax{strength[1]} to have it."
        )


def keep_a_bit(randaugment: Any) -> None:
    """Patch timm's policy, which posterizes to 0 bits at full magnitude: current Pillow rejects that."""
    for op in getattr(randaugment, "ops", None) or [op for pair in randaugment.policy for op in pair]:
        if op.name.startswith("Posterize"):
            op.level_fn = _AtLeastOneBit(op.level_fn)


class _AtLeastOneBit:
    """Level function that returns at least 1 bit; a class rather than a closure, so that it can be sent to workers."""

    def __init__(self, level: Any) -> None:
        self.level = level

    def __call__(self, magnitude: float, hparams: Any) -> tuple[int]:
        return (max(1, self.level(magnitude, hparams)[0]),)


def erase(x_bchw: Tensor, keys: Keys, probability: float) -> Tensor:
    """Apply random erasing: with `probability`, fill a box of 2 to 33% of the area with uniform noise in [0, 1]."""
    if probability == 0:
        return x_bchw
    _, c, h, w = x_bchw.shape
    draws = uniforms(keys, "erase", 5)
    for row in np.flatnonzero(draws[:, 0] < probability):
        area = (0.02 + (1 / 3 - 0.02) * draws[row, 1]) * h * w
        aspect = np.exp(np.log(0.3) * (1 - 2 * draws[row, 2]))
        high = int(np.clip(round(np.sqrt(area * aspect)), 1, h))
        wide = int(np.clip(round(np.sqrt(area / aspect)), 1, w))
        top, left = int(draws[row, 3] * (h - high + 1)), int(draws[row, 4] * (w - wide + 1))
        noise = uniforms(keys[row : row + 1], "erase noise", c * high * wide).reshape(c, high, wide)
        x_bchw[row, :, top : top + high, left : left + wide] = torch.from_numpy(noise)
    return x_bchw


def soft_targets(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """Convert labels [B] to class probabilities [B, K], with `smoothing` spread evenly over all classes."""
    off = smoothing / classes
    targets = torch.full((len(labels), classes), off)
    return targets.scatter_(1, labels[:, None], 1 - smoothing + off)


class Mixing:
    """Mixup with Beta(mixup, mixup) and CutMix with Beta(cutmix, cutmix); if both are on, each half the time."""

    def __init__(self, mixup: float, cutmix: float, probability: float = 1.0) -> None:
        self.mixup, self.cutmix, self.probability = mixup, cutmix, probability

    def __call__(self, x_bchw: Tensor, y_bk: Tensor, partner: NDArray[np.int64], keys: Keys) -> tuple[Tensor, Tensor]:
        """Mix the first len(partner) images, each with the row that `partner` gives."""
        count = len(partner)
        keep, cut = self.lambdas(keys[:count])
        mixed = x_bchw[:count].clone()
        blended = np.flatnonzero(~cut & (keep < 1))
        if blended.size:
            weight = torch.from_numpy(keep[blended]).float()[:, None, None, None]
            mixed[blended] = torch.lerp(x_bchw[partner[blended]], x_bchw[blended], weight)
        boxes = cut_boxes(keep, keys[:count], x_bchw.shape[2], x_bchw.shape[3])
        for row in np.flatnonzero(cut & (keep < 1)):
            top, bottom, left, right = boxes[row]
            mixed[row, :, top:bottom, left:right] = x_bchw[partner[row], :, top:bottom, left:right]
            keep[row] = 1 - (bottom - top) * (right - left) / (x_bchw.shape[2] * x_bchw.shape[3])
        share = torch.from_numpy(keep).float()[:, None]
        return mixed, share * y_bk[:count] + (1 - share) * y_bk[partner]

    def lambdas(self, keys: Keys) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return each image's lambda (1 if it is not mixed), and True for those that are cut rather than blended."""
        from scipy.special import betaincinv

        draws = uniforms(keys, "mixing", 3)
        cut = draws[:, 0] < (0.5 if self.mixup and self.cutmix else float(self.cutmix > 0))
        alpha = np.where(cut, self.cutmix, self.mixup)
        keep = betaincinv(alpha, alpha, draws[:, 1])
        return np.where(draws[:, 2] < self.probability, keep, 1.0), cut


def cut_boxes(keep: NDArray[np.float64], keys: Keys, height: int, width: int) -> NDArray[np.int64]:
    """Return (top, bottom, left, right) of boxes with the image's aspect and area 1 - keep, clipped at the borders."""
    side = np.sqrt(1 - keep)
    centre = uniforms(keys, "cut box", 2) * [height, width]
    half = np.stack([side * height, side * width], axis=1) / 2
    low, high = np.rint(centre - half), np.rint(centre + half)
    rows = np.clip(np.stack([low[:, 0], high[:, 0]], axis=1), 0, height)
    columns = np.clip(np.stack([low[:, 1], high[:, 1]], axis=1), 0, width)
    return np.concatenate([rows, columns], axis=1).astype(np.int64)


def mix_cells(x_bchw: Tensor, y_bk: Tensor, partner_b: Tensor, cut_bgg: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, targets [B, K] and patch targets [B, N, K] where the cells in `cut_bgg` show the partner.

    The first B = len(partner_b) images are mixed; `partner_b` says which row of all of them each is mixed with.
    """
    count, (rows, columns) = len(partner_b), cut_bgg.shape[1:]
    x_bcghgw = x_bchw.reshape(*x_bchw.shape[:2], rows, x_bchw.shape[2] // rows, columns, -1)
    mixed = torch.where(cut_bgg[:, None, :, None, :, None], x_bcghgw[partner_b], x_bcghgw[:count])
    cut_bn1 = cut_bgg.flatten(1)[:, :, None]
    patch_targets = torch.where(cut_bn1, y_bk[partner_b, None], y_bk[:count, None])
    share = 1 - cut_bn1.to(y_bk.dtype).mean(dim=1)
    targets = share * y_bk[:count] + (1 - share) * y_bk[partner_b]
    return mixed.reshape(count, *x_bchw.shape[1:]), targets, patch_targets


class PatchMixing:
    """CutMix with Beta(cutmix, cutmix) whose boxes are aligned to cells of `cell` pixels."""

    def __init__(self, cutmix: float, probability: float, cell: int | Sequence[int], size: Size) -> None:
        height, width = (cell, cell) if isinstance(cell, int) else cell
        if size[0] % height or size[1] % width:
            raise RecipeError(
                f"'data.augment.cutmix_cell': images of {size[0]} x {size[1]} pixels cannot be divided into cells of"
                f" {height} x {width}."
            )
        self.grid = size[0] // height, size[1] // width
        self._draws = Mixing(0.0, cutmix, probability)

    def __call__(
        self, x_bchw: Tensor, y_bk: Tensor, partner: NDArray[np.int64], keys: Keys
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return images, targets [B, K] and patch targets [B, N, K] of the first B = len(partner) images.

        `partner` gives the row that each is mixed with.
        """
        cut_bgg = torch.from_numpy(self._masks(keys[: len(partner)])).to(x_bchw.device)
        return mix_cells(x_bchw, y_bk, torch.from_numpy(partner).to(x_bchw.device), cut_bgg)

    def _masks(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which cells show the partner, [B, g, g']; a box is rounded to cells as CutMix's is to pixels."""
        keep, _ = self._draws.lambdas(keys)
        top, bottom, left, right = cut_boxes(keep, keys, *self.grid).T[:, :, None]
        row, column = np.arange(self.grid[0]), np.arange(self.grid[1])
        inside = ((row >= top) & (row < bottom))[:, :, None] & ((column >= left) & (column < right))[:, None, :]
        masks: NDArray[np.bool_] = inside
        return masks
