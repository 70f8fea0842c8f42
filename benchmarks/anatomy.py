"""What taps and attention recording cost, as ratios of a forward pass.

    PYTHONPATH=src python benchmarks/anatomy.py

ViT-Tiny/16 at 224, batch 8, random weights, no gradients, one thread (a second one waits for the first
wherever cores are shared). Four ways of running the same images take turns,
so that whatever else the machine does meets all of them; a ratio is the median over the rounds of the
ratio within a round.
Expected: all taps under 1.02 of a plain forward, all taps at additions under 1.03, all maps under 1.3 of the
unfused forward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import nn

from vitclinic.anatomy import Anatomy, Site, record_attention, stream


def seconds(run: Callable[[], object]) -> float:
    """How long one run takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def unfused(network: nn.Module) -> nn.Module:
    """The network with its attention written out."""
    for module in network.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return network


def sums(network: timm.models.VisionTransformer) -> dict[tuple[int, int], Site]:
    """Both residual sums of every block, as places between modules: the first and second addition in its call."""
    return {(depth, n): Site(block, "sum", addition=n) for depth, block in enumerate(network.blocks) for n in (0, 1)}


def microseconds_per_tap(*, by_place: bool, rounds: int = 200) -> float:
    """What one tap costs, from a network so small that the cost of its taps shows above the noise."""
    small = {"img_size": 32, "patch_size": 16, "embed_dim": 8, "depth": 12, "num_heads": 1}
    network = timm.models.VisionTransformer(**small).eval()
    ends = {unit.name: unit.output for unit in Anatomy.of(network).units}
    sites: dict[Any, Site] = sums(network) if by_place else ends
    image = torch.randn(1, 3, 32, 32)

    def tapped() -> None:
        with stream(sites, lambda name, activation: None):
            network(image)

    differences = [seconds(tapped) - seconds(lambda: network(image)) for _ in range(rounds)]
    return statistics.median(differences) / len(sites) * 1e6


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    network = timm.create_model("vit_tiny_patch16_224").eval()
    plain_network = unfused(timm.create_model("vit_tiny_patch16_224")).eval()
    anatomy = Anatomy.of(network)
    images = torch.randn(arguments.batch, 3, 224, 224)

    def tapped() -> None:
        with stream({unit.name: unit.output for unit in anatomy.units}, lambda name, activation: None):
            network(images)

    def tapped_by_place() -> None:
        with stream(sums(network), lambda name, activation: None):
            network(images)

    def recorded() -> None:
        with record_attention(anatomy.of_kind("msa"), lambda seen: None):
            network(images)

    ways: dict[str, Callable[[], object]] = {
        "fused": lambda: network(images),
        "tapped": tapped,
        "by place": tapped_by_place,
        "unfused": lambda: plain_network(images),
        "recorded": recorded,
    }
    for run in ways.values():
        run()
    rounds = [{name: seconds(run) for name, run in ways.items()} for _ in range(arguments.rounds)]

    def ratio(name: str, base: str) -> str:
        ratios = [times[name] / times[base] for times in rounds]
        low, _, high = statistics.quantiles(ratios, n=4)
        return f"{statistics.median(ratios):.3f} (quartiles {low:.3f} to {high:.3f})"

    plain = statistics.median(times["fused"] for times in rounds)
    print(f"plain forward            {plain * 1e3:.1f} ms")
    print(f"taps on {len(anatomy.units)} units / plain  {ratio('tapped', 'fused')}")
    print(f"taps by place / plain    {ratio('by place', 'fused')}")
    for what, by_place, number in (("at a module", False, len(anatomy.units)), ("by place", True, 24)):
        per_tap = microseconds_per_tap(by_place=by_place)
        share = per_tap * number / plain / 1e4
        print(f"one tap {what:11}      {per_tap:.1f} us, or {share:.2f}% of a plain forward for all {number} of them")
    print(f"recording / unfused      {ratio('recorded', 'unfused')}")
    print(f"recording / plain        {ratio('recorded', 'fused')}")
    print(f"unfused / plain          {ratio('unfused', 'fused')}")


if __name__ == "__main__":
    main()
