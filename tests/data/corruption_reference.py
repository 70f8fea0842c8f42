"""The corruptions again, image by image, with numpy, scipy, scikit-image and Pillow: the oracle of the batched ones.

Written from the published parameters and from what the published scripts call (OpenCV and ImageMagick's operations are
done here by their definitions). `x` is uint8 [H, W, 3] of 32 or 224 pixels a side, the result uint8 of the same shape.
`random` gives random arrays (`normal`, `uniform`, `integers`, `poisson`), drawn or replayed.
"""

import io
import math

import numpy as np
from PIL import Image
from scipy import ndimage
from skimage import color, filters, util

from vitclinic.data.corruptions.weather import texture


class Drawn:
    """Fresh random numbers."""

    def __init__(self, seed=0):
        self.generator = np.random.default_rng(seed)

    def normal(self, *shape):
        return self.generator.normal(size=shape)

    def uniform(self, *shape):
        return self.generator.uniform(size=shape)

    def integers(self, low, high, *shape):
        return self.generator.integers(low, high, shape)

    def poisson(self, rates):
        return self.generator.poisson(rates)


def corrupted(name, severity, x, random):
    small = len(x) == 32
    parameters = PARAMETERS[name][0 if small else 1][severity - 1]
    return globals()[name](x, parameters, random)


PARAMETERS = {
    "gaussian_noise": ([0.04, 0.06, 0.08, 0.09, 0.10], [0.08, 0.12, 0.18, 0.26, 0.38]),
    "shot_noise": ([500, 250, 100, 75, 50], [60, 25, 12, 5, 3]),
    "impulse_noise": ([0.01, 0.02, 0.03, 0.05, 0.07], [0.03, 0.06, 0.09, 0.17, 0.27]),
    "speckle_noise": ([0.06, 0.1, 0.12, 0.16, 0.2], [0.15, 0.2, 0.35, 0.45, 0.6]),
    "gaussian_blur": ([0.4, 0.6, 0.7, 0.8, 1], [1, 2, 3, 4, 6]),
    "glass_blur": (
        [(0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)],
        [(0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)],
    ),
    "defocus_blur": (
        [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)],
        [(3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)],
    ),
    "motion_blur": (
        [(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)],
        [(10, 3), (15, 5), (15, 8), (15, 12), (20, 15)],
    ),
    "zoom_blur": (
        [np.arange(1, end, 0.01) for end in (1.06, 1.11, 1.16, 1.21, 1.26)],
        [
            *(np.arange(1, 1.11, 0.01), np.arange(1, 1.16, 0.01), np.arange(1, 1.21, 0.02)),
            *(np.arange(1, 1.26, 0.02), np.arange(1, 1.31, 0.03)),
        ],
    ),
    "fog": (
        [(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)],
        [(1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)],
    ),
    "frost": (
        [(1, 0.2, 0.2), (1, 0.3, 0.2), (0.9, 0.4, 0.2), (0.85, 0.4, 0.2), (0.75, 0.45, 0.2)],
        [(1, 0.4, 1), (0.8, 0.6, 1), (0.7, 0.7, 1), (0.65, 0.7, 1), (0.6, 0.75, 1)],
    ),
    "snow": (
        [
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ],
        [
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ],
    ),
    "spatter": (
        [
            (0.62, 0.1, 0.7, 0.7, 0.5, 0),
            (0.65, 0.1, 0.8, 0.7, 0.5, 0),
            (0.65, 0.3, 1, 0.69, 0.5, 0),
            (0.65, 0.1, 0.7, 0.69, 0.6, 1),
            (0.65, 0.1, 0.5, 0.68, 0.6, 1),
        ],
        [
            (0.65, 0.3, 4, 0.69, 0.6, 0),
            (0.65, 0.3, 3, 0.68, 0.6, 0),
            (0.65, 0.3, 2, 0.68, 0.5, 0),
            (0.65, 0.3, 1, 0.65, 1.5, 1),
            (0.67, 0.4, 1, 0.65, 1.5, 1),
        ],
    ),
    "contrast": ([0.75, 0.5, 0.4, 0.3, 0.15], [0.4, 0.3, 0.2, 0.1, 0.05]),
    "brightness": ([0.05, 0.1, 0.15, 0.2, 0.3], [0.1, 0.2, 0.3, 0.4, 0.5]),
    "saturate": (
        [(0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)],
        [(0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)],
    ),
    "jpeg_compression": ([80, 65, 58, 50, 40], [25, 18, 15, 10, 7]),
    "pixelate": ([0.95, 0.9, 0.85, 0.75, 0.65], [0.6, 0.5, 0.4, 0.3, 0.25]),
    "elastic_transform": (
        [tuple(32 * part for part in parts) for parts in (
            (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)
        )],
        [tuple(244 * part for part in parts) for parts in (
            (2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)
        )],
    ),
}  # fmt: skip


