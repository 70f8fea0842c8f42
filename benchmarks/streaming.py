"""What the probes that share a pass cost, beside a plain forward pass over the same images.

    python benchmarks/streaming.py [--rounds 7] [--images 32] [--threads 2]

ViT-Tiny/16 at 224 with random weights, on noise, batches of 16. Ratios of wall-clock time, the ways taking turns in one
process; medians with quartiles. Memory is the peak of a process of its own (maximum resident set) that runs all of them
on 500 and on 5,000 images of 32 x 32.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import timm
import torch

from vitclinic.data import Dataset, Split
from vitclinic.probes import StreamingProbe, Subject, known_probes
from vitclinic.probes.shared_pass import run_shared_pass

ATTENTION = ("attention_entropy", "attention_distance")


class Noise:
    """Images that are made when they are read, so that they take no memory."""

    digest = "noise"
    skipped: tuple[str, ...] = ()

    def __init__(self, count: int, side: int) -> None:
        self.side = side
        self.kept = np.arange(count)

    def read(self, indices: np.ndarray) -> np.ndarray:
        generator = np.random.default_rng(int(indices[0]))
        return generator.integers(0, 256, (len(indices), self.side, self.side, 3), dtype=np.uint8)


def noise(count: int, side: int) -> Dataset:
    split = Split(Noise(count, side), np.arange(count), np.arange(count) % 10)
    return Dataset("noise", tuple("0123456789"), (side, side), 3, {"test": split}, f"noise {count} {side}")


def subject(count: int, side: int) -> Subject:
    torch.manual_seed(0)
    small = {} if side == 224 else {"img_size": side, "patch_size": 4, "embed_dim": 96, "depth": 6}
    network = timm.create_model("vit_tiny_patch16_224", num_classes=10, **small).eval()
    return Subject(network, noise(count, side), batch_size=16)


def streaming(*without: str) -> list[str]:
    ours = {name: probe for name, probe in known_probes().items() if probe.__module__.startswith("vitclinic.")}
    return [name for name, probe in ours.items() if issubclass(probe, StreamingProbe) and name not in without]


def measure(measured: Subject, names: list[str]) -> None:
    outcomes = run_shared_pass(measured, {name: known_probes()[name]() for name in names})
    for name, outcome in outcomes.items():
        if isinstance(outcome, Exception):
            raise RuntimeError(name) from outcome


@torch.no_grad()
def forward(measured: Subject) -> None:
    for batch in measured.batches():
        measured.network(batch.images)


def timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def costs(rounds: int, images: int) -> None:
    measured = subject(images, 224)
    ways: dict[str, Callable[[], None]] = {"plain forward": lambda: forward(measured)}
    for name in streaming():
        ways[name] = lambda name=name: measure(measured, [name])
    ways["all without attention"] = lambda: measure(measured, streaming(*ATTENTION))
    ways["all"] = lambda: measure(measured, streaming())
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            seconds = timed(way)
            if turn:
                times[name].append(seconds)
    plain = times.pop("plain forward")
    print(f"plain forward: {1000 * statistics.median(plain) / images:.1f} ms an image")
    for name, seconds in times.items():
        low, middle, high = statistics.quantiles((a / b for a, b in zip(seconds, plain, strict=True)), n=4)
        print(f"{name:24s} {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)


def peak(images: int) -> float:
    """MB of a process that measures so many images."""
    done = subprocess.run([sys.executable, __file__, "--peak", str(images)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        measure(subject(options.peak, 32), streaming())
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000)
        return
    costs(options.rounds, options.images)
    few, many = peak(500), peak(5000)
    print(f"peak memory: {few:.0f} MB with 500 images, {many:.0f} MB with 5,000: {many / few:.3f}")


if __name__ == "__main__":
    main()
