"""Kill -9 in an exam: the next call finishes, and repeats nothing that was finished."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.processes import Command

VIT = "timm:vit_tiny_patch16_224?img_size=32&patch_size=8&embed_dim=24&depth=2&num_heads=2&num_classes=10"
WORDS = [VIT, "--random-weights", "--data", "shapes:120", "--budget", "15s", "--json", "--no-report"]


def command(folder: Path) -> Command:
    return Command(["examine", *WORDS, "--out", str(folder)])


def stored(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.json")}


def finished(folder: Path) -> set[str]:
    """The files of measurements that are not made again."""
    return {name for name, text in stored(folder).items() if json.loads(text)["status"] in ("ok", "not_converged")}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_the_next_call_finishes_without_repeating(seed: int, tmp_path: Path) -> None:
    process = command(tmp_path)
    patience = time.monotonic() + 200
    while not finished(tmp_path) and process.poll() is None and time.monotonic() < patience:
        time.sleep(0.02)
    time.sleep(random.Random(seed).uniform(0, 3))
    assert process.poll() is None, process.communicate()[1]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    before = {name: text for name, text in stored(tmp_path).items() if name in finished(tmp_path)}
    assert before
    plans = list(tmp_path.rglob("*.plan"))
    assert len(plans) == 1

    out, error = command(tmp_path).communicate()
    (exam,) = json.loads(out)
    assert {name: stored(tmp_path)[name] for name in before} == before, error
    assert {each["file"] for each in exam["measurements"].values() if each["reused"]} == set(before)
    planned = {entry["probe"] for entry in json.loads(plans[0].read_text())["entries"]}
    assert set(exam["measurements"]) | set(exam["left_out"]) >= planned
    assert list(tmp_path.rglob("*.plan")) == plans


def test_ctrl_c_is_one_sentence(tmp_path: Path) -> None:
    process = command(tmp_path)
    patience = time.monotonic() + 200
    while not finished(tmp_path) and process.poll() is None and time.monotonic() < patience:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130
    assert error == "interrupted; what has been measured is stored; run the same command to resume\n"
