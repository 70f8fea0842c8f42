"""CKA of all pairs of units beside torch-cka: seconds in turns, their ratio, and how far each is from float64.

    pip install --no-deps torch-cka matplotlib contourpy cycler fonttools kiwisolver pyparsing python-dateutil tqdm
    PYTHONPATH=src python benchmarks/cka.py [--model vit_tiny_patch16_224] [--batch 64] [--batches 2] [--rounds 3]

A timm network of random weights, smooth random images of its size, one thread. Both sides get the same batches as
mini-batches and the same features, without a copy: torch-cka, which reads the outputs of modules, gets one identity for
each of our units. Timed are the whole, images to matrix, and the comparison alone, features to matrix.

Expected: the comparison at least 5 times faster, as torch-cka makes a Gram matrix for each pair of units, not each
unit. It also calls the network twice for a batch, once for each side, and builds the graph of a backward pass
(`--no-grad` spares it that). The ratio of the whole cannot exceed theirs to one forward pass, and grows with the
mini-batch. Its products are float32, of features that are not centred: digits are lost, and of white noise, whose
features differ little beside their mean, it gives NaN.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import timm
import torch
import torch_cka
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from vitclinic.anatomy import Anatomy, stream
from vitclinic.probes import cka_between, mini_batch_cka
from vitclinic.probes.features.cka import flatten_state


class Shown(nn.Module):
    """One identity for each unit, through which the unit's features pass: from the network, or as they were stored."""

    def __init__(self, network: nn.Module, images: Tensor) -> None:
        super().__init__()
        self.network = network
        self.anatomy = Anatomy.of(network, images)
        self.states = nn.ModuleList(nn.Identity() for _ in self.anatomy.units)
        self.stored: list[list[Tensor]] | None = None

    def features(self, images: Tensor, show: Callable[[int, Tensor], Any]) -> None:
        def read(at: int, activation: Tensor) -> None:
            show(at, flatten_state(self.anatomy, self.anatomy.units[at].output, activation))

        sites = {at: unit.output for at, unit in enumerate(self.anatomy.units)}
        with stream(sites, read, grad=torch.is_grad_enabled()):
            self.network(images)

    def forward(self, images: Tensor) -> None:
        if self.stored is None:
            self.features(images, lambda at, features: self.states[at](features))
        else:
            for state, features in zip(self.states, self.stored[int(images[0])], strict=True):
                state(features)


def smooth_images(count: int, channels: int, height: int, width: int) -> Tensor:
    return nn.functional.interpolate(torch.rand(count, channels, 4, 4), (height, width), mode="bilinear")


def store(shown: Shown, batches: list[Tensor]) -> list[list[Tensor]]:
    stored: list[list[Tensor]] = []
    with torch.no_grad():
        for images in batches:
            seen: dict[int, Tensor] = {}
            shown.features(images, seen.__setitem__)
            stored.append([seen[at] for at in range(len(shown.states))])
    return stored


def peer(shown: Shown, seen: Tensor, batch: int, no_grad: bool) -> Any:
    layers = [f"states.{at}" for at in range(len(shown.states))]
    comparison = torch_cka.CKA(shown, shown, model1_layers=layers, model2_layers=layers)
    with torch.no_grad() if no_grad else nullcontext():
        comparison.compare(DataLoader(TensorDataset(seen), batch_size=batch))
    for state in shown.states:
        state._forward_hooks.clear()  # it leaves its hooks behind
    return comparison.export()["CKA"].detach().numpy()


def in_turns(rounds: int, **works: Callable[[], Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """The median seconds of each, and what it returned."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    found = {}
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            found[name] = work()
            seconds[name].append(time.perf_counter() - start)
    for name, times in seconds.items():
        print(f"  {name}: {statistics.median(times):.2f} s (rounds: {', '.join(f'{taken:.2f}' for taken in times)})")
    return {name: statistics.median(times) for name, times in seconds.items()}, found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-grad", action="store_true", help="spare torch-cka the graph of a backward pass")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = timm.create_model(arguments.model).eval()
    size = network.pretrained_cfg["input_size"]
    batches = [smooth_images(arguments.batch, *size) for _ in range(arguments.batches)]
    shown = Shown(network, batches[0])

    @torch.no_grad()
    def plain() -> None:
        for images in batches:
            network(images)

    print(f"{arguments.model}, {len(shown.states)} units, {len(batches)} mini-batches of {arguments.batch}")
    print("from images:")
    plain()
    seconds, found = in_turns(
        arguments.rounds,
        forward_pass=plain,
        vitclinic=lambda: cka_between(network, network, batches).cka,
        torch_cka=lambda: peer(shown, torch.cat(batches), arguments.batch, arguments.no_grad),
    )
    print(f"  torch-cka / vitclinic: {seconds['torch_cka'] / seconds['vitclinic']:.1f}")
    print(f"  vitclinic / forward pass: {seconds['vitclinic'] / seconds['forward_pass']:.2f}")

    print("from features:")
    shown.stored = store(shown, batches)
    numbers = torch.arange(len(batches)).repeat_interleave(arguments.batch)
    seconds, _ = in_turns(
        arguments.rounds,
        vitclinic=lambda: mini_batch_cka(shown.stored or []),
        torch_cka=lambda: peer(shown, numbers, arguments.batch, arguments.no_grad),
    )
    print(f"  torch-cka / vitclinic: {seconds['torch_cka'] / seconds['vitclinic']:.1f}")

    exact = cka_between(network.double(), network, batches).cka
    for name in ("vitclinic", "torch_cka"):
        print(f"largest error of {name}: {np.abs(found[name] - exact).max():.1e}")


if __name__ == "__main__":
    main()
