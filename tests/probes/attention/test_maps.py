"""Attention maps on images: the class token's row, windows put back onto the grid, pictures."""

import numpy as np
import pytest
import torch

from tests.probes.attention.networks import built
from tests.probes.attention.oracle import stored_maps, whole_grid
from tests.probes.subjects import noise, subject, vit
from vitclinic.probes import measure, parse_probes


def maps(patient, **options):
    (measurement,) = measure(patient, parse_probes([{"attention_maps": options}]))
    assert measurement.status == "ok", measurement.reason
    return measurement


@pytest.mark.parametrize(
    ("name", "prefix"), [("vit", 1), ("vit, two prefix tokens", 2), ("vit, registers", 4), ("torchvision vit", 1)]
)
def test_the_class_token_s_attention_in_the_last_layer(name, prefix):
    patient = subject(built(name), count=5, batch_size=2)
    found = maps(patient, images=5)
    last = list(stored_maps(patient).values())[-1]
    expected = last.weights.double().mean(1)[:, 0, prefix:].reshape(5, 4, 4).numpy()
    np.testing.assert_allclose(found.arrays["grid_maps"], expected, rtol=1e-5)
    assert found.scalars["on_grid"].value == pytest.approx(expected.sum((1, 2)).mean(), rel=1e-5)
    assert [row.name for row in found.units] == [last.unit.name]


@pytest.mark.parametrize("name", ["vit", "vit, no class token", "swin, padded"])
def test_single_heads_add_up_to_their_mean(name):
    patient = subject(built(name), count=3, batch_size=2)
    heads = list(range(list(stored_maps(patient).values())[1].weights.shape[1]))
    found = maps(patient, images=3, layer=1, heads=heads)
    assert len(heads) > 1
    np.testing.assert_allclose(found.arrays["head_maps"].mean(1), found.arrays["maps"], rtol=1e-4, atol=1e-7)
    assert np.ptp(found.arrays["head_maps"], axis=1).max() > 1e-4
    (swapped,) = measure(patient, parse_probes([{"attention_maps": {"images": 3, "layer": 1, "heads": heads[::-1]}}]))
    np.testing.assert_array_equal(swapped.arrays["head_maps"], found.arrays["head_maps"][:, ::-1])
    (refused,) = measure(patient, parse_probes([{"attention_maps": {"heads": [99]}}]))
    assert "asks for head 99, but there are" in refused.reason


@pytest.mark.parametrize(("name", "prefix"), [("vit, no class token", 0), ("vit, registers, no class token", 2)])
def test_without_a_class_token_the_mean_over_queries(name, prefix):
    patient = subject(built(name), count=5, batch_size=2)
    found = maps(patient, images=5, layer=1)
    weights = list(stored_maps(patient).values())[1].weights.double()
    expected = weights[:, :, prefix:, prefix:].mean((1, 2)).reshape(5, 4, 4).numpy()
    np.testing.assert_allclose(found.arrays["grid_maps"], expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["swin", "swin, padded", "torchvision swin", "torchvision swin, padded"])
def test_windows_are_put_back_onto_the_grid(name):
    patient = subject(built(name), count=3, batch_size=2)
    found = maps(patient, images=3, layer=1)  # the shifted windows of the first stage
    seen = list(stored_maps(patient).values())[1]
    full = whole_grid(seen).mean(1)
    regions, places = seen.windows.regions(seen.grid), seen.positions()
    expected = np.zeros((3, *seen.grid))
    for window, cells in enumerate(places.tolist()):
        for k, (row, column) in enumerate(cells):
            queries = [
                r * seen.grid[1] + c
                for q, (r, c) in enumerate(cells)
                if r >= 0 and regions[window, q] == regions[window, k]
            ]
            if row >= 0:
                received = full[:, queries, row * seen.grid[1] + column].sum(1)
                expected[:, row, column] = received / (seen.grid[0] * seen.grid[1])
    np.testing.assert_allclose(found.arrays["grid_maps"], expected, rtol=1e-5, atol=1e-9)


