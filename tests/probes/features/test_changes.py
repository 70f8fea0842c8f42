"""What fourier and variance share: numbers of each state and their change across units, against a notebook."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from scipy import stats

from tests.anatomy.networks import NETWORKS, shaken
from tests.probes.features import notebook
from tests.probes.subjects import InMemory, subject, vit
from vitclinic._core.errors import AnatomyError, ModelError
from vitclinic.anatomy import Anatomy, stream
from vitclinic.anatomy.families import recognise
from vitclinic.data import Dataset, Split
from vitclinic.probes import Subject, known_probes, measure, parse_probes
from vitclinic.probes.features.changes import ChangesTally

PROBES = {"fourier": ("delta_log_amplitude", notebook.delta_log_amplitude), "variance": ("variance", notebook.variance)}

GRIDS = {"3 x 3": 5, "4 x 2": (4, 8), "4 x 3": (4, 5), "5 x 8": (3, 2), "1 x 4": (16, 4), "3 x 1": (5, 16)}
"""Patch sizes that cut images of 16 x 16 into grids that are odd, or not square, or both."""

PATIENTS = {
    **{name: (lambda name=name: subject(name)) for name in ("vit", "resnet", "mixer", "torchvision vit")},
    **{f"vit {g}": (lambda size=size: subject(shaken(vit(patch_size=size)))) for g, size in GRIDS.items()},
    "registers, no class token": lambda: subject(shaken(vit(class_token=False, reg_tokens=3, global_pool="avg"))),
    "swin": lambda: subject(
        shaken(
            timm.models.SwinTransformer(
                img_size=16, patch_size=2, window_size=4, embed_dim=8, depths=(1, 1), num_heads=(2, 2), num_classes=5
            )
        )
    ),
}


@pytest.fixture(params=PROBES)
def probe(request):
    return request.param


def measured(probe, patient):
    (measurement,) = measure(patient, parse_probes([probe]))
    assert measurement.status == "ok", measurement.reason
    return measurement


def assert_is_mean_of(scalar, each, tolerance=1e-4):
    """The scalar is the mean over images of `each`, with its t interval."""
    low, high = stats.t.interval(0.95, len(each) - 1, each.mean(), stats.sem(each))
    assert (scalar.value, scalar.low, scalar.high) == pytest.approx((each.mean(), low, high), rel=1e-4, abs=tolerance)
    assert scalar.n == len(each)


@pytest.mark.parametrize("name", PATIENTS)
def test_every_number_is_that_of_a_notebook(probe, name):
    number, direct = PROBES[probe]
    patient = PATIENTS[name]()
    if name == "swin":  # has amplitudes near zero, whose logarithm float32 does not know to 1e-4 on every processor
        patient.network.double()
    found = measured(probe, patient)
    states = notebook.states(patient)
    expected = {unit for unit, ends in states.items() if "output" in ends and ends["output"][0, 0].size > 1}
    assert {row.name for row in found.units} == expected
    kept = {}
    for row in found.units:
        before, after = (states[row.name][end] for end in ("input", "output"))
        assert_is_mean_of(row.values[number], direct(after))
        assert ("change" in row.values) == (row.kind != "stem")
        if row.kind != "stem":
            change = direct(after) - direct(before)
            assert_is_mean_of(row.values["change"], change)
            if before.shape[2:] == after.shape[2:]:
                kept.setdefault(row.kind, []).append(change)
    assert found.scalars[f"{number}_last"] == found.units[-1].values[number]
    compared = {kind for kind in kept if kind in ("msa", "mlp", "token_mlp", "conv")}
    assert found.scalars.keys() == {f"{number}_last", *(f"{number}_change_{kind}" for kind in compared)}
    for kind in compared:
        assert_is_mean_of(found.scalars[f"{number}_change_{kind}"], np.mean(kept[kind], axis=0))


class Large(InMemory):
    """Noise as images of 224 x 224."""

    def __init__(self, count):
        super().__init__(count)
        self.pixels = np.random.default_rng(0).integers(0, 256, (count, 224, 224, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18"])
def test_timm_s_vit_tiny_and_resnet_18_as_the_paper_s_notebook_takes_them_apart(name):
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=5).eval()
    split = Split(Large(3), np.arange(3), np.arange(3))
    dataset = Dataset("noise", tuple("abcde"), (224, 224), 3, {"test": split}, "large noise")
    patient = Subject(network, dataset, batch_size=2)
    found = {m.probe: m for m in measure(patient, parse_probes(["fourier", "variance"]))}
    images = torch.cat([batch.images for batch in patient.batches()]).double()
    collect = notebook.vit_states if name.startswith("vit") else notebook.resnet_states
    states = collect(network.double(), images)
    for probe, (number, direct) in PROBES.items():
        assert [row.name for row in found[probe].units] == list(states)
        means = [direct(maps).mean() for maps in states.values()]
        assert [row.values[number].value for row in found[probe].units] == pytest.approx(means, rel=1e-4, abs=1e-4)
        changes = [row.values["change"].value for row in found[probe].units[1:]]
        assert changes == pytest.approx([after - before for before, after in itertools.pairwise(means)], abs=2e-4)


@pytest.mark.parametrize("batch_size", [1, 5, 22])
def test_results_do_not_depend_on_the_batch_size(probe, batch_size):
    expected, found = (measured(probe, subject("resnet", batch_size=size)) for size in (8, batch_size))
    pairs = [(expected.scalars, found.scalars)]
    pairs += [(ours.values, theirs.values) for ours, theirs in zip(expected.units, found.units, strict=True)]
    for ours, theirs in pairs:
        for name, scalar in ours.items():
            assert theirs[name].value == pytest.approx(scalar.value, rel=1e-5, abs=1e-5)
            assert theirs[name].high == pytest.approx(scalar.high, rel=1e-5, abs=1e-5)


def test_one_image_has_numbers_and_no_interval(probe):
    found = measured(probe, subject(limit=1))
    assert all((scalar.n, scalar.low, scalar.high) == (1, None, None) for scalar in found.scalars.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(probe, dtype):
    expected = measured(probe, subject("vit"))
    patient = subject("vit")
    patient.network.to(dtype)
    tolerance = 0.1 if dtype is torch.bfloat16 else 1e-4
    for ours, theirs in zip(expected.units, measured(probe, patient).units, strict=True):
        for name, scalar in ours.values.items():
            assert theirs.values[name].value == pytest.approx(scalar.value, rel=tolerance, abs=tolerance)


def test_a_grid_of_one_position_does_not_apply(probe):
    (measurement,) = measure(subject(vit(patch_size=16)), parse_probes([probe]))
    assert measurement.status == "does_not_apply"
    assert "single position" in measurement.reason


class Sums(ChangesTally):
    """The sum of a state, and how often one was computed."""

    number = "sum"
    computed = 0

    def numbers(self, maps):
        self.computed += 1
        return maps.flatten(1).sum(1, keepdim=True)


def test_a_state_that_the_next_unit_takes_is_computed_once():
    network = shaken(vit()).eval()
    anatomy = Anatomy.of(network)
    tally = Sums(anatomy)
    with torch.no_grad(), stream(dict(tally.taps()), tally.update):
        network(torch.rand(2, 3, 16, 16))
    assert tally.computed == len(anatomy.units) - 1  # all but the head


def test_a_state_that_was_overwritten_in_between_is_computed_again():
    anatomy = Anatomy.of(shaken(vit()))
    first, second = anatomy.unit("blocks.0.mlp").output, anatomy.unit("blocks.1.msa").input
    tokens = torch.rand(2, 17, 24)
    for written, computed in ((False, 1), (True, 2)):
        tally = Sums(anatomy)
        tally.update(first, tokens)
        if written:
            tokens.mul_(2)
        tally.update(second, tokens)
        assert tally.computed == computed


def test_a_state_that_is_not_finite_is_named():
    anatomy = Anatomy.of(shaken(vit()))
    tally = Sums(anatomy)
    for unit in tally.units:
        prefix = 0 if unit.kind == "stem" else 1
        tokens = torch.ones(2, 16 + prefix, 24)
        tokens[1, -1, 0] = torch.inf if unit.name == "blocks.1.mlp" else 1.0
        tally.update(unit.output, tokens)
    with pytest.raises(ModelError, match=r"blocks\.1\.mlp is not finite"):
        tally.end_batch(None, None)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_every_family_have_finite_numbers(name):
    network = shaken(NETWORKS[name]()).eval()
    core, family = recognise(network)
    try:
        anatomy = Anatomy.of(network)
    except AnatomyError:
        pytest.skip("refused by the anatomy, with a clear error")
    images = torch.rand(2, *family.input_size(core))
    for probe in PROBES:
        tally = known_probes()[probe]().begin(SimpleNamespace(anatomy=anatomy))
        with torch.no_grad(), stream(dict(tally.taps()), tally.update):
            network(images)
        tally.end_batch(None, None)
        result = tally.finish()
        assert len(result.units) >= 2
        values = [scalar for row in result.units for scalar in row.values.values()]
        assert np.isfinite([scalar.value for scalar in (*values, *result.scalars.values())]).all()
