"""The plane in which a training moved most, against numpy's SVD of the stacked displacements in float64."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitclinic
from tests.probes.subjects import Unknown, subject
from tests.training.conftest import TINY
from vitclinic._core.records import Measurement
from vitclinic.data import Augment
from vitclinic.probes import PastWeights, Subject, Training, measure, parse_probes
from vitclinic.probes.curvature.directions import coordinates, principal_directions
from vitclinic.training import train

SHAPES = [(3, 4), (5,), (2, 2, 2)]


def rows(count: int = 6) -> np.ndarray:
    """Displacements of 25 weights, with some structure and noise."""
    random = np.random.default_rng(0)
    curve = np.linspace(3, 0.5, count)[:, None] * random.normal(size=25)
    return curve + np.sin(np.arange(count))[:, None] * random.normal(size=25) + 0.1 * random.normal(size=(count, 25))


def parts(row: np.ndarray) -> list[Tensor]:
    pieces = np.split(row, np.cumsum([int(np.prod(shape)) for shape in SHAPES])[:-1])
    return [torch.from_numpy(piece.reshape(shape).copy()) for piece, shape in zip(pieces, SHAPES, strict=True)]


def flat(direction: list[Tensor]) -> np.ndarray:
    return np.concatenate([part.numpy().ravel() for part in direction])


@pytest.mark.parametrize("held", [1, 2, 4, 100])
def test_directions_shares_and_coordinates_are_those_of_the_svd(held: int) -> None:
    matrix = rows()
    reads = [partial(parts, row) for row in matrix]
    found = principal_directions(reads, 3, memory=held * 25 * 8)
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    np.testing.assert_allclose(found.shares, (s**2 / (s**2).sum())[:3], rtol=1e-10)
    path = coordinates(reads, found.directions)
    for number, direction in enumerate(found.directions):
        sign = np.sign(v[number] @ flat(direction))
        np.testing.assert_allclose(flat(direction), sign * v[number], atol=1e-9)
        np.testing.assert_allclose(path[:, number], sign * s[number] * u[:, number], atol=1e-8)
        assert path[np.abs(path[:, number]).argmax(), number] > 0


def test_what_is_held_is_read_once_for_the_gram_matrix() -> None:
    reads = dict.fromkeys(range(6), 0)
    matrix = rows()

    def read(number: int) -> list[Tensor]:
        reads[number] += 1
        return parts(matrix[number])

    principal_directions([partial(read, number) for number in range(6)], 2, memory=10**9)
    assert set(reads.values()) == {2}  # and once for the directions
    principal_directions([partial(read, number) for number in range(6)], 2, memory=0)
    assert [count - 2 for count in reads.values()] == [2, 3, 4, 5, 6, 7]


def test_coordinates_along_directions_at_any_angle_are_those_of_the_nearest_point() -> None:
    one, other = parts(rows()[0]), parts(rows()[3])
    mixed = [2 * a - 0.5 * b for a, b in zip(one, other, strict=True)]
    np.testing.assert_allclose(coordinates([lambda: mixed], [one, other]), [[2, -0.5]], rtol=1e-9)


def test_no_more_directions_than_the_displacements_span() -> None:
    line = [partial(parts, scale * rows()[0]) for scale in (3.0, 2.0, 0.0)]
    found = principal_directions(line, 2, memory=10**9)
    assert len(found.directions) == 1
    assert found.shares.tolist() == pytest.approx([1.0])
    assert not principal_directions([partial(parts, 0 * rows()[0])], 2, memory=10**9).directions


def moved(network: nn.Module, by: float, seed: int) -> nn.Module:
    twin = copy.deepcopy(network)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in twin.parameters():
            p += by * torch.randn(p.shape, generator=generator)
    return twin


def network() -> nn.Module:
    torch.manual_seed(0)
    return Unknown().eval()


def patient(*others: nn.Module) -> Subject:
    states = [*others, network()]
    weights = {float(epoch): partial(state.state_dict) for epoch, state in enumerate(states)}
    past = PastWeights(weights, dict, lambda: "digest", finished=True)
    return subject(network(), training=Training(Augment(level="none"), 0.0, frozenset(), past))


def landscape(patient: Subject, **options: object) -> Measurement:
    (found,) = measure(patient, parse_probes([{"landscape": {"directions": "trajectory", "points": 3, **options}}]))
    return found


def loss_of(network: nn.Module, patient: Subject) -> float:
    with torch.no_grad():
        each = [F.cross_entropy(network(b.images), b.targets, reduction="sum") for b in patient.batches()]
    return float(sum(each)) / len(patient)


def test_a_landscape_reaches_as_far_as_the_path_and_its_end_is_the_epoch_itself() -> None:
    other = moved(network(), 0.3, seed=1)
    found = landscape(patient(other), dimensions=1)
    assert found.status == "ok", found.reason
    np.testing.assert_allclose(found.arrays["path"], [[1], [0]], atol=1e-6)
    assert found.arrays["path_epoch"].tolist() == [0, 1]
    before, at, after = found.arrays["losses"]
    assert after == pytest.approx(loss_of(other, patient(other)), rel=1e-5)
    assert at == pytest.approx(loss_of(network(), patient(other)), rel=1e-5)
    assert before != pytest.approx(after, rel=1e-3)
    pairs = zip(other.parameters(), network().parameters(), strict=True)
    square = sum(float((a - b).detach().square().sum()) for a, b in pairs)
    assert found.scalars["length_1"].value == pytest.approx(square**0.5, rel=1e-5)
    assert found.scalars["explained_1"].value == pytest.approx(1)


@pytest.mark.parametrize("normalisation", [None, "none", "filter"])
def test_a_plane_of_a_longer_path(normalisation: str | None) -> None:
    others = [moved(network(), by, seed=seed) for by, seed in ((0.4, 1), (0.2, 2), (0.1, 3))]
    found = landscape(patient(*others), normalisation=normalisation)
    home = np.concatenate([p.detach().double().numpy().ravel() for p in network().parameters()])
    matrix = np.stack(
        [np.concatenate([p.detach().double().numpy().ravel() for p in state.parameters()]) - home for state in others]
    )
    u, s, _ = np.linalg.svd(matrix, full_matrices=False)
    shares = [found.scalars[f"explained_{number}"].value for number in (1, 2)]
    assert shares == pytest.approx((s**2 / (s**2).sum())[:2].tolist(), rel=1e-4)
    path = found.arrays["path"]
    assert path.shape == (4, 2)
    np.testing.assert_allclose(path[-1], 0, atol=1e-6)
    expected = np.abs(u[:, :2] * s[:2])
    if normalisation is None:
        expected = expected / expected.max(axis=0)
        assert np.abs(path).max(axis=0).tolist() == pytest.approx([1, 1])
    if normalisation == "filter":
        assert found.scalars["length_1"].value != pytest.approx(1, rel=0.1)
    else:
        np.testing.assert_allclose(np.abs(path[:3]), expected, rtol=1e-4, atol=1e-6)


def test_where_there_is_no_such_plane_it_says_what_to_do() -> None:
    for odd, words in (
        (subject("unknown"), "it needs the weights of several epochs"),
        (patient(), "(0) differ from the network's in 0 directions"),
        (patient(moved(network(), 0.1, 1)), "(0, 1) differ from the network's in 1 directions; keep more"),
    ):
        found = landscape(odd)
        assert found.status == "does_not_apply"
        assert words in (found.reason or "")
        assert "checkpoint.keep_epochs" in (found.reason or "")


def test_a_run_that_kept_its_epochs(tmp_path: Path) -> None:
    kept = {"checkpoint": {"keep_epochs": [0, 1, 2]}, "steps": 17, "out": str(tmp_path / "run")}
    run = train({**TINY, **kept})
    probes = [{"landscape": {"directions": "trajectory", "points": 3, "images": 20}}]
    found = vitclinic.examine(f"{run.path}@last", probes=probes)["landscape"]
    assert found.status == "ok", found.reason
    assert found.arrays["path_epoch"].tolist()[:3] == [0, 1, 2]
    np.testing.assert_allclose(found.arrays["path"][-1], 0, atol=1e-6)
    assert 0.5 < found.scalars["explained_1"].value + found.scalars["explained_2"].value <= 1
    assert "weights" in found.conditions
