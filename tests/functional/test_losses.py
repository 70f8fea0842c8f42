"""Losses of representations beside lightly and pytorch-metric-learning, in float64; neighbours beside brute force."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightly.loss import DINOLoss
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import SupConLoss, TripletMarginLoss
from pytorch_metric_learning.miners import BatchHardMiner
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor

from vitclinic import functional as F
from vitclinic._core.neighbours import knn_votes

few = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 10_000)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(
    seed=seeds, images=st.integers(1, 5), local=st.integers(0, 3), temperature=st.sampled_from([1 / 32, 1 / 16, 0.125])
)
@few
def test_dino_s_loss_and_centre_are_lightly_s(seed: int, images: int, local: int, temperature: float) -> None:
    """lightly rounds the teacher's temperature to float32: these are exact in it."""
    theirs = DINOLoss(output_dim=7, student_temp=0.1, center_momentum=0.9).double()
    centre = torch.zeros(7, dtype=torch.float64)
    for step in range(3):
        teacher = normal(2, images, 7, seed=seed + step)
        student = normal(2 + local, images, 7, seed=seed + 100 + step).requires_grad_()
        expected = theirs(list(teacher), list(student), teacher_temp=temperature)
        (slope,) = torch.autograd.grad(expected, student)
        loss = F.dino_loss(F.dino_targets(teacher, centre, temperature), student, 0.1)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-10, rel=1e-10)
        torch.testing.assert_close(torch.autograd.grad(loss, student)[0], slope, rtol=1e-10, atol=1e-10)
        centre = 0.9 * centre + 0.1 * teacher.mean((0, 1))
        torch.testing.assert_close(centre, theirs.center.flatten(), rtol=1e-10, atol=1e-10)


@given(seed=seeds, temperature=st.floats(0.05, 1))
@few
def test_sinkhorn_uses_all_outputs_equally(seed: int, temperature: float) -> None:
    outputs = normal(24, 6, seed=seed)
    share = F.sinkhorn(outputs, temperature, iterations=2000)
    torch.testing.assert_close(share.sum(1), torch.ones(24, dtype=torch.float64))
    torch.testing.assert_close(share.sum(0), torch.full((6,), 4.0, dtype=torch.float64), rtol=1e-3, atol=1e-3)
    # A scaling of rows and columns keeps cross-ratios: it is the outputs' own, and no other matrix with these sums.
    ratio = (share[0, 0] * share[1, 1] / (share[0, 1] * share[1, 0])).log()
    own = (outputs[0, 0] + outputs[1, 1] - outputs[0, 1] - outputs[1, 0]) / temperature
    assert ratio.item() == pytest.approx(own.item(), rel=1e-6)


@given(seed=seeds, temperature=st.floats(0.05, 1))
@few
def test_the_supervised_contrastive_loss_is_pytorch_metric_learning_s(seed: int, temperature: float) -> None:
    features = normal(12, 5, seed=seed).requires_grad_()
    labels = torch.randint(4, (12,), generator=torch.Generator().manual_seed(seed))
    labels[:2] = 9  # at least one pair
    expected = SupConLoss(temperature)(features, labels)
    loss = F.supervised_contrastive_loss(features, labels, temperature)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-10, rel=1e-10)
    slopes = [torch.autograd.grad(value, features)[0] for value in (loss, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-10)


@given(seed=seeds, margin=st.floats(0, 2))
@few
def test_the_batch_hard_triplet_loss_is_pytorch_metric_learning_s(seed: int, margin: float) -> None:
    features = normal(12, 5, seed=seed).requires_grad_()
    labels = torch.randint(4, (12,), generator=torch.Generator().manual_seed(seed))
    labels[:3] = torch.tensor([9, 9, 8])  # at least one pair; 8 has no positive
    distance = LpDistance(normalize_embeddings=False)
    hardest = BatchHardMiner(distance=distance)(features, labels)
    expected = TripletMarginLoss(margin, distance=distance, reducer=MeanReducer())(features, labels, hardest)
    loss = F.triplet_loss(features, labels, margin)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-10, rel=1e-10)
    slopes = [torch.autograd.grad(value, features)[0] for value in (loss, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-10)
    same = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    F.triplet_loss(same, torch.tensor([0, 0, 1, 1])).backward()
    assert same.grad is not None
    assert same.grad.isfinite().all()


@given(seed=seeds)
@few
def test_the_soft_margin_is_the_softplus_of_the_hardest_triplets(seed: int) -> None:
    features = normal(9, 3, seed=seed)
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])  # the last has no positive
    terms = []
    for anchor in range(8):
        far = max(float((features[anchor] - features[i]).norm()) for i in range(9) if labels[i] == labels[anchor])
        near = min(float((features[anchor] - features[i]).norm()) for i in range(9) if labels[i] != labels[anchor])
        terms.append(math.log1p(math.exp(far - near)))
    assert F.triplet_loss(features, labels, margin=None).item() == pytest.approx(sum(terms) / 8, rel=1e-12)


