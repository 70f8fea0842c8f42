"""How much memory does each probe take, beside what was estimated before?

    python benchmarks/memory.py [NETWORK ...] [--only PROBE,PROBE] [--resident]

Each probe measures a network in a process of its own, forked from the first, so that nothing is left of the probe
before: all storages of tensors are counted while they live, with numpy's arrays and Python's objects. Columns are
network, probe, megabytes estimated and counted, their ratio, how measuring ended, and the seconds of the estimate. With
`--resident` it measures once more, uncounted, and the system says by how much the process's resident memory rose.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from vitclinic.data import load_batches
from vitclinic.models.cost import peak_bytes
from vitclinic.probes import Probe, StreamingProbe, Subject, known_probes, load_subject, measure
from vitclinic.probes.memory import estimate_memory
from vitclinic.probes.running import find_obstacle

IMAGES, BATCH, CLASSES, PATIENCE = 48, 16, 10, 240
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "ViT, 32 px": (
        lambda: timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=4, depth=6, num_heads=3, num_classes=CLASSES
        ),
        32,
    ),
    "ResNet-18, 64 px": (lambda: timm.create_model("resnet18", num_classes=CLASSES), 64),
    "Swin-T, 112 px": (
        lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=112, num_classes=CLASSES),
        112,
    ),
}
SETTINGS = {
    "flatness": {"draws": 3, "precision": 0},
    "landscape": {"points": 3},
    "sharpness": {"max_products": 12, "density_draws": 0, "trace_draws": 1, "components": False},
    "hessian_spectrum": {"batches": 1, "max_products": 12},
    "corruptions": {"images": 16},
    "pgd": {"images": 16},
    "fgsm": {"images": 16},
    "saliency": {"images": 16, "steps": 2, "draws": 1},
    "ntk": {"images": 48},
    "cost": {"repeats": 1},
}
"""Less of the same, where that leaves the peak as it is."""


def open_network(name: str, images: int) -> Subject:
    """Return the network with noise as images."""
    build, size = NETWORKS[name]
    torch.manual_seed(0)
    network = build().eval()
    with torch.no_grad():  # all images are classified correctly, or there would be less to attack
        noise = [torch.rand(BATCH, 3, size, size) for _ in range(images // BATCH)]
        batches = [(each, network(each).argmax(1)) for each in noise]
    dataset = load_batches({"train": batches, "test": batches})
    return load_subject(network, dataset, name=name, batch_size=BATCH)


def resident(what: str) -> int:
    """Return a size of this process in bytes: VmRSS, or VmHWM, its peak."""
    found = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def state_beforehand(subject: Subject, probes: list[Probe]) -> tuple[int | None, str]:
    """Return the estimate, and the seconds that it takes."""
    began = time.perf_counter()
    return estimate_memory(subject, probes), f"{time.perf_counter() - began:.1f}"


def count_bytes(subject: Subject, probes: list[Probe]) -> tuple[int, str]:
    """Return the peak of tensors and arrays, and how measuring ended."""
    ended: list[str] = []
    peak = peak_bytes(lambda: ended.extend(m.status for m in measure(subject, probes)), subject.device, arrays=True)
    return peak, max(ended)


def count_resident(subject: Subject, probes: list[Probe]) -> tuple[int, str]:
    """Return the rise of the resident memory, and how measuring ended."""
    loss = subject.logits(subject.example.repeat(4, 1, 1, 1)).sum()
    torch.autograd.grad(loss, list(subject.network.parameters()), allow_unused=True)  # code is read into memory, too
    del loss
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = resident("VmRSS")
    ended = max(found.status for found in measure(subject, probes))
    return resident("VmHWM") - before, ended


def fork(
    call: Callable[[Subject, list[Probe]], tuple[Any, str]], subject: Subject, probes: list[Probe]
) -> tuple[Any, str]:
    """Call in a process of its own; the first one must not differentiate, since threads of autograd do not fork."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(call(subject, probes)))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(PATIENCE) else (0, "too slow")
    except EOFError:
        return 0, "died"
    finally:
        process.kill()
        process.join()


def compare(subject: Subject, label: str, probes: list[Probe], resident_too: bool) -> str:
    """Return the row of these probes."""
    estimate, seconds = fork(state_beforehand, subject, probes)
    counted, ended = fork(count_bytes, subject, probes)
    risen, _ = fork(count_resident, subject, probes) if resident_too else (0, "")
    cells = [subject.name, label, *_beside(estimate, counted), *(_beside(estimate, risen) if resident_too else ())[1:]]
    return f"| {' | '.join([*cells, ended, seconds])} |"


def _beside(estimate: int | None, found: int) -> tuple[str, str, str]:
    """Return megabytes estimated and found, and their ratio."""
    if estimate is None:
        return "unknown", f"{found / 1e6:.1f}", ""
    return f"{estimate / 1e6:.1f}", f"{found / 1e6:.1f}", f"{estimate / max(1, found):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--only", default="")
    parser.add_argument("--resident", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [name for name in given.only.split(",") if name]
    for name in given.networks:
        subject = open_network(name, IMAGES)
        probes = [kind.model_validate(SETTINGS.get(key, {})) for key, kind in known_probes().items()]
        probes = [p for p in probes if find_obstacle(p, subject) is None and (not wanted or p.name in wanted)]
        if not wanted:
            shared = [probe for probe in probes if isinstance(probe, StreamingProbe)]
            print(compare(subject, "shared pass", shared, given.resident), flush=True)
        for probe in probes:
            print(compare(subject, probe.name, [probe], given.resident), flush=True)


if __name__ == "__main__":
    main()
