"""The batched corruptions against the per-image reference, and what must hold whatever the batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data import corruption_reference as reference
from vitclinic._core.errors import DataError, RecipeError
from vitclinic.data import Batch, shapes
from vitclinic.data.corruptions import EXTRA, FIFTEEN, NINETEEN, SEVERITIES, Corruption, corrupt, setting
from vitclinic.data.corruptions import corruption as module
from vitclinic.data.corruptions.blur import sources
from vitclinic.data.corruptions.noise import Draws
from vitclinic.data.corruptions.weather import distance_to

DETERMINISTIC = {
    *("defocus_blur", "zoom_blur", "gaussian_blur", "brightness", "contrast", "saturate", "pixelate"),
    "jpeg_compression",
}
RANDOM = [name for name in NINETEEN if name not in DETERMINISTIC]

EXACT = {"shot_noise", "frost", "brightness", "contrast", "pixelate", "jpeg_compression"}
"""Equal in every pixel; the others may be one level off where float32 and float64 truncate to different levels."""
OFF_BY_ONE = {"defocus_blur": 0.15, "glass_blur": 0.05, "gaussian_blur": 0.03}
"""The share of values that may be, if not 1%: kernels of a fraction of a pixel leave values at almost whole levels."""


def pictures(side: int, count: int = 2) -> np.ndarray:
    """Shapes with texture; larger ones with smooth light and fine grain over them."""
    small = [shapes.example(0, "test", index, 0.5)[0] for index in range(count)]
    if side == 32:
        return np.stack(small)
    random = np.random.default_rng(0)
    large = np.stack([np.kron(image, np.ones((side // 32 + 1, side // 32 + 1, 1)))[:side, :side] for image in small])
    light = np.linspace(0.6, 1.0, side)[:, None] * np.linspace(1.0, 0.7, side)
    return np.clip(large * light[..., None] + random.normal(0, 3, large.shape), 0, 255).astype(np.uint8)


def as_batch(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255


def levels(batch: torch.Tensor) -> np.ndarray:
    scaled = batch.double() * 255
    assert torch.allclose(scaled, scaled.round(), atol=1e-4)
    return scaled.round().byte().permute(0, 2, 3, 1).numpy()


class Recorder(Draws):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.drawn = []

    def kept(self, tensor):
        self.drawn.append(tensor.numpy().copy())
        return tensor

    def normal(self, *shape):
        return self.kept(super().normal(*shape))

    def uniform(self, *shape):
        return self.kept(super().uniform(*shape))

    def integers(self, low, high, *shape):
        return self.kept(super().integers(low, high, *shape))

    def poisson(self, rates, which):
        return self.kept(super().poisson(rates, which))


class Replay:
    """The numbers that image `row` was given, in their order."""

    def __init__(self, recorders, row):
        self.numbers = [array[row] for recorder in recorders[-1:] for array in recorder.drawn]

    def next(self, *_):
        return self.numbers.pop(0)

    normal = uniform = integers = poisson = next


def shortest_paths(edges, farthest):
    """The chamfer distance to the nearest edge, by Bellman and Ford."""
    distance = np.where(edges, 0.0, np.inf)
    moves = [(0, 1, 1.0), (1, 0, 1.0), (1, 1, 1.4), (1, 2, 2.1969), (2, 1, 2.1969)]
    h, w = edges.shape
    before = None
    while before is None or (before != distance).any():
        before = distance
        padded = np.pad(distance, 2, constant_values=np.inf)
        for down, right, length in moves:
            for y, x in {(down, right), (-down, right), (down, -right), (-down, -right)}:
                distance = np.minimum(distance, padded[2 + y : 2 + y + h, 2 + x : 2 + x + w] + length)
    return np.minimum(distance, farthest)


@pytest.mark.parametrize("name", [name for name in NINETEEN if name != "impulse_noise"])
@pytest.mark.parametrize(("side", "severities"), [(32, SEVERITIES), (224, (1, 5))])
def test_equals_the_reference_given_the_same_random_numbers(name, side, severities, monkeypatch):
    images = pictures(side, 4 if side == 32 else 1)
    recorders = []
    monkeypatch.setattr(module, "Draws", lambda *a: recorders.append(Recorder(*a)) or recorders[-1])
    monkeypatch.setattr(reference, "chamfer_distance", shortest_paths)  # its own is to the edge nearest by Euclid
    for severity in severities:
        found = levels(corrupt(as_batch(images), name, severity))
        for row, image in enumerate(images):
            replay = Replay(recorders, row)
            expected = reference.corrupted(name, severity, image.copy(), replay)
            assert replay.numbers == []
            off = np.abs(found[row].astype(int) - expected)
            assert off.max() <= (0 if name in EXACT else 1), severity
            assert (off > 0).mean() <= OFF_BY_ONE.get(name, 0.01), severity


def statistics(changes: np.ndarray) -> np.ndarray:
    """Of each change [n, H, W, 3] its mean, its standard deviation and its amplitude in four rings of frequencies."""
    h, w = changes.shape[1:3]
    rows, columns = np.fft.fftfreq(h)[:, None], np.fft.fftfreq(w)[None]
    ring = np.minimum((np.hypot(rows, columns) * 8).astype(int), 3)
    amplitude = np.abs(np.fft.fft2(changes, axes=(1, 2))).mean(-1)
    rings = [amplitude[:, ring == number].mean(1) for number in range(4)]
    return np.stack([changes.mean((1, 2, 3)), changes.std((1, 2, 3)), *rings], 1)


@pytest.mark.parametrize("name", RANDOM)
def test_equals_the_reference_in_distribution(name):
    severity, count = 3, 200
    image = pictures(32, 1)[0]
    copies = np.repeat(image[None], count, 0)
    found = levels(corrupt(as_batch(copies), name, severity)).astype(float)
    random = reference.Drawn(1)
    expected = np.stack([reference.corrupted(name, severity, image.copy(), random) for _ in range(count)])
    ours, theirs = statistics(found - image), statistics(expected.astype(float) - image)
    error = np.sqrt((ours.var(0) + theirs.var(0)) / count)
    assert (np.abs(ours.mean(0) - theirs.mean(0)) <= 4 * error + 1e-9).all()
    spread = np.abs(np.log((ours.std(0) + 1e-9) / (theirs.std(0) + 1e-9)))
    assert (spread < 0.4).all()


def test_impulses_are_salt_and_pepper_in_every_channel_by_itself():
    grey = torch.full((1, 3, 224, 224), 100 / 255)
    found = levels(corrupt(grey, "impulse_noise", 5))
    assert (found == 255).mean() == pytest.approx(0.27 / 2, abs=0.005)
    assert (found == 0).mean() == pytest.approx(0.27 / 2, abs=0.005)
    assert ((found == 100) | (found == 0) | (found == 255)).all()
    changed = found[0] != 100
    assert (changed[..., 0] & changed[..., 1]).mean() == pytest.approx(0.27**2, abs=0.005)


def test_draws_have_their_distributions_and_images_their_own():
    draws = Draws("test", 0, range(40))
    normal, uniform = draws.normal(5000).double(), draws.uniform(5000).double()
    assert normal.mean().item() == pytest.approx(0, abs=0.01)
    assert normal.pow(2).mean().item() == pytest.approx(1, abs=0.02)
    assert normal.pow(4).mean().item() == pytest.approx(3, abs=0.1)
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.005)
    assert (uniform >= 0).all()
    assert (uniform < 1).all()
    integers = draws.integers(-2, 2, 5000)
    assert torch.bincount(integers.flatten() + 2).div(integers.numel()).tolist() == pytest.approx([0.25] * 4, abs=0.005)
    poisson = draws.poisson((0.5, 7.0), torch.ones(40, 5000, dtype=torch.int32))
    assert poisson.mean().item() == pytest.approx(7, abs=0.03)
    assert poisson.var().item() == pytest.approx(7, abs=0.1)
    correlations = torch.corrcoef(torch.cat([normal, draws.normal(5000).double()])).fill_diagonal_(0)
    assert correlations.abs().max() < 0.08  # 5.6 standard errors: neither two images nor two draws share numbers


@pytest.mark.parametrize("name", NINETEEN)
def test_an_image_gets_the_same_corruption_in_any_batch(name):
    images = as_batch(pictures(32, 6))
    corruption = Corruption(name, 3)
    whole = corruption(images, range(10, 16))
    order = torch.tensor([4, 0, 5, 2])
    assert torch.equal(corruption(images[order], order + 10), whole[order])
    assert torch.equal(torch.cat([corruption(images[i : i + 1], [10 + i]) for i in range(6)]), whole)


@pytest.mark.parametrize("name", RANDOM)
def test_index_seed_and_severity_each_draw_anew(name):
    image = as_batch(pictures(32, 1)).expand(2, -1, -1, -1)
    first, second = corrupt(image, name, 3)
    assert not torch.equal(first, second)
    assert not torch.equal(first, corrupt(image, name, 3, seed=1)[0])
    assert torch.equal(first, corrupt(image, name, 3)[0])
    assert not torch.equal(Draws(f"{name} 1", 0, [0]).uniform(4), Draws(f"{name} 2", 0, [0]).uniform(4))


@pytest.mark.parametrize("name", NINETEEN)
def test_threads_change_nothing(name):
    images, threads = as_batch(pictures(32, 5)), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = corrupt(images, name, 5)
        torch.set_num_threads(3)
        together = corrupt(images, name, 5)
    finally:
        torch.set_num_threads(threads)
    assert (alone - together).abs().max() <= 1.01 / 255
    assert (alone != together).float().mean() < 1e-3


@pytest.mark.parametrize("name", NINETEEN)
@pytest.mark.parametrize("size", [(32, 47), (61, 45), (84, 84), (85, 90)])
@pytest.mark.parametrize("channels", [1, 3])
def test_any_size_from_32_and_grey_images(name, size, channels):
    images = torch.rand(2, channels, *size, generator=torch.Generator().manual_seed(0))
    for severity in (1, 5):
        found = corrupt(images, name, severity)
        assert found.shape == images.shape
        assert levels(found).max() > 0
        assert not torch.equal(found[0], images[0])


@pytest.mark.parametrize("name", ["gaussian_noise", "frost", "glass_blur", "spatter"])
def test_black_and_white_images_give_finite_ones(name):
    for value in (0.0, 1.0):
        assert corrupt(torch.full((1, 3, 32, 32), value), name, 1).isfinite().all()


@pytest.mark.parametrize("name", NINETEEN)
def test_flat_colours_stay_finite(name):
    flat = torch.stack([torch.zeros(3, 32, 32), torch.ones(3, 32, 32)])
    for severity in SEVERITIES:
        assert corrupt(flat, name, severity).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_hold_the_same_levels(dtype):
    images = as_batch(pictures(32))
    found = corrupt(images.to(dtype), "snow", 3)
    assert found.dtype == dtype
    assert torch.equal(found, corrupt(images, "snow", 3).to(dtype))


@pytest.mark.parametrize("side", [33, 50, 64, 84, 85, 96, 100, 127, 160, 231, 300])
def test_pixels_are_those_of_pillow_at_any_size(side):
    images = np.random.default_rng(side).integers(0, 256, (1, side, side, 3), dtype=np.uint8)
    for severity in SEVERITIES:
        share = setting("pixelate", severity, (side, side)).parameters
        expected = reference.pixelate(images[0], share, None)
        assert (levels(corrupt(as_batch(images), "pixelate", severity))[0] == expected).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_both_libraries_give_the_same_jpeg(channels):
    if module.encode_jpeg is None:
        pytest.skip("this torchvision has no JPEG")
    picture = np.ascontiguousarray(pictures(224, 1)[0][:199, :, :channels])
    for quality in (80, 40, 7):
        assert (module.by_pillow(picture, quality) == module.by_torchvision(picture, quality)).all()


def test_parameters_scale_from_the_published_sizes():
    assert setting("gaussian_blur", 5, (32, 40)).parameter_set == "cifar10-c"
    assert setting("gaussian_blur", 5, (64, 64)).scale == 2
    assert setting("gaussian_blur", 5, (84, 300)).parameter_set == "cifar10-c"
    assert setting("gaussian_blur", 5, (85, 85)).parameter_set == "imagenet-c"
    assert setting("gaussian_blur", 5, (448, 448)).scale == 2
    assert set(FIFTEEN) | set(EXTRA) == set(NINETEEN)
    assert (len(FIFTEEN), len(NINETEEN)) == (15, 19)


def test_a_blur_covers_the_same_share_of_a_larger_image():
    """A bright line in an image of twice the size gets twice as wide."""
    widths = {}
    for side in (224, 448):
        line = torch.zeros(1, 3, side, side)
        line[..., side // 2 - side // 112 : side // 2 + side // 112] = 1
        row = corrupt(line, "gaussian_blur", 4)[0, 0, side // 2].double()
        place = torch.arange(side).double()
        mean = (row * place).sum() / row.sum()
        widths[side] = ((row * (place - mean) ** 2).sum() / row.sum()).sqrt().item()
    assert widths[448] / widths[224] == pytest.approx(2, rel=0.05)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(12, 20), st.integers(12, 20), st.integers(0, 10**6))
def test_chains_of_copies_are_followed_as_the_loop_goes(reach, h, w, seed):
    moves = torch.randint(-reach, reach, (2, 2, h - 2 * reach, w - 2 * reach), generator=torch.manual_seed(seed))
    found = sources(moves, reach, h, w)
    for row in range(2):
        places = np.arange(h * w).reshape(h, w)
        for y in range(h - reach, reach, -1):
            for x in range(w - reach, reach, -1):
                down, right = moves[row, :, y - reach - 1, x - reach - 1]
                places[y, x] = places[y + down, x + right]
        assert (found[row].reshape(h, w).numpy() == places).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12))
def test_distances_are_those_of_shortest_paths(seed, count):
    random = np.random.default_rng(seed)
    edges = np.zeros((24, 31), bool)
    edges[random.integers(0, 24, count), random.integers(0, 31, count)] = True
    found = distance_to(torch.from_numpy(edges)[None, None], 20)[0, 0].numpy()
    np.testing.assert_allclose(found, shortest_paths(edges, 20), atol=1e-4)


def test_a_batch_is_corrupted_by_its_indices():
    images = as_batch(pictures(32, 3))
    batch = Batch(images, torch.tensor([0, 1, 2]), torch.tensor([5, 6, 7]), torch.tensor([5, 6, 7]))
    found = Corruption("fog", 2).batch(batch)
    assert torch.equal(found.images, corrupt(images, "fog", 2, indices=[5, 6, 7]))
    assert found.targets is batch.targets


@pytest.mark.parametrize("images", [torch.rand(1, 3, 32, 32) * 255, torch.rand(1, 3, 32, 32) - 1.6])
def test_images_that_are_not_in_the_unit_interval_are_refused(images):
    with pytest.raises(DataError, match=r"need images in \[0, 1\] \(got values from"):
        corrupt(images, "fog", 1)
    with pytest.raises(DataError, match="from nan to nan"):
        corrupt(images * float("nan"), "shot_noise", 1)
    beside = torch.linspace(-0.1, 1.1, 3 * 32 * 32).reshape(1, 3, 32, 32)  # as interpolation may leave them
    assert torch.equal(corrupt(beside, "fog", 1), corrupt(beside.clamp(0, 1), "fog", 1))


def test_a_severity_is_a_number_however_it_is_written():
    images = torch.rand(1, 3, 32, 32)
    for severity in (3.0, np.int64(3)):
        assert torch.equal(corrupt(images, "fog", severity), corrupt(images, "fog", 3))


def test_mistakes_are_sentences():
    images = torch.rand(2, 3, 32, 32)
    with pytest.raises(RecipeError, match=r"no corruption 'fogg'\. Did you mean 'fog'\?"):
        corrupt(images, "fogg", 1)
    with pytest.raises(RecipeError, match="1, 2, 3, 4 or 5"):
        corrupt(images, "fog", 6)
    with pytest.raises(DataError, match="at least 32 pixels per side; these are 31 x 40"):
        corrupt(torch.rand(1, 3, 31, 40), "fog", 1)
    with pytest.raises(DataError, match=r"\[B, 1 or 3, H, W\]"):
        corrupt(torch.rand(1, 4, 32, 32), "fog", 1)
    with pytest.raises(DataError, match="floating-point"):
        corrupt(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "fog", 1)
    with pytest.raises(DataError, match="2 images and 3 indices"):
        corrupt(images, "fog", 1, indices=[0, 1, 2])
    assert corrupt(images[:0], "fog", 1).shape == (0, 3, 32, 32)
