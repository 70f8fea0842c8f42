"""CKA of all pairs of units beside torch-cka: seconds in turns, their ratio, and how far the numbers are apart.

    pip install --no-deps torch-cka matplotlib contourpy cycler fonttools kiwisolver pyparsing python-dateutil tqdm
    PYTHONPATH=src python benchmarks/cka.py [--model vit_tiny_patch16_224] [--batch 64] [--batches 2] [--rounds 3]

A timm network of random weights, smooth random images of its size, one thread. Both sides get the same batches as
mini-batches, and the same features: torch-cka, which reads the outputs of modules, gets one identity for each of our
units, and its features without a copy. It calls the network twice for a batch, once for each side of the comparison,
and builds the graph of a backward pass, which is part of its time as it is used; `--no-grad` spares it the graph. A
plain forward pass over the same images is timed as well, and both results are held against ours in float64.

Expected: the work beside the forward passes that each side makes (one and two for a batch) at least 5 times faster. The
ratio of the whole is bounded by theirs to one forward pass: it grows with the mini-batch. torch-cka's products are float32, of features that are not centred, and lose two or
three digits more than ours; of white noise, whose features differ little beside their mean, they give NaN.
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
from vitclinic.probes import cka_between
from vitclinic.probes.features.cka import features_of


class Exposed(nn.Module):
    """A network with one identity for each unit, through which the unit's features pass."""

    def __init__(self, network: nn.Module, images: Tensor) -> None:
        super().__init__()
        self.network = network
        self.anatomy = Anatomy.of(network, images)
        self.states = nn.ModuleList(nn.Identity() for _ in self.anatomy.units)

    def forward(self, images: Tensor) -> Any:
        def expose(at: int, activation: Tensor) -> None:
            self.states[at](features_of(self.anatomy, self.anatomy.units[at].output, activation))

        sites = {at: unit.output for at, unit in enumerate(self.anatomy.units)}
        with stream(sites, expose, grad=torch.is_grad_enabled()):
            return self.network(images)


def smooth_images(count: int, channels: int, height: int, width: int) -> Tensor:
    return nn.functional.interpolate(torch.rand(count, channels, 4, 4), (height, width), mode="bilinear")


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


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
    exposed = Exposed(network, batches[0])
    layers = [f"states.{at}" for at in range(len(exposed.states))]
    loader = DataLoader(TensorDataset(torch.cat(batches)), batch_size=arguments.batch)

    def plain() -> None:
        with torch.no_grad():
            for images in batches:
                network(images)

    def ours() -> Any:
        return cka_between(network, network, batches).cka

    def theirs() -> Any:
        peer = torch_cka.CKA(exposed, exposed, model1_layers=layers, model2_layers=layers)
        with torch.no_grad() if arguments.no_grad else nullcontext():
            peer.compare(loader)
        return peer.export()["CKA"].detach().numpy()

    seconds: dict[str, list[float]] = {"forward pass": [], "vitclinic": [], "torch-cka": []}
    found: dict[str, Any] = {}
    plain()
    for _ in range(arguments.rounds):
        for name, work in zip(seconds, (plain, ours, theirs), strict=True):
            taken, found[name] = timed(work)
            seconds[name].append(taken)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"{arguments.model}, {len(layers)} units, {arguments.batches} mini-batches of {arguments.batch}")
    for name, times in seconds.items():
        print(f"{name}: {medians[name]:.2f} s (rounds: {', '.join(f'{taken:.2f}' for taken in times)})")
    forward, our, their = medians.values()
    print(f"torch-cka / vitclinic: {their / our:.1f}")
    print(f"beside the forward passes: {(their - 2 * forward) / max(our - forward, 1e-9):.1f}")
    print(f"vitclinic / forward pass: {our / forward:.2f}")
    exact = cka_between(network.double(), network, batches).cka
    for name in ("vitclinic", "torch-cka"):
        print(f"largest error of {name}: {np.abs(found[name] - exact).max():.1e}")


if __name__ == "__main__":
    main()
