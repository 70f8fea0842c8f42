"""Similarity of tokens against a direct computation in float64, and what must be true of it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.anatomy.networks import NETWORKS, shaken
from tests.probes.subjects import noise, subject
from vitclinic._core.errors import ModelError
from vitclinic.anatomy import Anatomy, stream, taps
from vitclinic.probes import TokenSimilarity, measure, parse_probes
from vitclinic.probes.features import token_similarity
from vitclinic.probes.features.states import spatial_states
from vitclinic.probes.features.token_similarity import directions
from vitclinic.treatments.patch_losses import cosine_loss


def measured(patient, **options):
    (measurement,) = measure(patient, parse_probes([{"token_similarity": options}]))
    assert measurement.status == "ok", measurement.reason
    return measurement


def cosine(h):
    return token_similarity.cosine(directions(h))


def absolute_cosine(h):
    return token_similarity.absolute_cosine(directions(h))


def pair_by_pair(tokens):
    """Mean cosine and mean absolute cosine over ordered pairs of tokens that have a norm; None without a pair."""
    lengths = np.linalg.norm(tokens, axis=1)
    tokens, lengths = tokens[lengths > 0], lengths[lengths > 0]
    found = (tokens @ tokens.T / np.outer(lengths, lengths))[~np.eye(len(tokens), dtype=bool)]
    return (found.mean(), np.abs(found).mean()) if len(tokens) > 1 else None


@pytest.mark.parametrize("name", ["vit", "resnet", "mixer", "torchvision vit"])
def test_every_state_against_its_whole_gram_matrix(name):
    patient = subject(name, count=10)
    found = {row.name: row.values for row in measured(patient).units}
    network = patient.network.double().eval()
    images = torch.cat([batch.images for batch in patient.batches()]).double()
    states = spatial_states(Anatomy.of(network, images))
    with torch.no_grad(), taps({state.unit.name: state.site for state in states}) as seen:
        network(images)
    for state in states:
        tokens = state.tokens(seen[state.unit.name]).numpy()
        each = np.array([pair for pair in map(pair_by_pair, tokens) if pair is not None])
        if len(each) == 0:  # a grid of one position
            assert state.unit.name not in found
            continue
        for at, value in enumerate(["cosine", "absolute_cosine"]):
            scalar = found[state.unit.name][value]
            low, high = stats.t.interval(0.95, len(each) - 1, each[:, at].mean(), stats.sem(each[:, at]))
            assert (scalar.value, scalar.low, scalar.high) == pytest.approx((each[:, at].mean(), low, high), abs=2e-6)
            assert scalar.n == len(each)
    assert {"stem", "position"} <= found.keys() or name in ("resnet", "mixer")


def test_the_scalars_are_the_last_layer_and_the_rise_over_the_blocks():
    found = measured(subject("vit"))
    rows = {row.name: row.values for row in found.units}
    assert found.scalars["absolute_cosine_last"] == rows["blocks.2.mlp"]["absolute_cosine"]
    assert found.scalars["cosine_last"] == rows["blocks.2.mlp"]["cosine"]
    rise = rows["blocks.2.mlp"]["absolute_cosine"].value - rows["blocks.0.msa"]["absolute_cosine"].value
    assert found.scalars["absolute_cosine_rise"].value == pytest.approx(rise, abs=1e-12)


@pytest.mark.parametrize("options", [{}, {"tokens": 5}])
def test_the_batch_size_does_not_matter(options):
    ours = measured(subject("vit", batch_size=8), **options)
    theirs = measured(subject("vit", batch_size=3), **options)
    for a, b in zip(ours.units, theirs.units, strict=True):
        assert a.values["absolute_cosine"].value == pytest.approx(b.values["absolute_cosine"].value, rel=1e-5)
        assert a.values["cosine"].value == pytest.approx(b.values["cosine"].value, rel=1e-4, abs=1e-6)


def test_a_sample_of_tokens_differs_from_image_to_image_and_is_unbiased():
    images = noise(400)
    whole = measured(subject("vit", dataset=images, batch_size=64))
    sampled = measured(subject("vit", dataset=images, batch_size=64), tokens=4)
    again = measured(subject("vit", dataset=images, batch_size=64, seed=1), tokens=4)
    for exact, drawn, other in zip(whole.units, sampled.units, again.units, strict=True):
        exact, drawn, other = (row.values["absolute_cosine"] for row in (exact, drawn, other))
        assert drawn.value != other.value
        assert drawn.value != exact.value
        error = (drawn.high - drawn.low) / 3.92
        assert abs(drawn.value - exact.value) < 4 * error
        assert drawn.high - drawn.low > 1.2 * (exact.high - exact.low)
    assert [row.values["cosine"] for row in whole.units] == [row.values["cosine"] for row in sampled.units]


def test_blocks_of_the_gram_matrix_add_up_to_the_whole(monkeypatch):
    h = torch.randn(3, 29, 7, dtype=torch.float64)
    whole = absolute_cosine(h)
    monkeypatch.setattr(token_similarity, "_BLOCK", 4)
    torch.testing.assert_close(absolute_cosine(h), whole, rtol=1e-12, atol=0)


def test_closed_forms():
    same = torch.randn(2, 1, 6).expand(-1, 9, -1) * torch.rand(2, 9, 1).add(0.1)
    assert cosine(same).tolist() == pytest.approx([1, 1], abs=1e-6)
    assert absolute_cosine(same).tolist() == pytest.approx([1, 1], abs=1e-6)
    orthogonal = 5 * torch.linalg.qr(torch.randn(2, 8, 8)).Q
    assert cosine(orthogonal).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert absolute_cosine(orthogonal).tolist() == pytest.approx([0, 0], abs=1e-6)
    opposite = torch.tensor([[[3.0, 0.0], [-1.0, 0.0]]])
    assert (cosine(opposite).item(), absolute_cosine(opposite).item()) == pytest.approx((-1, 1))


def test_tokens_without_a_norm_do_not_count():
    h = torch.randn(2, 6, 5)
    padded = torch.cat((h, torch.zeros(2, 3, 5)), dim=1)
    for measure_of in (cosine, absolute_cosine):
        torch.testing.assert_close(measure_of(padded), measure_of(h))
        assert measure_of(torch.zeros(1, 4, 5)).isnan().all()
        assert measure_of(torch.randn(1, 1, 5)).isnan().all()


def test_what_the_diversity_loss_lowers_is_what_is_measured():
    h = torch.randn(4, 9, 5)
    assert absolute_cosine(h).mean().item() == pytest.approx(cosine_loss(h).item(), rel=1e-6)


@given(st.integers(0, 1000), st.integers(2, 12), st.integers(1, 6))
def test_invariance_and_bounds(seed, tokens, channels):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(2, tokens, channels, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(channels, channels, generator=generator, dtype=torch.float64)).Q
    lengths = torch.rand(2, tokens, 1, generator=generator, dtype=torch.float64) + 0.1
    other = (lengths * h @ rotation).flip(1)
    torch.testing.assert_close(cosine(other), cosine(h))
    torch.testing.assert_close(absolute_cosine(other), absolute_cosine(h))
    assert (cosine(h).abs() <= absolute_cosine(h) + 1e-12).all()
    assert (absolute_cosine(h) <= 1 + 1e-12).all()
    assert (cosine(h) >= -1 / (tokens - 1) - 1e-12).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_of_numbers(dtype):
    h = torch.randn(2, 7, 5).to(dtype)
    expected = absolute_cosine(h.double())
    torch.testing.assert_close(absolute_cosine(h).double(), expected, rtol=1e-5, atol=0)


def test_tokens_that_are_not_finite_are_an_error():
    h = torch.randn(2, 7, 5)
    h[1, 2, 3] = math.nan
    with pytest.raises(ModelError, match="not finite"):
        cosine(h)


def test_one_image():
    scalar = measured(subject("vit", limit=1)).units[0].values["cosine"]
    assert (scalar.n, scalar.low, scalar.high) == (1, None, None)


def test_all_patches_zero_does_not_apply():
    patient = subject("resnet")
    for parameter in patient.network.parameters():
        parameter.data.zero_()
    (measurement,) = measure(patient, parse_probes(["token_similarity"]))
    assert measurement.status == "does_not_apply"
    assert "two nonzero patches" in measurement.reason


@pytest.mark.parametrize(
    ("name", "size"),
    [("timm volo_d1_224", (64, 64)), ("swin, not square, padded", (72, 104)), ("vit, not square, registers", (32, 48))],
)
def test_odd_grids_and_layouts(name, size):
    torch.manual_seed(0)
    network = shaken(NETWORKS[name]()).eval()
    pixels = torch.rand(3, 3, *size)
    states = spatial_states(Anatomy.of(network, pixels))
    with torch.no_grad(), taps({state.unit.name: state.site for state in states}) as seen:
        network(pixels)
    patient = SimpleNamespace(anatomy=Anatomy.of(network, pixels), seed=0)
    tally = TokenSimilarity(tokens=1000).begin(patient)
    with torch.no_grad(), stream(tally.taps(), tally.update):
        network(pixels)
    tally.end_batch()
    for row, state in zip(tally.finish().units, states, strict=True):
        tokens = state.tokens(seen[state.unit.name]).double().numpy()
        expected = np.mean([pair_by_pair(image) for image in tokens], axis=0)
        found = (row.values["cosine"].value, row.values["absolute_cosine"].value)
        assert found == pytest.approx(tuple(expected), abs=1e-5)
