"""Embeddings of any network, and what is measured of them, against scikit-learn and brute force."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from tests.probes.subjects import NETWORKS, noise, subject, vit
from vitclinic import functional
from vitclinic._core.neighbours import rank_leave_one_out
from vitclinic.data import load_batches, open_data
from vitclinic.probes import KNN, AlignmentUniformity, LinearProbe, Retrieval, Subject, measure
from vitclinic.probes.features.embeddings import embed
from vitclinic.probes.features.linear_probe import choose_strength, fit_linear


@pytest.fixture
def clusters():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    labels = torch.arange(90) % 4
    return centres[labels] + 1.5 * torch.randn(90, 12, generator=generator, dtype=torch.float64), labels


@pytest.mark.parametrize("temperature", [None, 0.07])
def test_knn_is_that_of_scikit_learn(clusters, temperature):
    x, y = clusters
    weights = "uniform" if temperature is None else lambda distance: np.exp((1 - distance) / temperature)
    theirs = KNeighborsClassifier(7, metric="cosine", weights=weights).fit(x[:60], y[:60]).predict(x[60:])
    assert functional.knn_predict(x[:60], y[:60], x[60:], 7, temperature).tolist() == theirs.tolist()


def by_hand(x, y):
    """Average precisions and first ranks by loops."""
    x = x / x.norm(dim=1, keepdim=True)
    precisions, firsts = [], []
    for query in range(len(x)):
        others = sorted((i for i in range(len(x)) if i != query), key=lambda i: -float(x[query] @ x[i]))
        hits = [rank for rank, other in enumerate(others, 1) if y[other] == y[query]]
        if hits:
            precisions.append(sum(count / rank for count, rank in enumerate(hits, 1)) / len(hits))
            firsts.append(hits[0])
    return precisions, firsts


def test_average_precision_and_matching_are_those_by_hand(clusters):
    x, y = clusters
    y = y.clone()
    y[0] = 9  # no other image is of this class: it is no query
    precisions, firsts = by_hand(x, y)
    assert len(precisions) == 89
    found = rank_leave_one_out(x, y)
    torch.testing.assert_close(found.average_precision, torch.tensor(precisions).to(found.average_precision))
    assert found.first_rank.tolist() == firsts
    assert functional.mean_average_precision(x, y).item() == pytest.approx(np.mean(precisions))
    curve = [np.mean([first <= rank for first in firsts]) for rank in range(1, 6)]
    assert functional.cumulative_matching(x, y, 5).tolist() == pytest.approx(curve)


def test_alignment_and_uniformity_are_the_means_over_pairs(clusters):
    x, y = clusters
    z = x / x.norm(dim=1, keepdim=True)
    pairs = [(i, j) for i in range(90) for j in range(i)]
    squared = {pair: float((z[pair[0]] - z[pair[1]]).square().sum()) for pair in pairs}
    same = [squared[i, j] for i, j in pairs if y[i] == y[j]]
    assert functional.alignment(x, y).item() == pytest.approx(np.mean(same), rel=1e-10)
    assert functional.alignment(x, y, 1.0).item() == pytest.approx(np.mean(np.sqrt(same)), rel=1e-10)
    expected = math.log(np.mean([math.exp(-2 * each) for each in squared.values()]))
    assert functional.uniformity(x).item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("strength", [0.01, 10.0])
def test_the_linear_classifier_is_that_of_scikit_learn(clusters, strength):
    x, y = clusters
    scaled = StandardScaler().fit_transform(x)
    theirs = LogisticRegression(C=strength, tol=1e-9, max_iter=5000).fit(scaled, y)
    ours = fit_linear(x, y, strength, 4)
    np.testing.assert_allclose(ours.weight.numpy(), theirs.coef_, atol=1e-4)
    assert ours.predict(x).tolist() == theirs.predict(scaled).tolist()


def test_the_strength_is_the_one_that_is_right_most_often(clusters):
    x, y = clusters
    strengths = (1e-4, 1e-2, 1.0, 100.0)
    correct = {c: (fit_linear(x[:60], y[:60], c, 4).predict(x[60:]) == y[60:]).sum().item() for c in strengths}
    chosen = choose_strength((x[:60], y[:60]), (x[60:], y[60:]), strengths, 4)
    assert correct[chosen] == max(correct.values())


def test_the_embedding_is_what_the_classifier_reads_and_headless_networks_have_the_same():
    torch.manual_seed(0)
    network = vit().eval()
    patient = Subject(network, noise())
    x = embed(patient)
    images = torch.cat([batch.images for batch in patient.batches()])
    with torch.no_grad():
        expected = network.forward_head(network.forward_features(images), pre_logits=True)
        torch.testing.assert_close(x, expected)
        network.reset_classifier(0)
        torch.testing.assert_close(embed(Subject(network, noise())), expected)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_has_embeddings_that_its_scores_are_linear_in(name):
    patient = subject(name)
    patient.network.eval()
    x = embed(patient).double()
    with torch.no_grad():
        logits = torch.cat([patient.logits(batch.images) for batch in patient.batches()]).double()
    assert len(x) == len(patient)
    design = torch.cat((x, torch.ones(len(x), 1, dtype=x.dtype)), dim=1)
    residual = logits - design @ torch.linalg.lstsq(design, logits, driver="gelsd").solution
    assert residual.abs().max() < 1e-4


def test_probes_share_one_pass_and_find_classes_in_digits():
    model = torch.nn.Sequential(torch.nn.Flatten())  # pixels as embeddings
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    data = open_data("digits")
    patient = Subject(model, data, limit=60, batch_size=64)
    _ = patient.outputs
    before = len(calls)
    probes = [KNN(images=300), LinearProbe(images=300), Retrieval(), AlignmentUniformity()]
    found = {m.probe: m for m in measure(patient, probes)}
    assert [m.status for m in found.values()] == ["ok"] * 4, [m.reason for m in found.values()]
    assert len(calls) - before <= 1 + 5 + 3 + 1  # exam, train and val images once, and a look at what it returns
    assert found["knn"].scalars["accuracy"].value > 0.8
    assert found["linear_probe"].scalars["accuracy"].value > 0.8
    assert found["retrieval"].scalars["map"].value > 0.4
    assert found["retrieval"].arrays["cmc"].shape == (20,)


def test_without_training_images_or_labels_they_do_not_apply():
    loader = load_batches([(torch.rand(8, 3, 16, 16), torch.arange(8) % 2)])
    (found,) = measure(Subject(vit(), loader), [KNN()])
    assert found.status == "does_not_apply"
    distinct = load_batches([(torch.rand(4, 3, 16, 16), torch.arange(4))])
    (found,) = measure(Subject(vit(), distinct), [Retrieval()])
    assert (found.status, found.reason) == ("does_not_apply", "no two images have the same class.")
