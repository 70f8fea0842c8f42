"""How long the command line takes to answer: lists, help, refusals of a typo, and the first step of training.

    python benchmarks/startup.py [--repeats 5]

Prints wall time, CPU time and peak memory of each command, the median of the repeats. Wall times need a quiet machine;
CPU times hardly do. Wants: every list, help and refusal below 1 s, the first step of training within 5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMANDS = [
    *(["list", what] for what in ("probes", "treatments", "studies", "datasets", "recipes", "tasks", "models")),
    ["--help"],
    *([verb, "--help"] for verb in ("demo", "train", "examine", "prescribe", "study", "report", "corrupt", "list")),
    ["trian"],
    ["train", "epoch=3"],
    ["train", "treatments=[samm]"],
    ["train", "data=nowhere"],
    ["train", "--resume", "nowhere"],
    ["examine", "nowhere"],
    ["examine", "timm:resnet18", "--probes", "fouriers"],
    ["examine", "timm:resnet18", "--data", "nowhere"],
    ["study", "C66"],
    ["prescribe", "--data", "shapes", "--treatments", "samm"],
    ["report", "nowhere"],
    ["corrupt", "nowhere", "--out", "copies"],
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print(f"{'wall s':>8} {'CPU s':>8} {'MB':>6}  command")
    with tempfile.TemporaryDirectory() as folder:
        for words in COMMANDS:
            show([measure(words, folder) for _ in range(repeats)], " ".join(["vitclinic", *words]))
        steps = [measure_first_step(folder, number) for number in range(repeats)]
        show(steps, "vitclinic train shapes steps=1, until the first step is recorded")


def show(measured: list[tuple[float, float, float]], label: str) -> None:
    """Print the medians of a command's wall time, CPU time and memory."""
    wall, cpu, memory = (statistics.median(values) for values in zip(*measured, strict=True))
    print(f"{wall:8.2f} {cpu:8.2f} {memory:6.0f}  {label}", flush=True)


def measure(words: list[str], folder: str) -> tuple[float, float, float]:
    """Run a command; return its wall time and CPU time in seconds and its peak memory in MB."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "vitclinic", *words], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0  # it was waited for
    return time.monotonic() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def measure_first_step(folder: str, number: int) -> tuple[float, float, float]:
    """Train for a step; the wall time is that until the first row of the metrics is there."""
    out = Path(folder) / f"run-{number}"
    started = time.monotonic()
    words = ["train", "shapes", "steps=1", f"out={out}", "test=false"]
    process = subprocess.Popen([sys.executable, "-m", "vitclinic", *words], stdout=subprocess.DEVNULL)
    while not _has_row(out / "metrics.jsonl") and _is_running(process.pid):
        time.sleep(0.01)
    wall = time.monotonic() - started
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def _is_running(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _has_row(file: Path) -> bool:
    if not file.exists():
        return False
    lines = file.read_text().splitlines()
    return bool(lines) and "loss" in json.loads(lines[0])


if __name__ == "__main__":
    main()
