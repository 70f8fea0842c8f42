"""CKA of networks against a direct computation in float64 that stores everything, and beside torch-cka."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
import timm
import torch
from torch import nn

from tests.anatomy.networks import shaken
from tests.probes.features.test_hsic import direct_cka
from tests.probes.subjects import NETWORKS, SIZE, noise, subject
from tests.probes.test_contract import photograph, unusual
from vitclinic._core.errors import DataError
from vitclinic.anatomy import Anatomy, taps
from vitclinic.probes import CKA, DoesNotApply, Subject, block_structure, cka_between, measure
from vitclinic.probes.features.cka import flatten_state


def cka(patient, **options):
    (measurement,) = measure(patient, [CKA(**options)])
    assert measurement.status == "ok", measurement.reason
    return measurement


def stored_features(network, images):
    """[images, features] of each unit in float64: positions and channels, without prefix tokens."""
    network = network.double().eval()
    anatomy = Anatomy.of(network, images.double())
    with torch.no_grad(), taps({unit.name: unit.output for unit in anatomy.units}) as seen:
        network(images.double())

    def flat(unit):
        spatial = unit.output.layout.spatial
        return (anatomy.grid(unit.output, seen[unit.name]) if spatial else seen[unit.name]).flatten(1).numpy()

    return [flat(unit) for unit in anatomy.units]


def images_of(patient):
    return torch.cat([batch.images for batch in patient.batches()])


def cut(layers, *borders):
    """Mini-batches between the borders, each of all layers."""
    return [[layer[start:stop] for layer in layers] for start, stop in pairwise(borders)]


@pytest.mark.parametrize("name", ["vit", "resnet", "mixer", "torchvision vit"])
def test_against_a_direct_computation(name):
    patient = subject(name)
    found = cka(patient, batch=8)
    expected = direct_cka(cut(stored_features(patient.network, images_of(patient)), 0, 8, 16, 22))
    np.testing.assert_allclose(found.arrays["cka"], expected, atol=1e-5)
    assert [row.name for row in found.units] == [unit.name for unit in patient.anatomy.units]
    for at, row in enumerate(found.units):
        others = np.delete(expected[at], at)
        assert row.values["cka_mean"].value == pytest.approx(others.mean(), abs=1e-5)
        if at:
            assert row.values["cka_previous"].value == pytest.approx(expected[at, at - 1], abs=1e-5)
    assert "cka_previous" not in found.units[0].values
    above = expected[np.triu_indices(len(expected), 1)]
    mean = found.scalars["cka_mean"]
    assert mean.value == pytest.approx(above.mean(), abs=1e-5)
    assert mean.low < mean.value < mean.high
    assert (mean.n, found.scalars["images"].value) == (22, 22)


def test_batches_that_mini_batches_divide_give_the_same_and_others_are_a_condition():
    expected = cka(subject(batch_size=8), batch=4).arrays["cka"]
    for size in (4, 16, 64, 25):  # the last one holds all images
        found = cka(subject(batch_size=size), batch=4)
        np.testing.assert_allclose(found.arrays["cka"], expected, atol=1e-6)
        assert found.conditions == {}
    ragged = cka(subject(batch_size=10), batch=4)
    assert ragged.conditions == {"batch_size": 10}
    assert ragged.scalars["images"].value == 16  # 4 + 4 of each batch of ten, two left over; 2 at the end


def test_a_remainder_below_four_is_dropped_and_mini_batches_are_at_most_the_exams_batch():
    patient = subject(batch_size=5)
    found = cka(patient)
    assert found.conditions == {"batch_size": 5}
    assert found.scalars["images"].value == 20
    expected = direct_cka(cut(stored_features(patient.network, images_of(patient)), 0, 5, 10, 15, 20))
    np.testing.assert_allclose(found.arrays["cka"], expected, atol=1e-5)


@pytest.mark.parametrize("options", [{"limit": 3}, {"batch_size": 2}])
def test_fewer_than_four_images_at_once_do_not_do(options):
    (measurement,) = measure(subject(**options), [CKA()])
    assert measurement.status == "does_not_apply"
    assert "at least 4 images" in measurement.reason


def test_one_mini_batch_has_no_interval():
    found = cka(subject(batch_size=64))
    assert {scalar.low for row in found.units for scalar in row.values.values()} == {None}


def test_a_head_of_zeros_is_like_nothing_and_everything_stays_finite():
    patient = subject("vit")
    nn.init.zeros_(patient.network.backbone.head.weight)
    found = cka(patient).arrays["cka"]
    assert not found[-1].any()
    np.testing.assert_allclose(found.diagonal()[:-1], 1)


def test_a_network_that_fails_on_one_image_says_which_unit():
    patient = subject("vit")

    def spoil(module, inputs, output):
        output[5:6] = torch.inf  # not the first image, on which the network is examined

    patient.network.backbone.blocks[1].mlp.register_forward_hook(spoil)
    (measurement,) = measure(patient, [CKA()])
    assert measurement.status == "failed"
    assert "after blocks.1.mlp is not finite" in measurement.reason


def test_coarse_and_fine_numbers_agree():
    expected = cka(subject("vit")).arrays["cka"]
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.bfloat16, 5e-2)):
        patient = subject("vit")
        patient.network.to(dtype)
        np.testing.assert_allclose(cka(patient).arrays["cka"], expected, atol=tolerance)


@pytest.mark.parametrize("name", ["vit", "resnet", "swin"])
def test_activations_are_read_where_they_lie(name):
    swin = {"img_size": 32, "patch_size": 2, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4}
    network = timm.models.SwinTransformer(**swin) if name == "swin" else NETWORKS[name]()
    images = torch.rand(4, 3, 32, 32) if name == "swin" else torch.rand(4, 3, SIZE, SIZE)
    anatomy = Anatomy.of(network, images)
    units = [unit for unit in anatomy.units if unit.kind in ("msa", "mlp", "conv")]
    with torch.no_grad(), taps({unit: unit.output for unit in units}) as seen:
        network(images)
    for unit in units:
        features = flatten_state(anatomy, unit.output, seen[unit])
        assert features.untyped_storage().data_ptr() == seen[unit].untyped_storage().data_ptr(), unit.name


def test_a_network_with_itself_is_the_matrix_of_the_probe():
    patient = subject("vit")
    found = cka_between(patient.network, patient.network, [batch.images for batch in patient.batches()])
    np.testing.assert_allclose(found.cka, cka(patient, batch=8).arrays["cka"], atol=1e-6)
    assert found.images == 22


def test_two_networks_in_one_pass():
    networks = [subject(name).network for name in ("vit", "resnet")]
    images = images_of(subject())
    before = [photograph(unusual(network)) for network in networks]
    found = cka_between(*networks, [images[:6], images[6:8], images[8:22]])
    assert before == [photograph(network) for network in networks]
    assert found.images == 20  # a batch of two is left out
    layers = [stored_features(network, images) for network in networks]
    batches = [*cut(layers[0] + layers[1], 0, 6), *cut(layers[0] + layers[1], 8, 22)]
    rows = len(layers[0])
    np.testing.assert_allclose(found.cka, direct_cka(batches)[:rows, rows:], atol=1e-5)
    assert [len(found.first), len(found.second)] == [rows, len(layers[1])]
    assert found.second[0].name == "stem"


def test_two_networks_without_images_enough():
    network = subject("vit").network
    with pytest.raises(DataError, match="at least 4 images"):
        cka_between(network, network, [torch.rand(3, 3, SIZE, SIZE)])


def test_block_structure():
    stages = [0, 0, 0, 1, 1, 1, 1]
    same = np.equal.outer(stages, stages)
    assert block_structure(np.where(same, 0.9, 0.3), stages) == pytest.approx(0.6)
    apart = np.abs(np.subtract.outer(np.arange(7), np.arange(7)))
    assert block_structure(0.8**apart, stages) == pytest.approx(0)
    assert block_structure(0.8**apart, [0] * 7) == 0


def test_a_network_of_several_stages_has_a_number_for_its_blocks():
    patient = subject("resnet")
    found = cka(patient)
    grid = [unit for unit in patient.anatomy.units if unit.output.layout.spatial]
    assert [unit.kind for unit in patient.anatomy.units if unit not in grid] == ["head"]
    matrix = found.arrays["cka"][: len(grid), : len(grid)]
    expected = block_structure(matrix, [unit.stage for unit in grid])
    assert found.scalars["block_structure"].value == pytest.approx(expected)
    assert "block_structure" not in cka(subject("vit")).scalars


def test_a_network_of_one_stage_can_be_cut_and_others_keep_their_stages():
    patient = subject("vit")
    found = cka(patient, parts=3)
    count = sum(unit.output.layout.spatial for unit in patient.anatomy.units)
    stages = [number * 3 // count for number in range(count)]
    expected = block_structure(found.arrays["cka"][:count, :count], stages)
    assert found.scalars["block_structure"].value == pytest.approx(expected)
    several = subject("resnet")
    assert cka(several, parts=3).scalars["block_structure"] == cka(several).scalars["block_structure"]


class Exposed(nn.Module):
    """A network whose features torch-cka, which reads modules' outputs, can see: one identity for each unit."""

    def __init__(self, network, images):
        super().__init__()
        self.network = network.eval()
        self.anatomy = Anatomy.of(network, images)
        self.states = nn.ModuleList(nn.Identity() for _ in self.anatomy.units)

    def forward(self, images):
        with taps({unit: unit.output for unit in self.anatomy.units}) as seen:
            logits = self.network(images)
        for unit, state in zip(self.anatomy.units, self.states, strict=True):
            spatial = unit.output.layout.spatial
            state(self.anatomy.grid(unit.output, seen[unit]) if spatial else seen[unit])
        return logits


