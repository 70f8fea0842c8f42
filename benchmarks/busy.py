"""What does other work on the machine cost a training on two threads, and what does a shorter wait at barriers save?

    python benchmarks/busy.py

Threads of OpenMP spin at a barrier until the others arrive: fast alone, and many times slower where another process has
the core that is waited for. The command line sets GOMP_SPINCOUNT to 5000 (`cli.main`), so that they sleep
after a few microseconds. Each row times steps of a small network in processes of their own, in turns: as torch comes,
with that count, and on one thread, beside no, one and two busy processes.

    python benchmarks/busy.py --runs 60s

instead counts the steps of whole runs of that `max_time`: on one thread with no process of ours beside it, and as the
command comes, which chooses its threads by the load that it sees, beside one busy process.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import vitclinic
from vitclinic.cli import SPIN_COUNT

ROUNDS, SECONDS = 3, 3.0
SETTINGS = {
    "two threads": {"OMP_NUM_THREADS": "2"},
    "two, short wait": {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": SPIN_COUNT},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
NETWORKS = {
    "hybrid_vit": {"size": "tiny"},
    "vit_tiny_fitted": {"embed_dim": 96, "depth": 6, "num_heads": 3, "patch_size": 4},
}


def time_step(name: str) -> float:
    """Return the median milliseconds of a training step on 64 images."""
    torch.manual_seed(0)
    network = vitclinic.create_model(name, img_size=32, num_classes=10, **NETWORKS[name])
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, fused=True)
    images, labels = torch.rand(64, 3, 32, 32), torch.randint(10, (64,))
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < SECONDS:
        began = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
        taken.append(time.perf_counter() - began)
    return 1000 * statistics.median(taken[2:])


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many cores busy."""
    children = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for child in children:
            child.kill()


def count_steps(max_time: str, variables: dict[str, str]) -> dict[str, Any]:
    """Return what `vitclinic train` made of its time: steps, seconds, threads."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = ["digits", f"max_time={max_time}", "model.depth=6", "model.embed_dim=96", f"out={out}"]
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "vitclinic", "train", *words, "-q"], env={**os.environ, **variables}, check=True
        )
        taken = time.perf_counter() - began
        status = json.loads((out / "status.json").read_text())
        threads = json.loads((out / "environment.json").read_text())["threads"]
    return {"steps": status["step"], "seconds": round(taken, 1), "threads": threads}


def compare_runs(max_time: str) -> None:
    """Print the steps of a run alone, on one thread, and of one beside a busy process; twice, in turns."""
    os.environ.pop("OMP_NUM_THREADS", None)
    for _ in range(2):
        print("load before", os.getloadavg())
        alone = count_steps(max_time, {"OMP_NUM_THREADS": "1"})
        print("alone, one thread", alone, "load", os.getloadavg(), flush=True)
        with busy(1):
            beside = count_steps(max_time, {})
        print("beside a busy process", beside, "load", os.getloadavg())
        print(f"ratio {beside['steps'] / alone['steps']:.2f}", flush=True)


def main() -> None:
    print("| network | busy beside it | " + " | ".join(f"{name}, ms" for name in SETTINGS) + " |")
    print("|---|---|" + "---|" * len(SETTINGS))
    for network in NETWORKS:
        for processes in (0, 1, 2):
            found: dict[str, list[float]] = {name: [] for name in SETTINGS}
            with busy(processes):
                for _ in range(ROUNDS):
                    for name, variables in SETTINGS.items():
                        command = [sys.executable, __file__, network]
                        output = subprocess.check_output(command, env={**os.environ, **variables}, text=True)
                        found[name].append(float(output))
            cells = " | ".join(f"{statistics.median(values):.0f}" for values in found.values())
            print(f"| {network} | {processes} | {cells} |", flush=True)


if __name__ == "__main__":
    if "--runs" in sys.argv:
        compare_runs(sys.argv[-1])
    elif len(sys.argv) > 1:
        print(time_step(sys.argv[1]))
    else:
        main()
