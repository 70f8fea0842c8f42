"""Networks that nobody adapted vitclinic for, from end to end: a sentence on what is unknown, numbers for the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_command
from vitclinic.probes import known_probes

OWN = '''
import torch
from torch import nn

class Gate(nn.Module):
    """A block that no library has."""
    def __init__(self, width):
        super().__init__()
        self.mix, self.gate = nn.Conv2d(width, width, 3, padding=1, groups=width), nn.Conv2d(width, width, 1)

    def forward(self, x):
        return x + self.mix(x) * torch.sigmoid(self.gate(x))

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.Sequential(Gate(8), Gate(8))
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))
'''

SMALL = {
    "cost": {"repeats": 1},
    "landscape": {"points": 3, "images": 8},
    "flatness": {"draws": 4, "images": 8},
    "hessian_spectrum": {"batches": 1, "batch": 4, "top": 1, "tolerance": 0.3},
    "sharpness": {"images": 8, "tolerance": 0.3, "trace_draws": 1, "density_draws": 0, "components": "false"},
    "ntk": {"images": 8, "block": 4},
    "corruptions": {"images": 4},
    "frequency_noise": {"images": 8},
    "pgd": {"images": 8, "steps": 2},
    "lesion": {"images": 8},
    "shape_bias": {"images": 16},
}


def examined(folder: Path, *words: str, probes: set[str]) -> dict[str, Any]:
    """The exam of one target by a real command, in small: nothing in it depends on the clock."""
    command = ["examine", *words, "--data", "shapes:60", "--limit", "32", "--json"]
    command += ["--probes", ",".join(sorted(probes))]
    for probe in sorted(probes & SMALL.keys()):
        for option, value in SMALL[probe].items():
            command += ["--set", f"{probe}.{option}={value}"]
    done = run_command(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    (exam,) = json.loads(done.stdout)
    assert (folder / "exams" / "report.html").stat().st_size > 10_000
    return exam  # type: ignore[no-any-return]


def statuses(exam: dict[str, Any]) -> dict[str, str]:
    return {probe: measured["status"] for probe, measured in exam["measurements"].items()}


def test_a_network_never_seen_is_measured_with_nothing_registered(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    exam = examined(tmp_path, "mine:Own", probes=set(known_probes()) - {"shift", "trajectory"})
    for name, probe in known_probes().items():
        if "attention" in probe.needs:
            measured = exam["measurements"][name]
            assert (measured["status"], measured["reason"]) == ("does_not_apply", "a Own has no attention maps.")
    for name in ("anatomy", "fourier", "variance", "cka", "lesion", "token_similarity", "norms"):
        assert exam["measurements"][name]["status"] == "ok", name
    found = statuses(exam)
    measurable = {"accuracy", "cost", "train_nll", "corruptions", "frequency_noise", "fgsm", "pgd", "occlusion"}
    measurable |= {"missing_rate", "shape_bias", "hessian_spectrum", "sharpness", "landscape", "flatness", "ntk"}
    assert {name: found.get(name) for name in measurable if found.get(name) not in ("ok", "not_converged")} == {}


@pytest.mark.parametrize(
    "target",
    [
        "timm:xcit_nano_12_p16_224?img_size=32&num_classes=10&depth=2&embed_dim=32&num_heads=2",
        "timm:edgenext_xx_small?num_classes=10&dims=[8,16,24,32]&depths=[1,1,2,1]&heads=[2,2,2,2]",
    ],
    ids=["xcit", "edgenext"],
)
def test_a_timm_network_that_is_not_named_here(target: str, tmp_path: Path) -> None:
    probes = {
        "accuracy",
        "norms",
        "cka",
        "attention_entropy",
        "lesion",
        "cost",
        "fgsm",
        "hessian_spectrum",
        "sharpness",
    }
    found = statuses(examined(tmp_path, target, "--random-weights", probes=probes))
    assert "failed" not in found.values(), found
    assert {found[name] for name in ("accuracy", "cost", "fgsm", "hessian_spectrum", "sharpness")} == {"ok"}
