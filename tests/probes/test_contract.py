"""Every registered probe on networks of every kind: a valid record, and a network left exactly as it was."""

import copy
import random

import numpy as np
import pytest
import torch

from tests.probes.subjects import NETWORKS, subject
from vitclinic._core.records import Measurement
from vitclinic.exam.timing import Pace
from vitclinic.probes import known_probes, measure, parse_probes, view_of
from vitclinic.probes.guards import _TABLES, preserve_state
from vitclinic.probes.numbers import find_typo
from vitclinic.probes.running import find_obstacle

QUICK = {
    "sharpness": {"images": 8, "trace_draws": 2, "density_steps": 3, "tolerance": 0.2},
    "hessian_spectrum": {"batches": 2, "batch": 4, "top": 2, "tolerance": 0.1},
    "flatness": {"draws": 12, "precision": 1.0},
    "landscape": {"points": 3},
}
"""Options with which a probe that takes long is held to the contract."""


def probes():
    return parse_probes([{name: QUICK.get(name, {})} for name in known_probes()])


def photograph(network):
    """All that measuring must not change, bit for bit."""
    return {
        "training": [module.training for module in network.modules()],
        "tables": [len(getattr(module, table)) for module in network.modules() for table in _TABLES],
        "identity": [id(tensor) for tensor in (*network.parameters(), *network.buffers())],
        "state": {name: tensor.numpy().tobytes() for name, tensor in network.state_dict().items()},
        "requires_grad": [parameter.requires_grad for parameter in network.parameters()],
        "grad": [None if p.grad is None else p.grad.numpy().tobytes() for p in network.parameters()],
        "random": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
    }


def unusual(network):
    """In training mode with one part in eval mode, one frozen parameter, one gradient."""
    network.train()
    next(network.children()).eval()
    first, second, *_ = network.parameters()
    first.requires_grad_(False)
    second.grad = torch.ones_like(second)
    return network


@pytest.fixture(scope="module")
def exams():
    """Every probe's measurement on every network, made once, with photographs of the network around it."""
    found = {}
    for name in NETWORKS:
        for probe in probes():
            patient = subject(name, name=name)
            unusual(patient.network)
            before = photograph(patient.network)
            (measurement,) = measure(patient, [probe])
            found[probe.name, name] = (measurement, before, photograph(patient.network), view_of(probe, patient))
    return found


@pytest.fixture(params=[(probe, name) for probe in known_probes() for name in NETWORKS], ids=str)
def exam(request, exams):
    return exams[request.param]


def test_the_record_is_whole_and_reads_back_equal(exam, tmp_path):
    measurement, _, _, patient = exam
    assert measurement.status in ("ok", "does_not_apply"), measurement.reason
    assert measurement.subject == patient.digest
    assert measurement.data == patient.data_digest
    assert measurement.provenance.images == len(patient) <= 22
    if measurement.status == "ok":
        assert measurement.scalars
        assert all(np.isfinite(scalar.value) for scalar in measurement.scalars.values())
        assert all(s.low <= s.value <= s.high for s in measurement.scalars.values() if s.low is not None)
    else:
        assert measurement.reason.endswith(".")
    measurement.write(tmp_path / "m.json")
    assert Measurement.read(tmp_path / "m.json") == measurement


def test_every_number_has_a_name_that_the_source_states(exam):
    measurement, _, _, _ = exam
    probe = known_probes()[measurement.probe]
    values = {value for row in measurement.units for value in row.values}
    for name in {*measurement.scalars, *values}:
        assert find_typo(probe, name) is None


@pytest.mark.parametrize("name", known_probes())
def test_a_number_that_no_probe_has_is_told(name):
    probe = known_probes()[name]
    said = find_typo(probe, next(iter(probe.key_scalars)) + "x")
    if name not in ("landscape", "lesion", "mask_noise", "token_kinds"):  # which put names together from parts
        assert f"{name} has no number" in said
        assert "Did you mean" in said


def test_the_network_is_left_exactly_as_it_was(exam):
    _, before, after, _ = exam
    for part in before:
        assert before[part] == after[part], part


def test_probes_that_need_an_anatomy_do_not_apply_to_an_unknown_network(exams):
    for (probe, name), (measurement, _, _, _) in exams.items():
        if known_probes()[probe].needs & {"anatomy", "attention"} and name == "unknown":
            assert measurement.status == "does_not_apply"
            assert "Unknown shows no units" in measurement.reason


def test_a_second_measurement_is_the_same(exams):
    for (probe, name), (measurement, _, _, patient) in exams.items():
        (again_by,) = parse_probes([{probe: QUICK.get(probe, {})}])
        if not again_by.conditions(patient):  # clocks do not repeat themselves
            (again,) = measure(patient, [again_by])
            assert (again.scalars, again.units) == (measurement.scalars, measurement.units), name


@pytest.mark.parametrize("name", known_probes())
def test_a_probe_says_what_it_is_and_what_it_costs(name):
    probe = known_probes()[name]
    assert probe.name == name
    assert (probe.__doc__ or "").split("\n")[0].endswith(".")
    assert probe().forwards(subject()) >= 0
    applies = find_obstacle(probe(), subject()) is None
    pace = Pace(subject())
    assert (pace.of(probe()) + pace.of_shared_pass([probe()], images=1) > 0) == applies


@pytest.mark.parametrize("ending", [KeyboardInterrupt, RuntimeError])
def test_whatever_is_done_to_a_network_is_undone_also_on_errors(ending):
    network = unusual(NETWORKS["vit"]())
    before = photograph(network)

    def vandalise():
        with preserve_state(network):
            assert not any(module.training for module in network.modules())
            network.train()
            network.register_forward_hook(lambda *_: None, always_call=True)
            network.requires_grad_(True)
            network(torch.rand(2, 3, 16, 16)).sum().backward()
            network.mean.add_(1)
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.data.mul_(2)
            random.random(), np.random.rand(), torch.rand(1)
            raise ending

    with pytest.raises(ending):
        vandalise()
    after = photograph(network)
    for part in before:
        assert before[part] == after[part], part


def test_measuring_leaves_no_trace_in_what_the_network_computes():
    patient = subject("resnet")
    images = torch.rand(4, 3, 16, 16)
    twin = copy.deepcopy(patient.network)
    measure(patient, probes())
    torch.testing.assert_close(patient.network(images), twin(images), rtol=0, atol=0)


def test_weights_made_in_inference_mode_are_measured():
    with torch.inference_mode():
        network = NETWORKS["vit"]()
    assert [measurement.status for measurement in measure(subject(network), parse_probes(["norms"]))] == ["ok"]
