"""Top Hessian eigenvalues beside the tools that people use: PyHessian, curvlinops + ARPACK, hessian-eigenthings.

    pip install --no-deps pyhessian curvlinops-for-pytorch hessian-eigenthings
    python benchmarks/hessian.py CIFAR10 TARGET [--rounds 3] [--images 16] [--top 5]

TARGET is what `vitclinic examine` takes, such as a run directory or timm:@vit.safetensors. Every tool runs at the
loosest of its settings that gives a relative error of at most 1e-3, found beforehand; then they take turns. The
reference is our own iteration in float64 to 1e-10, which tests hold against dense matrices. All attention runs in
its mathematical form, without which second derivatives do not exist. Memory is that of the tensors alive at one
time (`footprint`).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitclinic.clinic.targets import resolve
from vitclinic.data import Batch, evaluation_batches, open_data
from vitclinic.probes.curvature.hessian import Hessian
from vitclinic.probes.curvature.lanczos import largest_eigenpairs
from vitclinic.probes.curvature.surface import LossSurface
from vitclinic.probes.footprint import peak_bytes

Values = np.ndarray
GOAL = 1e-3


@dataclass
class Case:
    network: nn.Module
    batch: Batch
    top: int


def start(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def ours(case: Case, tolerance: float) -> tuple[Values, int]:
    surface = LossSurface(case.network, [case.batch])
    with surface.measured():
        first = start(surface.size, surface.weights[0].dtype)
        found = largest_eigenpairs(Hessian(surface).product, first, case.top, tolerance=tolerance)
    return found.values, found.products


def kept_graph_and_arpack(case: Case, tolerance: float) -> tuple[Values, int]:
    surface = LossSurface(case.network, [case.batch])
    with surface.measured():
        hessian = Hessian(surface)

        def product(vector: np.ndarray) -> np.ndarray:
            return hessian.product(torch.from_numpy(vector.astype(np.float32)).reshape(-1)).numpy()

        operator = LinearOperator((surface.size, surface.size), matvec=product, dtype=np.float32)
        first = start(surface.size, torch.float32).numpy()
        values = eigsh(operator, k=case.top, which="LM", tol=tolerance, v0=first, return_eigenvectors=False)
    return values, hessian.products


def pyhessian(case: Case, tolerance: float) -> tuple[Values, int]:
    from pyhessian import hessian

    data = (case.batch.images, case.batch.targets)
    values, _ = hessian(case.network, nn.CrossEntropyLoss(), data=data, cuda=False).eigenvalues(
        maxIter=300, tol=tolerance, top_n=case.top
    )
    case.network.zero_grad()
    return np.array(values), -1


def curvlinops(case: Case, tolerance: float) -> tuple[Values, int]:
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
    return eigsh(counted, k=case.top, which="LM", tol=tolerance, v0=first, return_eigenvectors=False), count[0]


def eigenthings(case: Case, steps: float) -> tuple[Values, int]:
    from hessian_eigenthings import HessianOperator, lanczos, supervised_loss

    data = [(case.batch.images, case.batch.targets)]
    operator = HessianOperator(case.network, data, supervised_loss(nn.CrossEntropyLoss()))
    found = lanczos(operator, k=case.top, max_iter=int(steps), seed=0)
    return found.eigenvalues.numpy(), int(steps)


TOLERANCES = (1e-1, 3e-2, 1e-2, 1e-3, 1e-4, 1e-5)
TOOLS: dict[str, tuple[Callable[[Case, float], tuple[Values, int]], tuple[float, ...]]] = {
    "vitclinic": (ours, (GOAL,)),
    "kept graph + ARPACK": (kept_graph_and_arpack, TOLERANCES),
    "pyhessian": (pyhessian, (1e-3, 1e-4, 1e-5, 1e-6)),
    "curvlinops + ARPACK": (curvlinops, TOLERANCES),
    "hessian-eigenthings": (eigenthings, (10, 13, 16, 20, 25, 30, 40)),
}


def error(values: Values, exact: Values) -> float:
    ordered = values[np.argsort(-np.abs(values))]
    return float(np.max(np.abs(ordered - exact) / np.abs(exact)))


def settings(case: Case, exact: Values) -> Iterator[tuple[str, float, float, int]]:
    """(tool, the loosest setting that reaches the goal, or the tightest there is, its error, its products)."""
    for name, (run, choices) in TOOLS.items():
        try:
            for choice in choices:
                values, products = run(case, choice)
                if error(values, exact) <= GOAL:
                    break
        except ImportError as missing:
            print(f"{name:22s} left out: {missing}")
            continue
        yield name, choice, error(values, exact), products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("target")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--top", type=int, default=5)
    options = parser.parse_args()
    target = resolve(options.target, torch.device("cpu"), random_weights="@" not in options.target)
    batch = next(evaluation_batches(open_data(options.data, size=target.size), "train", options.images))
    case = Case(target.network.eval(), batch, options.top)
    wide = Batch(batch.images.double(), batch.targets, batch.indices, batch.keys)
    exact, _ = ours(Case(copy.deepcopy(case.network).double(), wide, options.top), 1e-10)
    print(
        f"{sum(p.numel() for p in case.network.parameters()) / 1e6:.2f} M parameters; exact:", exact.round(4).tolist()
    )
    with sdpa_kernel(SDPBackend.MATH):
        chosen = list(settings(case, exact))
        memory = {
            name: peak_bytes(lambda run=TOOLS[name][0], choice=choice: run(case, choice), torch.device("cpu"))
            for name, choice, _, _ in chosen
        }
        seconds: dict[str, list[float]] = {name: [] for name, *_ in chosen}
        for _ in range(options.rounds):
            for name, choice, _, _ in chosen:
                started = time.perf_counter()
                TOOLS[name][0](case, choice)
                seconds[name].append(time.perf_counter() - started)
    print("tool                   setting   products   error     seconds   times ours   memory")
    for name, choice, off, products in chosen:
        ratios = [a / b for a, b in zip(seconds[name], seconds["vitclinic"], strict=True)]
        print(
            f"{name:22s} {choice:<9g} {products if products > 0 else '':<10} {off:<9.1e}"
            f" {statistics.median(seconds[name]):<9.2f} {statistics.median(ratios):<12.2f} {memory[name] / 1e6:.0f} MB"
        )


if __name__ == "__main__":
    main()