def eight_bits(unit):
    """Truncated, as published; what is whole but for rounding errors (a flat area, blurred) counts as whole."""
    return np.uint8(np.clip(unit, 0, 1) * 255 + 1e-6)


def channels_last(x):
    return np.moveaxis(x, 0, -1)


def gaussian_noise(x, c, random):
    return eight_bits(x / 255.0 + c * channels_last(random.normal(3, *x.shape[:2])))


def shot_noise(x, c, random):
    return eight_bits(channels_last(random.poisson(x.transpose(2, 0, 1) / 255.0 * c)) / c)


def impulse_noise(x, c, random):
    return eight_bits(util.random_noise(x / 255.0, mode="s&p", amount=c, rng=random.generator))


def speckle_noise(x, c, random):
    unit = x / 255.0
    return eight_bits(unit + unit * c * channels_last(random.normal(3, *x.shape[:2])))


def gaussian_blur(x, c, random):
    return eight_bits(filters.gaussian(x / 255.0, sigma=c, channel_axis=-1))


def glass_blur(x, c, random):
    sigma, reach, times = c
    x = eight_bits(filters.gaussian(x / 255.0, sigma=sigma, channel_axis=-1))
    size = len(x)
    for _ in range(times):
        moves = random.integers(-reach, reach, 2, size - 2 * reach, size - 2 * reach)
        for h in range(size - reach, reach, -1):
            for w in range(size - reach, reach, -1):
                down, right = moves[:, h - reach - 1, w - reach - 1]
                # As published: both sides are views, so that the second assignment changes nothing.
                x[h, w], x[h + down, w + right] = x[h + down, w + right], x[h, w]
    return eight_bits(filters.gaussian(x / 255.0, sigma=sigma, channel_axis=-1))


def defocus_blur(x, c, random):
    radius, softness = c
    half, reach = (8, 1) if radius <= 8 else (radius, 2)
    across, down = np.meshgrid(np.arange(-half, half + 1), np.arange(-half, half + 1))
    kernel = (across**2 + down**2 <= radius**2).astype(np.float64)
    kernel /= kernel.sum()
    line = np.exp(-(np.arange(-reach, reach + 1.0) ** 2) / (2 * softness**2))
    for axis in (0, 1):
        kernel = ndimage.correlate1d(kernel, line / line.sum(), axis=axis, mode="mirror")
    return eight_bits(np.stack([ndimage.correlate(x[..., d] / 255.0, kernel, mode="mirror") for d in range(3)], -1))


def magick_motion(x, radius, sigma, angle):
    """ImageMagick's MotionBlurImage on uint8 [H, W, C]: taps at rounded places of a line, the edge repeated."""
    width = 2 * math.ceil(radius) + 1
    kernel = np.exp(-(np.arange(width) ** 2) / (2 * sigma**2))
    kernel /= kernel.sum()
    h, w = x.shape[:2]
    total = np.zeros(x.shape)
    sine, cosine = math.sin(math.radians(angle)), math.cos(math.radians(angle))
    padded = np.pad(x.astype(np.float64), ((width, width), (width, width), (0, 0)), mode="edge")
    for step in range(width):
        right, down = math.ceil(step * cosine - 0.5), math.ceil(step * sine - 0.5)
        top, left = width + down, width + right
        total += kernel[step] * padded[top : top + h, left : left + w]
    return np.uint8(np.floor(total + 0.5))


def motion_blur(x, c, random):
    return magick_motion(x, *c, angle=float(random.uniform(1)[0]) * 90 - 45)


def clipped_zoom(x, factor, size):
    """What the published function does to an image; `x` is its centre already, ceil(size / factor) a side."""
    large = ndimage.zoom(x, (factor, factor, 1), order=1, mode="nearest")
    trim = (len(large) - size) // 2
    return large[trim : trim + size, trim : trim + size]