def test_maps_are_resized_to_the_image_and_the_images_are_kept():
    patient = subject(built("vit"), count=5)
    found = maps(patient, images=5)
    grid, resized = found.arrays["grid_maps"], found.arrays["maps"]
    assert resized.shape == (5, 16, 16)
    # Bilinear, with pixel centres: a patch of 4 pixels has its centre between pixels 1 and 2, and the four inner pixels
    # around the meeting of two patches go from one to the other in steps of 1/4.
    np.testing.assert_allclose(resized[:, 0, 0], grid[:, 0, 0], rtol=1e-5)
    between = grid[:, 0, 0] + (grid[:, 0, 1] - grid[:, 0, 0]) * 0.125
    np.testing.assert_allclose(resized[:, 0, 2], between, rtol=1e-4)
    assert np.array_equal(found.arrays["images"], patient.images.read(np.arange(5)))


def test_the_first_images_are_of_different_classes_and_numbers_are_those_of_the_split():
    dataset = noise(22)
    labels = np.sort(dataset.splits["test"].labels)  # as folders are read
    dataset.splits["test"].labels[:] = labels
    patient = subject(built("vit"), dataset=dataset, limit=10)
    found = maps(patient, images=5)
    numbers = found.arrays["numbers"]
    assert sorted(labels[numbers]) == [0, 1, 2, 3, 4]
    assert np.array_equal(found.arrays["images"], dataset.splits["test"].read(numbers))
    again = maps(patient, images=numbers[::-1].tolist())
    np.testing.assert_allclose(again.arrays["maps"], found.arrays["maps"][::-1], rtol=1e-5)
    assert again.arrays["numbers"].tolist() == numbers[::-1].tolist()


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_the_batch_size_changes_nothing(batch_size):
    expected = maps(subject(built("swin"), count=5), images=[4, 0, 2]).arrays["maps"]
    found = maps(subject(built("swin"), count=5, batch_size=batch_size), images=[4, 0, 2]).arrays["maps"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_more_images_than_there_are_means_all():
    assert maps(subject(built("vit"), count=3)).scalars["images"].value == 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"images": [1, 22]}, "asks for image 22, but the test split has 22"), ({"layer": 3}, "the network has 3")],
)
def test_what_is_not_there_is_a_sentence(options, reason):
    (measurement,) = measure(subject("vit"), parse_probes([{"attention_maps": options}]))
    assert measurement.status == "failed"
    assert reason in measurement.reason


@pytest.mark.parametrize("images", [0, [], [-1], "all", [1.5], True])
def test_images_that_cannot_be_meant(images):
    from vitclinic._core.errors import RecipeError

    with pytest.raises(RecipeError, match="takes a number of images"):
        parse_probes([{"attention_maps": {"images": images}}])


def test_networks_of_one_place_have_a_map():
    assert maps(subject(vit(patch_size=16), count=2)).arrays["grid_maps"].shape == (2, 1, 1)


def test_other_precisions():
    torch.manual_seed(0)
    found = [maps(subject(built("vit").to(d), count=3)).arrays["maps"] for d in (torch.float32, torch.bfloat16)]
    np.testing.assert_allclose(*found, rtol=0.1)


@pytest.mark.parametrize("name", ["swin", "torchvision swin"])
def test_uniform_attention_is_flat_also_in_shifted_windows(name):
    patient = subject(built(name), count=2, batch_size=2)
    for unit in patient.anatomy.units:
        if unit.attention is not None:
            for parameter in unit.module.parameters():
                torch.nn.init.zeros_(parameter)
    for layer in (0, 1):
        grid = maps(patient, images=2, layer=layer).arrays["grid_maps"]
        np.testing.assert_allclose(grid, 1 / grid[0].size, rtol=1e-5)
