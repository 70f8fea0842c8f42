"""What a probe will hold at its peak, as said beforehand, against the storages that are alive while it measures."""

import importlib
import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.probes.subjects import noise, subject
from vitclinic.data.corruptions import weather
from vitclinic.exam import examine
from vitclinic.models.cost import peak_bytes
from vitclinic.probes import load_subject, measure, parse_probes
from vitclinic.probes.memory import estimate_memory, fit_batch

CPU = torch.device("cpu")


class Remembering(torch.nn.Module):
    """Keeps positions for the batch that it saw last, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.head, self.calls, self.known = torch.nn.Linear(768, 5), 0, {}

    def forward(self, x):
        self.calls += 1
        if self.known.get("images") != len(x):
            self.known = {"images": len(x), "places": torch.arange(768).expand(len(x), 768).sin()}
        return self.head(x.flatten(1) + self.known["places"])


def test_a_trial_leaves_no_trace_in_what_a_network_keeps(tmp_path):
    network = Remembering()
    exam = examine(network, noise(22), probes=["fgsm", "norms"], out=tmp_path, batch_size=16)
    assert exam["fgsm"].status in ("ok", "not_converged")
    assert not isinstance(network.known.get("places"), FakeTensor)
    examined = load_subject(network, noise(22))
    before = examined.network.calls
    assert estimate_memory(examined, parse_probes(["fgsm", "norms"])) > 0
    assert network.calls == before


@pytest.mark.parametrize(
    ("network", "entry"),
    [
        ("vit", "norms"),
        ("resnet", "occlusion"),
        ("resnet", {"landscape": {"points": 3}}),
        ("vit", {"hessian_spectrum": {"batches": 1, "batch": 8, "max_products": 3}}),
    ],
    ids=["norms", "occlusion", "landscape", "hessian_spectrum"],
)
def test_an_estimate_is_within_a_fifth_of_what_is_held(network, entry):
    examined = subject(network)
    probes = parse_probes([entry])
    estimate = estimate_memory(examined, probes)
    counted = peak_bytes(lambda: measure(examined, probes), CPU)
    assert 0.8 < estimate / counted < 1.2


def test_the_textures_of_frost_are_part_of_an_estimate_until_they_are_drawn():
    weather._texture.cache_clear()
    probe, examined = parse_probes(["corruptions"]), subject("vit")
    stated, first = weather.texture_bytes(), estimate_memory(examined, probe)
    counted = peak_bytes(lambda: [weather._texture(number) for number in range(weather.TEXTURES)], CPU, arrays=True)
    assert 0.8 < stated / counted < 1.2
    assert weather.texture_bytes() == 0
    assert first > stated > estimate_memory(examined, probe)


def test_the_batch_is_halved_until_it_fits():
    examined, probes = subject("vit"), parse_probes(["occlusion"])
    examined.batch_size = 16
    whole = estimate_memory(examined, probes)
    examined.batch_size = 4
    quarter = estimate_memory(examined, probes)
    examined.batch_size = 16
    assert fit_batch(examined, probes, room=whole) == (16, whole)
    assert fit_batch(examined, probes, room=quarter) == (4, quarter)
    assert fit_batch(examined, probes, room=10) == (16, whole)  # nothing helps
    assert examined.batch_size == 16


def test_an_exam_says_what_it_will_hold_and_measures_fewer_images_at_a_time(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("vitclinic.probes.memory.estimate_memory", lambda subject, probes: 10**6 * subject.batch_size)
    module = importlib.import_module("vitclinic.exam.examination")
    monkeypatch.setattr(module, "free_memory", lambda device: 9 * 10**6)
    with caplog.at_level(logging.WARNING):
        exam = examine(subject("vit").network, noise(22), probes=["norms"], out=tmp_path, batch_size=16)
    assert "with 16 images at a time it would need more than the 9 MB that are free; measuring with 8" in caplog.text
    assert exam["norms"].provenance.batch_size == 8
    assert exam.memory["norms"] == 8 * 10**6


def test_a_network_that_cannot_be_traced_has_no_estimate():
    examined = subject("unknown")
    examined.network.register_forward_pre_hook(lambda module, inputs: float(inputs[0].sum()) and None)
    assert estimate_memory(examined, parse_probes(["occlusion"])) is None
