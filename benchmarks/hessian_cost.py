"""What a Hessian-vector product costs: time against parameters and against batches, and memory.

    python benchmarks/hessian_cost.py CIFAR10 [--rounds 5]

Networks are ViTs of depth 6 and patch 4 for 32 x 32 images, of growing width, with random weights; a batch has 16
images. Time is the median of single products from kept graphs, the networks taking turns; beside it that of one
forward and backward pass. Memory is that of the tensors alive at one time (`footprint`) while `largest_eigenpairs`
makes a basis of 20 vectors, beside what the kept graphs and the vectors need.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitclinic.data import Batch, evaluation_batches, open_data
from vitclinic.probes.cost import peak_bytes
from vitclinic.probes.curvature.hessian import Hessian
from vitclinic.probes.curvature.lanczos import largest_eigenpairs
from vitclinic.probes.curvature.loss_surface import LossSurface

WIDTHS = (48, 96, 192, 336, 528)
BATCHES = (1, 2, 4, 8, 16)
BASIS = 20


def vit(width: int) -> nn.Module:
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=32, patch_size=4, embed_dim=width, depth=6, num_heads=width // 16, num_classes=10
    ).eval()


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def against_parameters(batch: Batch, rounds: int) -> None:
    print("parameters  product  backward  product / backward  product per million parameters")
    surfaces = [LossSurface(vit(width), [batch]) for width in WIDTHS]
    hessians = [Hessian(surface) for surface in surfaces]
    vectors = [torch.randn(surface.size) for surface in surfaces]
    times: list[list[tuple[float, float]]] = [[] for _ in WIDTHS]
    for turn in range(rounds + 1):
        for surface, hessian, vector, seen in zip(surfaces, hessians, vectors, times, strict=True):
            with surface.gradient_mode():
                pair = (timed(lambda h=hessian, v=vector: h.product(v)), timed(surface.gradient))
            if turn:  # the first product makes the graph
                seen.append(pair)
    for surface, seen in zip(surfaces, times, strict=True):
        product, backward = (statistics.median(part) for part in zip(*seen, strict=True))
        millions = surface.size / 1e6
        print(
            f"{millions:<7.2f} M   {product:<8.4f} {backward:<9.4f} {product / backward:<19.2f}"
            f" {product / millions:.4f}",
            flush=True,
        )


def against_batches(batches: list[Batch], rounds: int) -> None:
    print("batches  product (kept)  per batch  product (recomputed)  per batch")
    network = vit(96)
    for count in BATCHES:
        surface = LossSurface(network, batches[:count])
        vector = torch.randn(surface.size)
        kept, recomputed = Hessian(surface), Hessian(surface, memory=0)
        with surface.gradient_mode():
            kept.product(vector)
            pairs = [
                (timed(lambda h=kept, v=vector: h.product(v)), timed(lambda h=recomputed, v=vector: h.product(v)))
                for _ in range(rounds)
            ]
        a, b = (statistics.median(part) for part in zip(*pairs, strict=True))
        print(f"{count:<8} {a:<15.3f} {a / count:<10.4f} {b:<21.3f} {b / count:.4f}", flush=True)


def memory(batches: list[Batch]) -> None:
    print("batches  kept graphs  basis   peak    peak / (graphs + basis)  peak when recomputing")
    network = vit(96)
    for count in BATCHES[:4]:
        surface = LossSurface(network, batches[:count])
        basis = (BASIS + 1) * surface.size * 4
        peaks = []
        graphs = 0
        for bound in (None, 0):
            hessian = Hessian(surface, memory=bound)

            def eigenvalues(surface: LossSurface = surface, hessian: Hessian = hessian) -> None:
                with surface.gradient_mode():
                    start = torch.randn(surface.size)
                    largest_eigenpairs(hessian.product, start, 5, tolerance=0.0, max_products=BASIS)
                    nonlocal graphs
                    graphs = max(graphs, hessian.graph_bytes)
                    hessian.release()

            peaks.append(peak_bytes(eigenvalues, torch.device("cpu")))
        print(
            f"{count:<8} {graphs / 1e6:<8.1f} MB  {basis / 1e6:<4.0f} MB {peaks[0] / 1e6:<5.1f} MB"
            f" {peaks[0] / (graphs + basis):<24.3f} {peaks[1] / 1e6:.1f} MB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    stream = evaluation_batches(open_data(options.data), "train", 16)
    batches = [next(stream) for _ in range(max(BATCHES))]
    against_parameters(batches[0], options.rounds)
    against_batches(batches, options.rounds)
    memory(batches)


if __name__ == "__main__":
    main()