@pytest.fixture
def float64_by_default():
    """torch-cka makes its ones and its sums in the default type, and float32 loses digits beside a large mean."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["vit", "resnet"])
@pytest.mark.usefixtures("float64_by_default")
def test_against_torch_cka(name):
    peer = pytest.importorskip("torch_cka")
    patient = Subject(shaken(NETWORKS[name]()), noise(24), batch_size=8)
    found = cka(patient, batch=8).arrays["cka"]
    images = images_of(patient)
    layers = [f"states.{at}" for at in range(len(found))]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        network = Exposed(patient.network, images)
        theirs = peer.CKA(network, network, model1_layers=layers, model2_layers=layers)
        theirs.compare(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), batch_size=8))
    np.testing.assert_allclose(found, theirs.export()["CKA"].numpy(), atol=1e-9)


def test_shares_too_small_for_a_mini_batch_do_not_apply():
    patient = subject("vit", count=8)
    tally = CKA().begin(patient)
    with pytest.raises(DoesNotApply, match="mini-batches of at least 4 images"):
        tally.finish()


def test_a_loader_with_labels_is_told_apart_from_batches_of_images():
    network = subject("vit").network
    with pytest.raises(DataError, match="images for images, _ in loader"):
        cka_between(network, network, [(torch.rand(4, 3, 16, 16), torch.zeros(4))])