@given(seed=seeds)
@few
def test_average_precision_and_ranks_by_brute_force(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores = normal(6, 9, seed=seed)
    relevant, valid = (torch.rand(6, 9, generator=draw) < share for share in (0.3, 0.8))
    precisions, ranks = F.average_precision(scores, relevant, valid), F.match_rank(scores, relevant, valid)
    for row in range(6):
        gallery = sorted((i for i in range(9) if valid[row, i]), key=lambda i: -scores[row, i].item())
        places = [place for place, i in enumerate(gallery, 1) if relevant[row, i]]
        if not places:
            assert precisions[row].isnan()
            assert ranks[row].isnan()
            continue
        expected = sum(number / place for number, place in enumerate(places, 1)) / len(places)
        assert precisions[row].item() == pytest.approx(expected)
        assert ranks[row].item() == places[0]


def reciprocal(near: list[list[int]], i: int, k: int) -> set[int]:
    return {j for j in near[i][: k + 1] if i in near[j][: k + 1]}


@given(seed=seeds, k=st.integers(1, 8), expansion=st.integers(1, 5), weight=st.floats(0, 1))
@few
def test_reranking_is_that_of_sets_of_neighbours(seed: int, k: int, expansion: int, weight: float) -> None:
    x = normal(11, 3, seed=seed)
    squares = torch.cdist(x, x).square().fill_diagonal_(0)
    found = F.rerank(squares, k, expansion, weight)
    near = [sorted(range(11), key=lambda j, i=i: squares[i, j].item()) for i in range(11)]
    rows = []
    for i in range(11):
        members = reciprocal(near, i, k)
        joined = set(members)
        for j in members:
            others = reciprocal(near, j, max(1, round(k / 2)))
            if 3 * len(others & members) >= 2 * len(others):
                joined |= others
        scaled = squares[i] / squares[i].max()
        values = {j: math.exp(-scaled[j].item()) for j in joined}
        rows.append({j: value / sum(values.values()) for j, value in values.items()})
    mixed = [[sum(rows[n].get(j, 0) for n in near[i][:expansion]) / expansion for j in range(11)] for i in range(11)]
    for i in range(11):
        for j in range(11):
            pairs = list(zip(mixed[i], mixed[j], strict=True))
            jaccard = 1 - sum(map(min, pairs)) / sum(map(max, pairs))
            expected = (1 - weight) * jaccard + weight * (squares[i, j] / squares[i].max()).item()
            assert found[i, j].item() == pytest.approx(expected, abs=1e-9)


@given(seed=seeds, k=st.integers(1, 9), temperature=st.floats(0.05, 2))
@few
def test_votes_of_the_nearest_neighbours_by_sorting(seed: int, k: int, temperature: float) -> None:
    bank, queries = normal(8, 3, seed=seed), normal(4, 3, seed=seed + 1)
    labels = torch.randint(3, (8,), generator=torch.Generator().manual_seed(seed))
    votes = knn_votes(bank, labels, queries, 3, k, temperature)
    for query, vote in zip(queries, votes, strict=True):
        cosines = [float(query @ x / query.norm() / x.norm()) for x in bank]
        nearest = sorted(range(8), key=lambda row: -cosines[row])[:k]
        weights = [sum(math.exp(cosines[i] / temperature) for i in nearest if labels[i] == c) for c in range(3)]
        assert vote.tolist() == pytest.approx([w / sum(weights) for w in weights])


def test_equal_votes_are_scikit_learn_s() -> None:
    neighbors = pytest.importorskip("sklearn.neighbors")
    bank, queries = normal(60, 4), normal(30, 4, seed=1)
    labels = torch.arange(60) % 3
    theirs = neighbors.KNeighborsClassifier(7, metric="cosine").fit(bank, labels).predict_proba(queries)
    votes = knn_votes(bank, labels, queries, 3, 7, temperature=None)
    torch.testing.assert_close(votes, torch.from_numpy(theirs), rtol=1e-6, atol=1e-6)


@given(seed=seeds)
@few
def test_the_effective_rank_is_that_of_the_singular_values(seed: int) -> None:
    features = normal(10, 4, seed=seed) * torch.tensor([3.0, 2.0, 0.1, 1e-4], dtype=torch.float64)
    values = torch.linalg.svdvals(features - features.mean(0))
    share = values / values.sum()
    assert F.effective_rank(features) == pytest.approx(math.exp(-(share * share.log()).sum()), rel=1e-6)
    assert F.effective_rank(torch.ones(5, 3)) == 0
    assert F.effective_rank(features[:, :1].expand(10, 4)) == pytest.approx(1, abs=1e-5)
