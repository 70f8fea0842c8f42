"""The landscape against copies of the network, the normalisations against loops, and going on after an interruption."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitclinic
from tests.probes.curvature.networks import NETWORKS, batches, dense_hessian, network
from tests.probes.subjects import Unknown, noise, subject
from vitclinic._core.records import Measurement
from vitclinic.data import Augment
from vitclinic.probes import Subject, Training, measure, parse_probes
from vitclinic.probes.curvature.directions import normalize_direction, random_direction, top_eigenvectors
from vitclinic.probes.curvature.landscape import Grid
from vitclinic.probes.curvature.loss_surface import LossSurface
from vitclinic.probes.guards import Partial


def landscape(patient: Subject, **options: object) -> Measurement:
    (found,) = measure(patient, parse_probes([{"landscape": options}]))
    return found


def directions_of(net: nn.Module, count: int = 2, how: str = "filter") -> list[list[Tensor]]:
    weights = list(net.parameters())
    return [normalize_direction(random_direction(weights, seed), weights, how) for seed in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_point_equals_the_loss_of_a_copy_moved_there(name: str, dimensions: int) -> None:
    net, data = network(name), batches()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    directions = directions_of(net, dimensions)
    surface = LossSurface(net, data, decay=0.1)
    grid = Grid(points=3, span=0.7, dimensions=dimensions)
    with surface.evaluation_mode():
        grid.fill(surface, directions)
    for place in np.ndindex(grid.losses.shape):
        twin = copy.deepcopy(net)
        with torch.no_grad():
            for number, p in enumerate(twin.parameters()):
                for direction, at in zip(directions, place, strict=True):
                    p += (-0.7, 0.0, 0.7)[at] * direction[number]
            outputs = torch.cat([twin(batch.images) for batch in data])
            decay = 0.05 * sum(p.square().sum() for p in twin.parameters())
            expected = F.cross_entropy(outputs, torch.cat([batch.targets for batch in data])) + decay
        assert grid.losses[place] == pytest.approx(float(expected), rel=1e-12), place
    assert len(np.unique(grid.losses)) == 3**dimensions
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_per_filter_means_that_each_output_has_the_norm_of_its_weights() -> None:
    net = network("convnet")
    weights = list(net.parameters())
    raw = random_direction(weights, 0)
    for d, r, w in zip(normalize_direction(raw, weights), raw, weights, strict=True):
        expected = torch.zeros_like(r)
        if w.ndim > 1:
            for f in range(len(w)):
                expected[f] = r[f] * (w[f].square().sum().sqrt() / r[f].square().sum().sqrt())
        torch.testing.assert_close(d, expected, rtol=1e-12, atol=0)


def test_over_dim_0_means_that_each_input_has_the_norm_of_its_weights() -> None:
    net = network("convnet")
    weights = list(net.parameters())
    raw = random_direction(weights, 0)
    for d, r, w in zip(normalize_direction(raw, weights, "dim0"), raw, weights, strict=True):
        expected = torch.zeros_like(r)
        if w.ndim > 1:
            for rest in np.ndindex(w.shape[1:]):
                column = (slice(None), *rest)
                expected[column] = r[column] * (w[column].square().sum().sqrt() / r[column].square().sum().sqrt())
        torch.testing.assert_close(d, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("how", ["filter", "dim0"])
def test_one_dimensional_parameters_as_one_filter_each_and_zeros_that_stay_zero(how: str) -> None:
    weights = [torch.tensor([3.0, 4.0]), torch.zeros(2, 2), torch.ones(2, 2), torch.tensor(-2.0)]
    raw = [torch.tensor([0.0, 2.0]), torch.ones(2, 2), torch.zeros(2, 2), torch.tensor(0.5)]
    found = normalize_direction(raw, weights, how, "normalised")  # type: ignore[arg-type]
    expected = [torch.tensor([0.0, 5.0]), torch.zeros(2, 2), torch.zeros(2, 2), torch.tensor(2.0)]
    for d, e in zip(found, expected, strict=True):
        torch.testing.assert_close(d, e)


def test_without_normalisation_a_direction_has_unit_length() -> None:
    found = normalize_direction([torch.tensor([3.0]), torch.tensor([[4.0]])], [torch.ones(1), torch.ones(1, 1)], "none")
    assert [float(part) for part in found] == pytest.approx([0.6, 0.8])


def test_eigenvectors_are_those_of_the_dense_hessian_and_the_loss_bends_by_the_eigenvalue() -> None:
    net, data = network("vit"), batches()
    values, vectors = torch.linalg.eigh(dense_hessian(net, data))
    order = values.abs().argsort(descending=True)[:2]
    surface = LossSurface(net, data)
    directions, found = top_eigenvectors(surface, 2, seed=0)
    for direction, exact in zip(directions, vectors.T[order], strict=True):
        assert abs(float(surface.flat(direction) @ exact)) == pytest.approx(1.0, abs=1e-4)
    grid = Grid(points=3, span=1e-4, dimensions=1)
    with surface.evaluation_mode():
        grid.fill(surface, directions[:1])
    below, at, above = grid.losses
    assert (below - 2 * at + above) / 1e-8 == pytest.approx(found.values[0], rel=1e-3)


def test_eigenvectors_are_one_option_away() -> None:
    found = landscape(subject("unknown"), directions="eigenvectors", points=3, span=0.1)
    assert found.status == "ok", found.reason
    assert abs(found.scalars["eigenvalue_1"].value) >= abs(found.scalars["eigenvalue_2"].value) > 0
    filtered = landscape(subject("unknown"), directions="eigenvectors", points=3, span=0.1, normalisation="filter")
    assert not np.isclose(filtered.arrays["losses"][0], found.arrays["losses"][0]).any()


def test_the_default_is_a_plane_of_21_by_21_points_along_filter_normalised_directions() -> None:
    probe = parse_probes(["landscape"])[0]
    assert probe.forwards(subject("unknown")) == (441 + 2) * 22
    patient = subject("unknown")
    found = landscape(patient, points=3)
    assert landscape(patient, points=3, normalisation="filter").arrays["losses"].tolist() == (
        found.arrays["losses"].tolist()
    )
    assert not np.isclose(
        landscape(patient, points=3, normalisation="dim0").arrays["losses"][0], found.arrays["losses"][0]
    ).any()
    assert found.arrays["x"].tolist() == found.arrays["y"].tolist() == [-1, 0, 1]
    assert found.scalars["loss"].value == found.arrays["losses"][1, 1]
    assert found.scalars["largest_loss"].value == found.arrays["losses"].max()


def test_the_run_s_own_regulariser_is_added_where_it_is_known() -> None:
    plain = subject("unknown")
    names = frozenset({"head.weight", "body.0.weight"})
    trained = Subject(plain.network, noise(), batch_size=8, training=Training(Augment(level="none"), 0.2, names))
    options = {"points": 3, "span": 0.5, "dimensions": 1}
    difference = (
        landscape(trained, **options, regulariser="run").arrays["losses"]
        - landscape(trained, **options).arrays["losses"]
    )
    squares = sum(float(p.detach().square().sum()) for name, p in plain.network.named_parameters() if name in names)
    assert difference[1] == pytest.approx(0.1 * squares, rel=1e-5)
    assert difference[0] + difference[2] == pytest.approx(2 * 0.1 * squares * 1.25, rel=1e-5)  # |d| = |w| of each
    unknown = landscape(plain, **options, regulariser="run")
    assert unknown.status == "does_not_apply"
    assert "how the network was trained" in (unknown.reason or "")


def test_points_come_from_the_centre_outwards() -> None:
    grid = Grid(points=5, dimensions=2)
    places = grid.remaining()
    distances = [np.hypot(i - 2, j - 2) for i, j in places]
    assert places[0] == (2, 2)
    assert distances == sorted(distances)
    assert len(set(places)) == 25


@pytest.mark.parametrize("directions", ["random", "eigenvectors"])
def test_a_budget_ends_it_with_the_points_around_the_centre(directions: str) -> None:
    patient = subject("unknown")
    found = landscape(patient, points=5, budget=0.0001, directions=directions)
    assert found.status == "not_converged"
    assert found.reason is not None
    assert "4% of the points are evaluated" in found.reason
    assert ("not converged after 2 Hessian-vector products" in found.reason) == (directions == "eigenvectors")
    assert found.arrays["evaluated"].sum() == 1
    assert found.arrays["losses"][2, 2] == landscape(patient, points=3).scalars["loss"].value
    assert np.isnan(found.arrays["losses"]).sum() == 24


def test_an_even_number_of_points_has_the_network_between_them() -> None:
    """As the 50 x 50 of chen2022: the loss is still that of the network itself."""
    patient = subject("unknown")
    even, odd = landscape(patient, points=4), landscape(patient, points=3)
    assert even.arrays["x"].tolist() == pytest.approx([-1, -1 / 3, 1 / 3, 1])
    assert even.scalars["loss"] == odd.scalars["loss"]
    assert even.arrays["losses"][[0, 0, -1, -1], [0, -1, 0, -1]] == pytest.approx(
        odd.arrays["losses"][[0, 0, -1, -1], [0, -1, 0, -1]]
    )


def test_images_are_those_of_the_training_if_asked_for() -> None:
    patient = subject("unknown")
    plain = landscape(patient, points=3)
    assert landscape(patient, points=3, augment="run").status == "does_not_apply"
    trained = subject("unknown", training=Training(Augment(level="light"), 0.0, frozenset()))
    augmented = landscape(trained, points=3, augment="run")
    assert augmented.scalars["loss"].value != plain.scalars["loss"].value
    assert landscape(trained, points=3).scalars["loss"] == plain.scalars["loss"]


class Delicate(nn.Module):
    """Its loss is NaN for negative weights; it counts its passes and can be told to end them."""

    def __init__(self, stop: int | None = None) -> None:
        super().__init__()
        self.inner = Unknown()
        self.gain = nn.Parameter(torch.full((1, 1), 0.5))
        self.passes, self.left = 0, stop or 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.left -= 1  # counted down: what a forward pass changes is not part of a network's digest
        if self.left == 0:
            raise KeyboardInterrupt
        return self.inner(x) * self.gain.sqrt()


def delicate(stop: int | None = None) -> Delicate:
    torch.manual_seed(0)
    return Delicate(stop)


def test_an_interrupted_exam_goes_on_where_it_was(tmp_path: Path) -> None:
    options = {"data": noise(8), "probes": [{"landscape": {"points": 5, "span": 3.0}}], "batch_size": 8}
    whole = delicate()
    expected = vitclinic.examine(whole, **options, out=tmp_path / "whole")["landscape"]
    before_points = whole.passes - 25
    with pytest.raises(KeyboardInterrupt):
        vitclinic.examine(delicate(stop=before_points + 16), **options, out=tmp_path / "cut")
    (partial,) = (tmp_path / "cut").rglob("*.partial")
    assert not list((tmp_path / "cut").rglob("*.json"))
    second = delicate()
    exam = vitclinic.examine(second, **options, out=tmp_path / "cut")
    assert second.passes == before_points + 10  # the other 15 were there, NaN or not
    np.testing.assert_array_equal(exam["landscape"].arrays["losses"], expected.arrays["losses"])
    assert exam["landscape"].scalars == expected.scalars
    assert expected.scalars["points_not_finite"].value > 0
    assert np.isfinite(expected.scalars["largest_loss"].value)
    assert not partial.exists()
    assert exam.files["landscape"].is_file()


def test_fresh_starts_over(tmp_path: Path) -> None:
    options = {"data": noise(8), "probes": [{"landscape": {"points": 3}}], "out": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        vitclinic.examine(delicate(stop=12), **options)
    again = delicate()
    vitclinic.examine(again, **options, fresh=True)
    assert again.passes >= 9 + 2
    assert not list(tmp_path.rglob("*.partial"))


def test_work_for_other_directions_or_damaged_work_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sub" / "a.partial"
    arrays = {"losses": np.array([np.nan, np.inf, 1.0])}
    Partial(path, "one").write(arrays)
    np.testing.assert_array_equal(Partial(path, "one").read()["losses"], arrays["losses"])  # type: ignore[index]
    assert Partial(path, "another").read() is None
    path.write_bytes(path.read_bytes()[:100])
    assert Partial(path, "one").read() is None
    assert "starting over" in caplog.text
    assert Partial(None).read() is None


def test_a_disk_that_takes_nothing_does_not_end_the_measurement(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    patient = subject("unknown", scratch={"landscape": tmp_path / "file" / "a.partial"})
    assert landscape(patient, points=3).status == "ok"
    assert "cannot be resumed" in caplog.text


SLOW_EXAM = """
import sys, time, torch, vitclinic
from tests.probes.curvature.test_landscape import Delicate
from tests.probes.subjects import noise

