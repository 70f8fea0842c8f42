"""`vitclinic examine` in two processes, as torchrun starts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import run_ranks

VIT = "timm:vit_tiny_patch16_224?img_size=16&patch_size=8&embed_dim=12&depth=2&num_heads=2&num_classes=10"
PROBES = ["--set", "flatness.draws=3", "--set", "hessian_spectrum.batches=3", "--set", "sharpness.components=false"]
WORDS = [VIT, "--random-weights", "--data", "shapes:120", "--probes", "norms,flatness,hessian_spectrum,sharpness"]


def examined(folder: Path, processes: int) -> tuple[str, list[Path]]:
    done = run_ranks("examine", *WORDS, *PROBES, "--json", "--out", str(folder), processes=processes)
    assert done.returncode == 0, done.stderr
    return done.stdout, sorted(path.relative_to(folder) for path in folder.rglob("*.*"))


def test_two_processes_print_and_store_what_one_does(tmp_path: Path) -> None:
    alone, alone_files = examined(tmp_path / "alone", 1)
    both, files = examined(tmp_path / "both", 2)
    assert files == alone_files
    (one,), (two,) = json.loads(alone), json.loads(both)
    for probe, expected in one["measurements"].items():
        found = two["measurements"][probe]
        assert found["status"] == expected["status"], found["reason"]
        values = [{name: scalar["value"] for name, scalar in each["scalars"].items()} for each in (found, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-3)
    again, _ = examined(tmp_path / "both", 2)
    (third,) = json.loads(again)
    assert all(measurement["reused"] for measurement in third["measurements"].values())
