"""Top Hessian eigenvalues beside the tools that people use: PyHessian, curvlinops + ARPACK, hessian-eigenthings.

    pip install curvlinops-for-pytorch && pip install --no-deps pyhessian hessian-eigenthings
    python benchmarks/hessian.py CIFAR10 TARGET [--rounds 5] [--images 16] [--top 5]

TARGET is what `vitclinic examine` takes, such as a run directory or timm:@vit.safetensors. Every tool runs at the
loosest of its settings that gives a relative error of at most 1e-3, found beforehand; then they take turns. The
reference is our own iteration in float64 to 1e-10, which tests hold against dense matrices. All attention runs in
its mathematical form, without which second derivatives do not exist. The residual is the largest |H y - value y| /
|value| of a tool's eigenvectors, by float64 products. Memory is that of the tensors alive at one time (`footprint`).
"""

from __future__ import annotations

import argparse
import copy
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitclinic.data import Batch, evaluation_batches
from vitclinic.exam import Examination
from vitclinic.models.cost import peak_bytes
from vitclinic.probes.curvature.hessian import Hessian
from vitclinic.probes.curvature.lanczos import largest_eigenpairs
from vitclinic.probes.curvature.loss_surface import LossSurface

GOAL = 1e-3


@dataclass
class Found:
    values: np.ndarray
    vectors: np.ndarray
    """[k, n]"""
    products: int


@dataclass
class Case:
    network: nn.Module
    batch: Batch
    top: int


