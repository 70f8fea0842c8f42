"""What does other work on the machine cost a training on two threads, and what does a shorter wait at barriers save?

    python benchmarks/busy.py

Threads of OpenMP spin at a barrier until the others arrive: fast alone, and many times slower where another process has
the core that is waited for. The command line sets GOMP_SPINCOUNT to 5000 (`cli.main`), so that they sleep
after a few microseconds. Each row times steps of a small network in processes of their own, in turns: as torch comes,
with that count, and on one thread, beside no, one and two busy processes.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

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
    if len(sys.argv) > 1:
        print(time_step(sys.argv[1]))
    else:
        main()