def zoom_blur(x, c, random):
    unit, size = (x / 255.0).astype(np.float32), len(x)
    total = unit.copy()
    for factor in c:
        side = math.ceil(size / factor)
        top = (size - side) // 2
        total += clipped_zoom(unit[top : top + side, top : top + side], factor, size)
    return eight_bits(total / (len(c) + 1))


def plasma(draw, decay):
    """The diamond-square algorithm, point by point of the definition: a point's noise is the draw at its place."""
    size = len(draw)
    noise, heights = 2 * draw.astype(np.float64) - 1, np.zeros((size, size))
    step, wibble = size, 100.0

    def put(rows, columns, neighbours):
        heights[rows, columns] = sum(neighbours) / 4 + wibble * wibble * noise[rows, columns]

    while step >= 2:
        half = step // 2
        rows, columns = np.meshgrid(np.arange(0, size, step), np.arange(0, size, step), indexing="ij")
        far = [(rows + down) % size for down in (0, step)], [(columns + right) % size for right in (0, step)]
        put(rows + half, columns + half, [heights[r, c] for r in far[0] for c in far[1]])
        middles = [heights[(rows + down) % size, columns + half] for down in (half, -half)]
        put(rows, columns + half, [*middles, heights[rows, columns], heights[rows, far[1][1]]])
        middles = [heights[rows + half, (columns + right) % size] for right in (half, -half)]
        put(rows + half, columns, [*middles, heights[rows, columns], heights[far[0][1], columns]])
        step, wibble = half, wibble / decay
    heights -= heights.min()
    return heights / heights.max()


def fog(x, c, random):
    thickness, decay = c
    unit, size = x / 255.0, len(x)
    side = 32 if size == 32 else 256
    unit_max = unit.max()
    unit += thickness * plasma(random.uniform(side, side), decay)[:size, :size, None]
    return eight_bits(unit * unit_max / (unit_max + thickness))


def frost(x, c, random):
    keep, share, magnification = c
    which, down, right = random.uniform(3)
    whole = texture(int(which * 5), magnification, len(x)).permute(1, 2, 0).numpy()
    top, left = int(down * (whole.shape[0] - len(x))), int(right * (whole.shape[1] - len(x)))
    return eight_bits((keep * x + share * whole[top : top + len(x), left : left + len(x)]) / 255)


def snow(x, c, random):
    mean, deviation, factor, threshold, radius, sigma, keep = c
    unit, size = x / 255.0, len(x)
    side = math.ceil(size / factor)
    layer = clipped_zoom((mean + deviation * random.normal(1, side, side))[0][..., None], factor, size)
    layer[layer < threshold] = 0
    layer = magick_motion(eight_bits(layer), radius, sigma, angle=float(random.uniform(1)[0]) * 90 - 135) / 255.0
    grey = unit @ np.array([0.299, 0.587, 0.114])
    unit = keep * unit + (1 - keep) * np.maximum(unit, grey[..., None] * 1.5 + 0.5)
    return eight_bits(unit + layer + np.rot90(layer, k=2))


def canny(x, low, high):
    """OpenCV's Canny of uint8 [H, W]: 3 x 3 Sobel with the edge repeated, L1 gradient, hysteresis of 8 neighbours."""
    x = x.astype(np.float64)
    dx, dy = (ndimage.sobel(x, axis=axis, mode="nearest") for axis in (1, 0))
    size = np.abs(dx) + np.abs(dy)
    around = np.pad(size, 1)
    ridge = np.zeros(x.shape, bool)
    for r, c in zip(*np.nonzero(size > low), strict=True):
        m, gx, gy = size[r, c], abs(dx[r, c]), abs(dy[r, c])
        window = around[r : r + 3, c : c + 3]
        if gy < gx * math.tan(math.pi / 8):
            ridge[r, c] = m > window[1, 0] and m >= window[1, 2]
        elif gy > gx * math.tan(3 * math.pi / 8):
            ridge[r, c] = m > window[0, 1] and m >= window[2, 1]
        elif (dx[r, c] < 0) != (dy[r, c] < 0):
            ridge[r, c] = m > window[0, 2] and m > window[2, 0]
        else:
            ridge[r, c] = m > window[0, 0] and m > window[2, 2]
    parts, _ = ndimage.label(ridge, structure=np.ones((3, 3)))
    return np.isin(parts, np.unique(parts[ridge & (size > high)])) & ridge


