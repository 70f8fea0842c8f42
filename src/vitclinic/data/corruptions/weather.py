"""The weather corruptions: snow, frost, fog and spatter.

Frost's textures are made here, from noise; fog is a plasma fractal; water drops of spatter are lit by their distance
from edges, which are found as OpenCV finds them (Canny's detector, 5 x 5 chamfer distance).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitclinic.data.corruptions.blur import along_lines, fill, floor_to_level, gaussian_smooth, luma, round_to_level
from vitclinic.data.corruptions.noise import Draws
from vitclinic.data.corruptions.parameters import Setting
from vitclinic.data.randomness import generator

TEXTURES = 5
_SIDE = 512
_FIELDS = 14
"""Of float64, from which a texture is drawn."""
_DARK, _LIGHT = (0.05, 0.11, 0.2), (0.9, 0.95, 1.0)

_WATER = (175 / 255, 238 / 255, 238 / 255)
_MUD = (63 / 255, 42 / 255, 20 / 255)
_FARTHEST = 20
_RELIEF = ((-2.0, -1.0, 0.0), (-1.0, 1.0, 1.0), (0.0, 1.0, 2.0))
_DIAGONAL, _KNIGHT = 1.4, 2.1969
"""The lengths of a diagonal step and of a knight's move; that of a straight step is 1."""