def start(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def ours(case: Case, tolerance: float) -> Found:
    surface = LossSurface(case.network, [case.batch])
    with surface.gradient_mode():
        first = start(surface.size, surface.weights[0].dtype)
        found = largest_eigenpairs(Hessian(surface).product, first, case.top, tolerance=tolerance)
    return Found(found.values, found.vectors.numpy(), found.products)


def ours_of_steps(case: Case, steps: float) -> Found:
    """As `ours`, told when to stop with the hindsight that hessian-eigenthings' steps need."""
    surface = LossSurface(case.network, [case.batch])
    with surface.gradient_mode():
        first = start(surface.size, surface.weights[0].dtype)
        found = largest_eigenpairs(Hessian(surface).product, first, case.top, tolerance=0, max_products=int(steps))
    return Found(found.values, found.vectors.numpy(), found.products)


def kept_graph_and_arpack(case: Case, tolerance: float) -> Found:
    surface = LossSurface(case.network, [case.batch])
    with surface.gradient_mode():
        hessian = Hessian(surface)

        def product(vector: np.ndarray) -> np.ndarray:
            return hessian.product(torch.from_numpy(vector.astype(np.float32)).reshape(-1)).numpy()

        operator = LinearOperator((surface.size, surface.size), matvec=product, dtype=np.float32)
        first = start(surface.size, torch.float32).numpy()
        values, vectors = eigsh(operator, k=case.top, which="LM", tol=tolerance, v0=first)
    return Found(values, vectors.T, hessian.products)


def pyhessian(case: Case, tolerance: float) -> Found:
    module = importlib.import_module("pyhessian.hessian")

    data = (case.batch.images, case.batch.targets)
    counted = mock.Mock(wraps=module.hessian_vector_product)
    with mock.patch.object(module, "hessian_vector_product", counted):
        values, vectors = module.hessian(case.network, nn.CrossEntropyLoss(), data=data, cuda=False).eigenvalues(
            maxIter=300, tol=tolerance, top_n=case.top
        )
    case.network.zero_grad()
    flat = np.stack([torch.cat([part.detach().reshape(-1) for part in parts]).numpy() for parts in vectors])
    return Found(np.array(values), flat, counted.call_count)


def curvlinops(case: Case, tolerance: float) -> Found:
    from curvlinops import HessianLinearOperator

    parameters = [p for p in case.network.parameters() if p.requires_grad]
    operator = HessianLinearOperator(
        case.network,
        nn.CrossEntropyLoss(),
        parameters,
        [(case.batch.images, case.batch.targets)],
        check_deterministic=False,
    )
    scipy_operator = operator.to_scipy()
    count = [0]

    def product(vector: np.ndarray) -> Any:
        count[0] += 1
        return scipy_operator @ vector

    counted = LinearOperator(scipy_operator.shape, matvec=product, dtype=scipy_operator.dtype)
    first = start(scipy_operator.shape[0], torch.float32).numpy()
    values, vectors = eigsh(counted, k=case.top, which="LM", tol=tolerance, v0=first)
    return Found(values, vectors.T, count[0])


def eigenthings(case: Case, steps: float) -> Found:
    from hessian_eigenthings import HessianOperator, lanczos, supervised_loss

    data = [(case.batch.images, case.batch.targets)]
    operator = HessianOperator(case.network, data, supervised_loss(nn.CrossEntropyLoss()))
    found = lanczos(operator, k=case.top, max_iter=int(steps), seed=0)
    return Found(found.eigenvalues.numpy(), found.eigenvectors.numpy(), int(steps))


STEPS = (10, 13, 16, 18, 20, 25, 30, 40)
TOLERANCES = (1e-1, 3e-2, 1e-2, 1e-3, 1e-4, 1e-5)
TOOLS: dict[str, tuple[Callable[[Case, float], Found], tuple[float, ...]]] = {
    "vitclinic": (ours, (1.0, 3e-1, 1e-1, 3e-2, 1e-2, 1e-3)),
    "vitclinic, steps given": (ours_of_steps, STEPS),
    "kept graph + ARPACK": (kept_graph_and_arpack, TOLERANCES),
    "pyhessian": (pyhessian, (1e-3, 1e-4)),  # 1e-5 takes minutes
    "curvlinops + ARPACK": (curvlinops, TOLERANCES),
    "hessian-eigenthings": (eigenthings, STEPS),
}


def error(found: Found, exact: np.ndarray) -> float:
    ordered = found.values[np.argsort(-np.abs(found.values))]
    return float(np.max(np.abs(ordered - exact) / np.abs(exact)))


def residual(found: Found, wide: Case) -> float:
    """The largest |H y - value y| / |value|, in float64."""
    surface = LossSurface(wide.network, [wide.batch])
    with surface.gradient_mode():
        hessian = Hessian(surface)
        units = [torch.from_numpy(vector.copy()).double() for vector in found.vectors]
        units = [vector / vector.norm() for vector in units]
        pairs = zip(units, found.values.tolist(), strict=True)
        return max(float((hessian.product(vector) - value * vector).norm()) / abs(value) for vector, value in pairs)


def settings(case: Case, exact: np.ndarray, tools: list[str]) -> Iterator[tuple[str, float, Found]]:
    """(tool, the loosest setting that reaches the goal, or the tightest there is, what it found)."""
    for name, (run, choices) in ((name, TOOLS[name]) for name in tools):
        try:
            for choice in choices:
                found = run(case, choice)
                if error(found, exact) <= GOAL:
                    break
        except ImportError as missing:
            print(f"{name:22s} left out: {missing}")
            continue
        print(f"{name}: {choice:g} has an error of {error(found, exact):.1e}", flush=True)
        yield name, choice, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("target")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--tools", nargs="+", choices=list(TOOLS), default=list(TOOLS), help="vitclinic first")
    options = parser.parse_args()
    subject = Examination(options.data, device="cpu", random_weights="@" not in options.target).open(options.target)
    batch = next(evaluation_batches(subject.dataset, "train", options.images))
    case = Case(subject.network.eval(), batch, options.top)
    wide_batch = Batch(batch.images.double(), batch.targets, batch.indices, batch.keys)
    wide = Case(copy.deepcopy(case.network).double(), wide_batch, options.top)
    exact = ours(wide, 1e-10).values
    size = sum(p.numel() for p in case.network.parameters())
    print(f"{size / 1e6:.2f} M parameters, {len(batch)} images; exact: {exact.round(4).tolist()}", flush=True)
    with sdpa_kernel(SDPBackend.MATH):
        chosen = list(settings(case, exact, options.tools))
        seconds: dict[str, list[float]] = {name: [] for name, *_ in chosen}
        for _ in range(options.rounds):
            for name, choice, _ in chosen:
                started = time.perf_counter()
                TOOLS[name][0](case, choice)
                seconds[name].append(time.perf_counter() - started)
        print("tool                 setting  products  error    residual  seconds  times ours")
        for name, choice, found in chosen:
            ratios = sorted(a / b for a, b in zip(seconds[name], seconds["vitclinic"], strict=True))
            print(
                f"{name:20s} {choice:<8g} {found.products:<9} {error(found, exact):<8.1e} {residual(found, wide):<9.1e}"
                f" {statistics.median(seconds[name]):<8.2f}"
                f" {statistics.median(ratios):<5.2f}({ratios[0]:.2f} to {ratios[-1]:.2f})",
                flush=True,
            )
        for name, choice, _ in chosen:
            memory = peak_bytes(lambda run=TOOLS[name][0], choice=choice: run(case, choice), torch.device("cpu"))
            print(f"{name:20s} {memory / 1e6:.0f} MB at most", flush=True)


if __name__ == "__main__":
    main()
