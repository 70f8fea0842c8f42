"""Attention maps of all images at once, kept whole in float64, and what may see what by another route: loops."""

from __future__ import annotations

import numpy as np
import torch

from vitclinic.anatomy import AttentionMap, record_attention
from vitclinic.probes import Subject


def stored_maps(subject: Subject) -> dict[str, AttentionMap]:
    """The maps of each attention unit for all images in one batch."""
    maps: dict[str, AttentionMap] = {}
    units = [unit for unit in subject.anatomy.units if unit.attention]
    images = torch.cat([batch.images for batch in subject.batches()])
    with record_attention(units, lambda seen: maps.__setitem__(seen.unit.name, seen)), torch.no_grad():
        subject.network.eval()(images)
    return maps


def whole_grid(seen: AttentionMap) -> np.ndarray:
    """A windowed map without prefix tokens as one over the whole grid, [B, H, N, N]; places of padding left out."""
    weights, places = seen.weights.double().numpy(), seen.positions().tolist()
    images = len(weights) // len(places)
    tokens = seen.grid[0] * seen.grid[1]
    full = np.zeros((images, weights.shape[1], tokens, tokens))
    for image in range(images):
        for window, cells in enumerate(places):
            for q, (row, column) in enumerate(cells):
                for k, (other_row, other_column) in enumerate(cells):
                    if row >= 0 and other_row >= 0:
                        i, j = row * seen.grid[1] + column, other_row * seen.grid[1] + other_column
                        full[image, :, i, j] = weights[image * len(places) + window, :, q, k]
    return full


def distances(grid: tuple[int, int]) -> np.ndarray:
    """|p_i - p_j|_1 with rows and columns in [0, 1], by loops, [N, N]."""
    height, width = grid
    places = [(r / max(1, height - 1), c / max(1, width - 1)) for r in range(height) for c in range(width)]
    return np.array([[abs(a - c) + abs(b - d) for c, d in places] for a, b in places])