def snow(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Draw flakes (magnified noise above a threshold), blurred at -135 to -45 degrees, over a whitened image.

    The flakes fall twice, the second time turned by 180 degrees.
    """
    mean, deviation, magnification, threshold, radius, sigma, keep = setting.parameters
    factor = max(1.0, magnification * setting.scale)
    h, w = x_bchw.shape[-2:]
    noise = draws.normal(1, math.ceil(h / factor), math.ceil(w / factor))
    flakes = fill(noise.mul_(deviation).add_(mean), factor, (h, w))
    flakes = floor_to_level(torch.where(flakes < threshold, 0.0, flakes))
    angles = draws.uniform(1)[:, 0].double().mul_(90).sub_(135)
    flakes = round_to_level(along_lines(flakes, radius * setting.scale, sigma * setting.scale, angles))
    white = torch.maximum(x_bchw, luma(x_bchw) * 1.5 + 0.5)
    whitened: Tensor = (x_bchw * keep).add_(white, alpha=1 - keep)
    return whitened.add_(flakes).add_(flakes.flip(2, 3))


def frost(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Return keep x + share f, where f is a random piece of one of five textures."""
    keep, share = setting.parameters
    c, h, w = x_bchw.shape[1:]
    # CIFAR-10-C takes the textures at a fifth of the size that ImageNet-C does.
    magnification = setting.scale * (0.2 if setting.parameter_set == "cifar10-c" else 1.0)
    draw = draws.uniform(3).cpu()
    frosted: Tensor = x_bchw * keep
    for row, (which, down, right) in enumerate(draw.tolist()):
        whole = texture(int(which * TEXTURES), magnification, max(h, w))
        top, left = int(down * (whole.shape[1] - h)), int(right * (whole.shape[2] - w))
        piece = whole[:, top : top + h, left : left + w].to(x_bchw.device).float().div_(255)
        frosted[row].add_(luma(piece[None])[0] if c == 1 else piece, alpha=share)
    return frosted


def texture_bytes() -> int:
    """Return the bytes held while the last texture of frost is drawn, which are then kept; 0 if all have been."""
    if _texture.cache_info().currsize == TEXTURES:
        return 0
    return _SIDE**2 * (3 * 4 * TEXTURES + _FIELDS * 8)


@lru_cache(maxsize=32)
def texture(number: int, magnification: float, smallest: int) -> Tensor:
    """Return texture `number` at a magnification, uint8 [3, side, side], repeated until it exceeds `smallest`."""
    image = torch.from_numpy(_texture(number))[None]
    side = max(8, round(_SIDE * magnification))
    if side != _SIDE:
        image = F.interpolate(image, size=(side, side), mode="bilinear", antialias=True)
    times = -(-(smallest + 1) // side)
    return image[0].repeat(1, times, times).mul_(255).round_().clamp_(0, 255).byte()


@lru_cache(maxsize=TEXTURES)
def _texture(number: int) -> NDArray[np.float32]:
    """Return texture `number`, [3, side, side] in [0, 1]."""
    random = generator("frost", number)
    bend = 20.0 + 7.0 * number
    rows, columns = np.meshgrid(np.arange(_SIDE), np.arange(_SIDE), indexing="ij")
    ice = np.zeros((_SIDE, _SIDE))
    for stretch, weight in ((1.0, 0.6), (3.0, 0.4)):
        field = _fractal(random, 1.6, stretch, lowest=6)
        bent = _at(field, rows + bend * _fractal(random, 3.0), columns + bend * _fractal(random, 3.0))
        ice += weight * np.exp(-3.0 * np.abs(bent))
    patches = 1 / (1 + np.exp(-2.0 * _fractal(random, 2.6) - 0.4))
    grain = 0.06 * _fractal(random, 0.6)
    thickness = np.clip(0.08 + patches * (0.22 + 1.0 * ice) + grain, 0, 1)[None]
    dark, light = (np.asarray(colour)[:, None, None] for colour in (_DARK, _LIGHT))
    return np.asarray(dark + (light - dark) * thickness, dtype=np.float32)


def _fractal(random: np.random.Generator, power: float, stretch: float = 1.0, lowest: int = 1) -> NDArray[np.float64]:
    """Return periodic Gaussian noise of unit variance with amplitude spectrum f^-power, stretched `stretch` times.

    No wave is longer than the side divided by `lowest`.
    """
    rows, columns = np.fft.fftfreq(_SIDE)[:, None] * stretch, np.fft.rfftfreq(_SIDE)[None]
    frequency = np.hypot(rows, columns)
    frequency[frequency < (lowest - 0.5) / _SIDE] = np.inf
    spectrum = np.fft.rfft2(random.standard_normal((_SIDE, _SIDE))) * frequency**-power
    field: NDArray[np.float64] = np.fft.irfft2(spectrum, (_SIDE, _SIDE))
    field -= field.mean()
    field /= field.std()
    return field


def _at(field: NDArray[np.float64], rows: NDArray[np.float64], columns: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.ndimage import map_coordinates

    found: NDArray[np.float64] = map_coordinates(field, [rows, columns], order=1, mode="grid-wrap")
    return found


def fog(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Return (x + thickness p) m / (m + thickness) with p a plasma fractal in [0, 1] and m the image's maximum."""
    thickness, decay = setting.parameters
    h, w = x_bchw.shape[-2:]
    side = 2 ** math.ceil(math.log2(max(h, w)))
    plasma = plasma_fractal(draws.uniform(side, side), decay)[:, None, :h, :w]
    largest = x_bchw.amax((1, 2, 3), keepdim=True)
    thicker: Tensor = x_bchw + thickness * plasma
    return thicker.mul_(largest / (largest + thickness))


def plasma_fractal(draw_bnn: Tensor, decay: float) -> Tensor:
    """Return heights in [0, 1] by the diamond-square algorithm on a torus, from as many uniform numbers, [B, n, n].

    At every step the middles of squares, then those of their sides, become the mean of their four neighbours plus noise
    in +-wibble^2, and the wibble, 100 at first, is divided by `decay`. A point's noise is the draw at its place.
    """
    n = draw_bnn.shape[-1]
    noise = draw_bnn.double().mul_(2).sub_(1)
    heights = torch.zeros_like(noise)
    step, wibble = n, 100.0
    while step >= 2:
        half = step // 2
        corners, middles = heights[:, ::step, ::step], heights[:, half::step, half::step]
        tops, lefts = heights[:, ::step, half::step], heights[:, half::step, ::step]
        below = corners + corners.roll(-1, 1)
        middles[:] = (below + below.roll(-1, 2)) / 4 + wibble**2 * noise[:, half::step, half::step]
        across = corners + corners.roll(-1, 2)
        tops[:] = (middles + middles.roll(1, 1) + across) / 4 + wibble**2 * noise[:, ::step, half::step]
        along = corners + corners.roll(-1, 1)
        lefts[:] = (middles + middles.roll(1, 2) + along) / 4 + wibble**2 * noise[:, half::step, ::step]
        step, wibble = half, wibble / decay
    heights -= heights.amin((1, 2), keepdim=True)
    return heights.div_(heights.amax((1, 2), keepdim=True)).float()


def spatter(x_bchw: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Draw drops where smooth noise exceeds a threshold: water, lit by the distance to the drops' edges, or mud."""
    mean, deviation, sigma, threshold, strength, liquid = setting.parameters
    noise = draws.normal(1, *x_bchw.shape[2:])
    # Smoothing by a longer sigma leaves less of the noise: with both scaled, the same share is covered.
    layer = gaussian_smooth(noise.mul_(deviation * setting.scale).add_(mean), sigma * setting.scale)
    if liquid == "mud":
        cover = gaussian_smooth((layer > threshold).float(), strength * setting.scale)
        cover = torch.where(cover < 0.8, 0.0, cover)
        return x_bchw * (1 - cover) + _colour(_MUD, x_bchw) * cover
    drops = F.threshold(layer, threshold, 0.0).mul_(255).floor_()
    drops.sub_(torch.ge(drops, 256, out=torch.empty_like(drops)), alpha=256)  # 8 bits wrap, in the published images too
    depth = drops * _relief(drops)
    depth = depth / depth.amax((2, 3), keepdim=True).clamp_(min=1)  # an image without drops stays as it is
    return x_bchw + depth.mul_(strength) * _colour(_WATER, x_bchw)


def _relief(drops_b1hw: Tensor) -> Tensor:
    """Return the light on the drops, 0 to 255: distances from their edges, equalized and lit from one side."""
    distance = distance_to(canny(drops_b1hw, 50, 150), _FARTHEST)
    level = equalize_histogram(box_mean(distance).add_(1e-4).floor_())
    kernel = torch.tensor(_RELIEF, device=level.device)[None, None]
    lit = F.conv2d(F.pad(level, (1,) * 4, mode="reflect"), kernel).clamp_(0, 255)
    return box_mean(lit).round_()


def box_mean(x_b1hw: Tensor) -> Tensor:
    """Return the mean of 3 x 3 pixels; the border reflects (b | a b)."""
    return F.avg_pool2d(F.pad(x_b1hw, (1,) * 4, mode="reflect"), 3, 1)


def equalize_histogram(levels_b1hw: Tensor) -> Tensor:
    """Spread integer levels up to `_FARTHEST` over 0 to 255 so that their histogram is flat; a single level is kept."""
    flat = levels_b1hw.flatten(1).long()
    bins, total = _FARTHEST + 1, flat.shape[1]
    counts = flat.new_zeros(len(flat), bins).scatter_add_(1, flat, torch.ones_like(flat))
    lowest = (counts > 0).int().argmax(1, keepdim=True)
    first = counts.gather(1, lowest)
    spread = ((counts.cumsum(1) - first) * (255.0 / (total - first).clamp(min=1))).round_().clamp_(min=0)
    spread = torch.where(first == total, lowest.float(), spread)
    return spread.gather(1, flat).reshape(levels_b1hw.shape)


def _colour(rgb: tuple[float, float, float], like_bchw: Tensor) -> Tensor:
    colour = torch.tensor(rgb, device=like_bchw.device).reshape(1, 3, 1, 1)
    return luma(colour) if like_bchw.shape[1] == 1 else colour


def canny(x_b1hw: Tensor, low: float, high: float) -> Tensor:
    """Return the edges of images of integer levels: thin gradient ridges above `low` that touch one above `high`.

    3 x 3 Sobel derivatives with the border repeated; a gradient's size is |dx| + |dy|.
    """
    padded = F.pad(x_b1hw, (1,) * 4, mode="replicate")
    smooth_y = padded[..., :-2, :] + 2 * padded[..., 1:-1, :] + padded[..., 2:, :]
    dx = smooth_y[..., 2:] - smooth_y[..., :-2]
    smooth_x = padded[..., :-2] + 2 * padded[..., 1:-1] + padded[..., 2:]
    dy = smooth_x[..., 2:, :] - smooth_x[..., :-2, :]
    size = dx.abs() + dy.abs()
    thin = (size > low) & _is_ridge(size, dx, dy)
    strong = thin & (size > high)
    while True:
        grown = thin & (F.max_pool2d(strong.float(), 3, 1, 1) > 0)
        if torch.equal(grown, strong):
            return strong
        strong = grown


def _is_ridge(size: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
    """Return True where the gradient is largest along its own direction, rounded to one of four."""
    h, w = size.shape[-2:]
    padded = F.pad(size, (1,) * 4)

    def at(down: int, right: int) -> Tensor:
        return padded[..., 1 + down : 1 + down + h, 1 + right : 1 + right + w]

    flat = dy.abs() < math.tan(math.pi / 8) * dx.abs()
    steep = dy.abs() > math.tan(3 * math.pi / 8) * dx.abs()
    across = (size > at(0, -1)) & (size >= at(0, 1))
    along = (size > at(-1, 0)) & (size >= at(1, 0))
    falling = (size > at(-1, -1)) & (size > at(1, 1))
    rising = (size > at(-1, 1)) & (size > at(1, -1))
    slanted = torch.where((dx < 0) != (dy < 0), rising, falling)
    return torch.where(flat, across, torch.where(steep, along, slanted))


def distance_to(edges_b1hw: Tensor, farthest: int) -> Tensor:
    """Return the chamfer distance of each pixel to the nearest edge, at most `farthest`.

    The length of a path of straight, diagonal and knight's moves is, for a displacement (dx, dy), the largest of four
    linear forms, and grows with |dx|. So only the nearest edge of each row matters, and rows farther than `farthest` do
    not.
    """
    across = _within_rows(edges_b1hw, farthest)
    h = across.shape[-2]
    nearest = across.clone()
    padded = F.pad(across, (0, 0, farthest, farthest), value=float(farthest))
    for down in range(1, farthest):
        above = padded[..., farthest - down : farthest - down + h, :]
        below = padded[..., farthest + down : farthest + down + h, :]
        nearest = torch.minimum(nearest, chamfer(torch.minimum(above, below), down))
    return nearest.clamp_(max=float(farthest))


def chamfer(across: Tensor, down: float) -> Tensor:
    """Return the length of the shortest path over `across` columns and `down` rows, both non-negative."""
    knight, slant = _KNIGHT - 2, 2 * _DIAGONAL - _KNIGHT
    shorter = _KNIGHT - _DIAGONAL
    mild = torch.maximum(across + knight * down, knight * across + down)
    return torch.maximum(mild, torch.maximum(shorter * across + slant * down, slant * across + shorter * down))


def _within_rows(edges_b1hw: Tensor, farthest: int) -> Tensor:
    """Return the distance of each pixel to the nearest edge in its row, at most `farthest`."""
    w = edges_b1hw.shape[-1]
    place = torch.arange(w, device=edges_b1hw.device)
    left = torch.where(edges_b1hw, place, -farthest).cummax(-1).values
    right = torch.where(edges_b1hw, place, w + farthest).flip(-1).cummin(-1).values.flip(-1)
    return torch.minimum(place - left, right - place).clamp_(max=farthest).float()
