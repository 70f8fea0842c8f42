"""How often Lanczos takes other eigenvalues for the largest, by the rule it has and by errors alone.

    python benchmarks/missed_eigenvalues.py CIFAR10 TARGET... [--starts 1000] [--seed 1] [--images 16] [--top 5 1]

What an iteration does depends on the spectrum and on how much of each eigenvector its start has. The spectrum is that
of TARGET's loss, as nodes of a quadrature (120 products); of the 40 nodes of largest magnitude a start has a random
share, as a random vector would, of the others that of the quadrature. `errors alone` stops as soon as the estimated
errors of the values at hand are small. Wrong is an answer that is called converged and has a value more than 1e-3 or
1e-2 off, relatively.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from vitclinic.data import evaluation_batches
from vitclinic.exam import Examination
from vitclinic.probes.curvature.hessian import Hessian
from vitclinic.probes.curvature.lanczos import Ritz, largest_eigenpairs, quadrature
from vitclinic.probes.curvature.loss_surface import LossSurface

TOLERANCE, RANDOM = 1e-3, 40


def spectrum(target: str, data: str, images: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Nodes in descending magnitude, their weights, and the number of parameters."""
    subject = Examination(data, device="cpu", random_weights="@" not in target).open(target)
    batch = next(evaluation_batches(subject.dataset, "train", images))
    surface = LossSurface(subject.network.eval(), [batch])
    with surface.gradient_mode():
        start = torch.randn(surface.size, generator=torch.Generator().manual_seed(0))
        nodes, weights = quadrature(Hessian(surface).product, start, 120)
    order = np.argsort(-np.abs(nodes))
    return nodes[order], weights[order], surface.size


def answers(nodes: np.ndarray, start: torch.Tensor, top: int) -> dict[str, tuple[int, float]]:
    """(products, largest relative error) by rule."""
    matrix, exact = torch.from_numpy(nodes), nodes[:top]
    found: dict[str, tuple[int, float]] = {}

    def note(rule: str, products: int, values: np.ndarray) -> None:
        found.setdefault(rule, (products, float(np.max(np.abs(values - exact) / np.abs(exact)))))

    def watch(products: int, ritz: Ritz) -> bool:
        if products > top and (ritz.errors <= TOLERANCE * np.abs(ritz.values)).all():
            note("errors alone", products, ritz.values)
        return True

    ended = largest_eigenpairs(lambda v: matrix * v, start, top, tolerance=TOLERANCE, go_on=watch)
    note("as it is", ended.products, ended.values)
    note("errors alone", ended.products, ended.values)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--starts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--top", type=int, nargs="+", default=[5, 1])
    options = parser.parse_args()
    print("network | values | rule | products | off by > 1e-3 | > 1e-2")
    for target in options.targets:
        nodes, weights, size = spectrum(target, options.data, options.images)
        for top in options.top:
            random = np.random.default_rng(options.seed)
            found = []
            for _ in range(options.starts):
                shares = weights.copy()
                shares[:RANDOM] = random.chisquare(1, RANDOM) / size
                found.append(answers(nodes, torch.from_numpy(np.sqrt(shares)), top))
            for rule in ("errors alone", "as it is"):
                products, errors = np.array([answer[rule] for answer in found]).T
                print(
                    f"{target.rpartition('/')[2]} | {top} | {rule} | {products.mean():.1f}"
                    f" | {(errors > 1e-3).sum()} | {(errors > 1e-2).sum()} of {len(found)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
