"""The map of embeddings: its coordinates against scikit-learn's, its votes by hand, and what it keeps to be shown."""

import sys

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from tests.probes.subjects import subject, vit
from vitclinic._core.errors import MissingExtraError
from vitclinic.probes import EmbeddingMap, measure
from vitclinic.probes.features.embedding_map import map_by_umap, principal_components, vote_of_others
from vitclinic.probes.features.embeddings import embed


@pytest.mark.parametrize("shape", [(60, 12), (7, 40)])
def test_coordinates_are_scikit_learn_s_but_for_signs(shape):
    x = np.random.default_rng(0).normal(size=shape) * np.arange(1, shape[1] + 1)
    theirs = PCA(2, svd_solver="full").fit(x)
    points, shares = principal_components(torch.from_numpy(x))
    signs = np.sign((theirs.transform(x) * points.numpy()).sum(0))
    np.testing.assert_allclose(points.numpy(), theirs.transform(x) * signs, atol=1e-9)
    np.testing.assert_allclose(shares.numpy(), theirs.explained_variance_ratio_, rtol=1e-9)


def test_images_with_one_embedding_are_one_point_and_a_single_number_lies_on_a_line():
    points, shares = principal_components(torch.ones(5, 3))
    assert points.abs().max() == 0
    assert shares.tolist() == [0, 0]
    points, _ = principal_components(torch.tensor([[0.0], [1.0], [5.0]]))
    assert points.tolist() == [[-2, 0], [-1, 0], [3, 0]]


def test_the_vote_of_the_others_is_that_by_hand():
    generator = torch.Generator().manual_seed(0)
    x, labels = torch.randn(40, 5, generator=generator), torch.arange(40) % 3
    found = vote_of_others(x, labels, k=4)
    unit = x / x.norm(dim=1, keepdim=True)
    for image in range(40):
        others = sorted((i for i in range(40) if i != image), key=lambda i: -float(unit[image] @ unit[i]))[:4]
        votes = [0.0, 0.0, 0.0]
        for other in others:
            votes[int(labels[other])] += np.exp(float(unit[image] @ unit[other]) / 0.07)
        assert int(found[image]) == int(np.argmax(votes))


def test_errors_are_those_of_the_network_where_it_has_scores():
    seen = subject("vit")
    (found,) = measure(seen, [EmbeddingMap()])
    assert found.status == "ok", found.reason
    seen.network.eval()
    with torch.no_grad():
        said = torch.cat([seen.logits(batch.images).argmax(1) for batch in seen.batches()])
    assert found.arrays["predicted"].tolist() == said.tolist()
    assert bool(found.arrays["by_scores"])
    assert found.arrays["points"].shape == (len(seen), 2)
    assert len(found.arrays["shown_images"]) == len(seen)
    assert 0 < found.scalars["variance_shown"].value <= 1


def test_an_encoder_without_scores_is_judged_by_its_neighbours():
    encoder = subject(vit(num_classes=0))
    (found,) = measure(encoder, [EmbeddingMap()])
    assert found.status == "ok", found.reason
    assert not bool(found.arrays["by_scores"])
    labels = torch.from_numpy(found.arrays["labels"])
    assert found.arrays["predicted"].tolist() == vote_of_others(embed(encoder), labels).tolist()


def test_a_map_by_umap_needs_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'vitclinic\[umap\]'"):
        map_by_umap(np.zeros((5, 2), np.float32), 2, 0)


@pytest.mark.slow
def test_umap_keeps_groups_apart_and_repeats_itself():
    pytest.importorskip("umap")
    random = np.random.default_rng(0)
    x = np.concatenate([np.eye(6)[i] * 5 + random.normal(size=(25, 6)) * 0.3 for i in (0, 1)]).astype(np.float32)
    first, second = (map_by_umap(x, 10, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    gap = np.linalg.norm(first[:25].mean(0) - first[25:].mean(0))
    assert gap > 3 * max(first[:25].std(0).max(), first[25:].std(0).max())