class Slow(Delicate):
    def forward(self, x):
        time.sleep(float(sys.argv[2]))
        return super().forward(x)

torch.manual_seed(0)
network = Slow()
exam = vitclinic.examine(network, noise(8), probes=[{"landscape": {"points": 7}}], out=sys.argv[1])
print(network.passes, exam["landscape"].arrays["losses"].tolist())
"""


@pytest.mark.slow
def test_a_killed_exam_goes_on_where_it_was(tmp_path: Path) -> None:
    def start(out: str, pause: float) -> subprocess.Popen[str]:
        root = Path(__file__).parents[3]
        paths = os.pathsep.join([str(root), str(Path(vitclinic.__file__).parents[1])])
        words = [sys.executable, "-c", SLOW_EXAM, str(tmp_path / out), str(pause)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths})

    killed = start("cut", 0.2)
    deadline = time.monotonic() + 100
    while not list((tmp_path / "cut").rglob("*.partial")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(2)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    (partial,) = (tmp_path / "cut").rglob("*.partial")
    kept = int(np.load(partial)["evaluated"].sum())
    assert 0 < kept < 49
    resumed, whole = (start(out, 0.0).communicate()[0].split(maxsplit=1) for out in ("cut", "whole"))
    assert resumed[1] == whole[1]
    assert int(resumed[0]) == int(whole[0]) - kept
    assert not partial.exists()