def chamfer_distance(edges, farthest):
    """The length, in steps of 1, 1.4 and 2.1969, to the edge that is nearest by Euclid, at most `farthest`."""
    if not edges.any():
        return np.full(edges.shape, float(farthest))
    nearest = ndimage.distance_transform_edt(~edges, return_distances=False, return_indices=True)
    apart = np.abs(nearest - np.indices(edges.shape))
    more, less = apart.max(0), apart.min(0)
    mild = (more - 2 * less) + 2.1969 * less
    steep = 1.4 * (2 * less - more) + 2.1969 * (more - less)
    return np.minimum(np.where(2 * less <= more, mild, steep), farthest)


def equalised(levels):
    counts = np.bincount(levels.ravel(), minlength=256)
    first = int(np.flatnonzero(counts)[0])
    if counts[first] == levels.size:
        return levels
    table = np.rint((np.cumsum(counts) - counts[first]) * (255 / (levels.size - counts[first])))
    return np.clip(table, 0, 255).astype(np.uint8)[levels]


def spatter(x, c, random):
    mean, deviation, sigma, threshold, strength, is_mud = c
    unit = x / 255.0
    layer = filters.gaussian(mean + deviation * random.normal(1, *x.shape[:2])[0], sigma=sigma)
    layer[layer < threshold] = 0
    if is_mud:
        cover = filters.gaussian((layer > threshold).astype(np.float64), sigma=strength)
        cover[cover < 0.8] = 0
        return eight_bits(unit * (1 - cover[..., None]) + cover[..., None] * np.array([63, 42, 20]) / 255)
    drops = (layer * 255).astype(np.uint8)
    box = np.ones((3, 3)) / 9
    distance = ndimage.correlate(chamfer_distance(canny(drops, 50, 150), 20), box, mode="mirror")
    level = equalised((distance + 1e-9).astype(np.uint8)).astype(np.float64)
    relief = np.array([[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
    lit = np.clip(ndimage.correlate(level, relief, mode="mirror"), 0, 255)
    depth = drops * np.rint(ndimage.correlate(lit, box, mode="mirror"))
    depth = depth / max(depth.max(), 1) * strength
    return eight_bits(unit + depth[..., None] * np.array([175, 238, 238]) / 255)


def contrast(x, c, random):
    unit = x / 255.0
    means = unit.mean((0, 1), keepdims=True)
    return eight_bits((unit - means) * c + means)


def brightness(x, c, random):
    hsv = color.rgb2hsv(x / 255.0)
    hsv[..., 2] = np.clip(hsv[..., 2] + c, 0, 1)
    return eight_bits(color.hsv2rgb(hsv))


def saturate(x, c, random):
    hsv = color.rgb2hsv(x / 255.0)
    hsv[..., 1] = np.clip(hsv[..., 1] * c[0] + c[1], 0, 1)
    return eight_bits(color.hsv2rgb(hsv))


def jpeg_compression(x, c, random):
    file = io.BytesIO()
    Image.fromarray(x).save(file, "JPEG", quality=c)
    return np.asarray(Image.open(file))


def pixelate(x, c, random):
    size = len(x)
    small = Image.fromarray(x).resize((int(size * c), int(size * c)), Image.Resampling.BOX)
    return np.asarray(small.resize((size, size), Image.Resampling.BOX))


def elastic_transform(x, c, random):
    strength, sigma, shift = c
    unit, size = (x / 255.0).astype(np.float32), len(x)
    middle, side = size // 2, size // 3
    points = np.array([[middle + side, middle + side], [middle + side, middle - side], [middle - side, middle - side]])
    moved = points + shift * (2 * random.uniform(3, 2).astype(np.float64) - 1)
    back = np.linalg.solve(np.c_[moved, np.ones(3)], points.astype(np.float64))
    rows, columns = np.indices((size, size))
    from_x, from_y = (np.stack([columns, rows, np.ones_like(rows)], -1) @ back).transpose(2, 0, 1)
    unit = np.stack(
        [ndimage.map_coordinates(unit[..., d], [from_y, from_x], order=1, mode="mirror") for d in range(3)], -1
    )
    if strength:
        by = [
            strength * filters.gaussian(noise, sigma, mode="reflect", truncate=3)
            for noise in 2 * random.uniform(2, size, size).astype(np.float64) - 1
        ]
        places = [rows + by[1], columns + by[0]]
        unit = np.stack([ndimage.map_coordinates(unit[..., d], places, order=1, mode="reflect") for d in range(3)], -1)
    return eight_bits(unit)
