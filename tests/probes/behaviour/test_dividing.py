"""Behaviour probes in two real processes, each of which shows the network its share of the images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.probes.behaviour.test_corruptions import Fragile, pictures
from tests.processes import in_two_processes
from vitclinic._core.distributed import ALONE, Distributed
from vitclinic.data import Augment, shapes
from vitclinic.probes import Corruptions, Subject, Training, measure, parse_probes
from vitclinic.probes.guards import Partial

IMAGES = 15  # the last batch is smaller, and so is one of the shares
PROBES: dict[str, dict[str, Any]] = {
    "corruptions": {},
    "fgsm": {"epsilon": 0.1, "random_start": True},
    "frequency_noise": {"width": 0.5, "strength": 0.3},
    "missing_rate": {},
    "occlusion": {"value": "mean"},
    "pgd": {"epsilon": 0.1, "restarts": 1, "steps": 2},
    "shape_bias": {"images": 45},
    "shift": {"classes": [0, [1, 2], None, 3, 4, 5, 6, 7, 8, 9]},
    "train_nll": {"images": 40},
}


def patient(distributed: Distributed, **options: Any) -> Subject:
    training = Training(Augment(level="light", mixup=0.8), 0.0, frozenset())
    data = pictures(IMAGES, classes=len(shapes.CLASSES), names=shapes.CLASSES)
    network = Fragile(classes=len(shapes.CLASSES)).double()
    return Subject(network, data, **{"batch_size": 4, "training": training, "distributed": distributed, **options})


def found_by(name: str, distributed: Distributed) -> dict[str, Any]:
    subject = patient(distributed)
    (probe,) = parse_probes([{name: PROBES[name]}])
    view = probe.view(subject)
    view.outputs  # noqa: B018 (the first call of the network, made by any probe that needs labels)
    subject.network.seen, told = 0, []
    view.progress = lambda what, done, total: told.append(done / total)
    (found,) = measure(subject, [probe])
    return {
        "status": f"{found.status} {found.reason}",
        "scalars": {key: [scalar.value, scalar.low, scalar.high, scalar.n] for key, scalar in found.scalars.items()},
        "arrays": {key: np.asarray(array, float).ravel().tolist() for key, array in found.arrays.items()},
        "seen": subject.network.seen,
        "told": told,
    }


def broken_in_one(rank: int) -> str:
    """Not finite for the images of the second process alone."""
    subject = patient(Distributed.current())
    if rank:
        torch.nn.init.constant_(subject.network.head.weight, float("nan"))
    (found,) = measure(subject, parse_probes(["occlusion"]))
    return f"{found.status}: {found.reason}"


def gone_on(folder: str) -> dict[str, Any]:
    """What is found, and how many images are shown, after a measurement that was stopped with half of all known."""
    subject = patient(Distributed.current(), scratch={"corruptions": Path(folder) / "corruptions.partial"})
    subject.network.seen = 0
    (found,) = measure(subject, [Corruptions()])
    return {"accuracy": found.scalars["accuracy"].value, "seen": subject.network.seen}


def together(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {name: found_by(name, Distributed.current()) for name in PROBES}
    return {**found, "broken": broken_in_one(rank), "gone on": gone_on(folder)}


def known_in_part(folder: Path) -> None:
    """Of the first batch everything is known, of the others nothing: here, that all of it is right."""
    subject = patient(ALONE)
    known = np.full((76, IMAGES), -1, np.int8)
    known[:, :4] = 1
    Partial(folder / "corruptions.partial", f"15 0 {subject.data_digest}").write({"correct": known})


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("dividing")
    known_in_part(folder)
    return in_two_processes(together, folder, str(folder))


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return {name: found_by(name, ALONE) for name in PROBES}


@pytest.mark.parametrize("name", PROBES)
def test_two_processes_find_exactly_what_one_finds(shares, alone, name):
    expected = alone[name]
    assert expected["status"].startswith("ok"), expected["status"]
    for share in shares:
        assert share[name]["status"] == expected["status"]
        assert share[name]["scalars"] == expected["scalars"]
        np.testing.assert_equal(share[name]["arrays"], expected["arrays"])


@pytest.mark.parametrize("name", PROBES)
def test_each_process_shows_the_network_its_share(shares, alone, name):
    seen = [share[name]["seen"] for share in shares]
    assert sum(seen) == alone[name]["seen"]
    assert max(seen) < 0.7 * sum(seen)
    for share in (*shares, alone):
        told = share[name]["told"]
        assert told == sorted(told)
        assert 0.5 < told[-1] <= 1


def test_what_breaks_in_one_process_is_said_by_all(shares):
    assert [share["broken"] for share in shares] == [
        "failed: network returns logits that are not finite (NaN or infinity)."
    ] * 2


def test_what_was_known_before_is_taken_over_by_all(shares, alone):
    seen = [share["gone on"]["seen"] for share in shares]
    assert sum(seen) == 11 * 76
    assert shares[0]["gone on"]["accuracy"] == shares[1]["gone on"]["accuracy"] > 4 / IMAGES
