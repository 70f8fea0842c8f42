"""The plane in which a training moved most, and its course in that plane [Li et al. 2018, sec. 7].

With D_t = w_t - w for the weights w_t after each kept epoch and w where the plane is to be centred, the directions are
the leading right singular vectors of the matrix whose rows are the D_t. That has a column for every weight; its
singular values, and how the vectors are made of its rows, come from the small Gram matrix D_s . D_t:

    G = U diag(s^2) U^T        d_k = sum_t U_tk D_t / s_k        share of the motion: s_k^2 / sum s^2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitclinic.probes.curvature.directions import Direction
from vitclinic.probes.curvature.surface import LossSurface
from vitclinic.probes.probe import DoesNotApply
from vitclinic.probes.subject import Subject

Read = Callable[[], Direction]
"""Reads one D_t."""

_ADVICE = "train with checkpoint.keep_epochs=[0,1,2,...]"
_ROUNDING = 1e-12
"""A share below this is rounding in the Gram matrix, and no direction."""


@dataclass(frozen=True)
class Principal:
    """Orthonormal directions, in the order of how much of the motion they hold."""

    directions: list[Direction]
    shares: NDArray[np.float64]
    """Of sum |D_t|^2, for each direction."""


@torch.no_grad()
def principal_directions(displacements: Sequence[Read], count: int, memory: int) -> Principal:
    """Up to `count` leading directions of some displacements: fewer where these span fewer.

    As many displacements as `memory` bytes hold are read once for the Gram matrix, others again for each such group.
    A direction's sign is that which makes the largest of its coordinates positive.
    """
    gram = _gram(displacements, memory)
    squares, u_tk = np.linalg.eigh(gram)
    squares, u_tk = squares[::-1], u_tk[:, ::-1]
    total = float(np.trace(gram))
    found = min(count, int((squares > _ROUNDING * total).sum())) if total > 0 else 0
    signs = np.sign(u_tk[np.abs(u_tk).argmax(axis=0), np.arange(len(gram))])
    coefficients = (u_tk * signs)[:, :found] / np.sqrt(squares[:found])
    shares = squares[:found] / total if found else np.zeros(0)
    return Principal(_combined(displacements, coefficients), shares)


def _combined(displacements: Sequence[Read], coefficients: NDArray[np.float64]) -> list[Direction]:
    """sum_t c_tk D_t for each k, summed in float64."""
    sums: list[list[Tensor]] = []
    for row, read in zip(coefficients, displacements, strict=True):
        parts = read()
        if not sums:
            sums = [[torch.zeros_like(part, dtype=torch.float64) for part in parts] for _ in row]
        for direction, coefficient in zip(sums, row, strict=True):
            for into, part in zip(direction, parts, strict=True):
                into.add_(part.double(), alpha=float(coefficient))
    return [[into.to(part.dtype) for into, part in zip(direction, parts, strict=True)] for direction in sums]


@torch.no_grad()
def coordinates(displacements: Sequence[Read], directions: Sequence[Direction]) -> NDArray[np.float64]:
    """Of the point of the directions' plane that is nearest to each displacement, [t, k]."""
    among = np.array([[_dot(one, other) for other in directions] for one in directions])
    rows = (read() for read in displacements)
    along = np.array([[_dot(row, direction) for direction in directions] for row in rows])
    return along @ np.linalg.pinv(among, hermitian=True)


def displacements(subject: Subject, surface: LossSurface) -> dict[float, Read]:
    """From the present weights of a surface to those after each kept epoch of its network's training."""
    past = None if subject.training is None else subject.training.past
    if past is None:
        raise DoesNotApply(f"only a run has weights of several epochs; {_ADVICE}, and examine its directory.")
    if not past.weights:
        raise DoesNotApply(f"the run's checkpoints are not kept; {_ADVICE}.")
    home = {name: p.detach().clone() for name, p in surface.parameters.items()}

    def read(epoch: float) -> Direction:
        stored = past.weights[epoch]()
        return [stored[name].to(weight) - weight for name, weight in home.items()]

    return {epoch: partial(read, epoch) for epoch in past.weights}


def _gram(displacements: Sequence[Read], memory: int) -> NDArray[np.float64]:
    count = len(displacements)
    gram = np.zeros((count, count))
    at = 0
    while at < count:
        held = [displacements[at]()]
        size = sum(part.nbytes for part in held[0])
        gram[at, at] = _dot(held[0], held[0])
        for other in range(at + 1, count):
            row = displacements[other]()
            for index, kept in enumerate(held, start=at):
                gram[index, other] = gram[other, index] = _dot(kept, row)
            if len(held) == other - at and (len(held) + 1) * size <= memory:
                held.append(row)
                gram[other, other] = _dot(row, row)
        at += len(held)
    return gram


def _dot(one: Direction, other: Direction) -> float:
    return sum(float(a.double().flatten() @ b.double().flatten()) for a, b in zip(one, other, strict=True))
