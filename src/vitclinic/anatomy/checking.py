"""What a family says about a network, held against a real forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitclinic.anatomy.eager import evaluating
from vitclinic.anatomy.sites import Layout, Site, Size, watch
from vitclinic.anatomy.taps import taps
from vitclinic.anatomy.units import Unit
from vitclinic.errors import AnatomyError


@torch.no_grad()
def checked_grids(network: nn.Module, units: tuple[Unit, ...], example: Tensor) -> dict[Layout, Size]:
    """Run `example` through the network in eval mode, check every unit, and return the grid of each layout.

    Checked: something passes every site, and total = skip + branch for every residual.
    """
    sites: dict[tuple[str, str], Site] = {}
    layouts: set[Layout] = set()
    for unit in units:
        sites[unit.name, "input"], sites[unit.name, "output"] = unit.input, unit.output
        if unit.residual is not None:
            sites |= {(unit.name, part): getattr(unit.residual, part) for part in ("skip", "branch", "total")}
        if unit.attention is not None:
            layouts.add(unit.attention.keys)
    layouts |= {site.layout for site in sites.values()}
    with evaluating(network), _measured(layouts) as grids, taps(sites) as seen:
        network(example)
    for unit in units:
        if unit.residual is not None:
            _check_residual(unit, *(seen[unit.name, part] for part in ("skip", "branch", "total")))
    return grids


def _check_residual(unit: Unit, skip: Tensor, branch: Tensor, total: Tensor) -> None:
    """total = skip + branch; libraries reshape between steps, so only the number of values must agree."""
    tolerance = max(1e-5, 8 * torch.finfo(total.dtype).eps)
    if not total.isfinite().all():
        raise AnatomyError(f"the values after {unit.name} are not finite, so that nothing can be checked or measured.")
    if skip.numel() == branch.numel() == total.numel():
        difference = (total.flatten() - skip.flatten() - branch.flatten()).abs().max()
        if difference <= tolerance * total.abs().max():
            return
        found = f"they differ by {difference:.1e} where values reach {total.abs().max():.1e}"
    else:
        found = f"their shapes are {tuple(total.shape)}, {tuple(skip.shape)} and {tuple(branch.shape)}"
    raise AnatomyError(
        f"in {unit.name} the state after is not the state before plus the branch ({found}), so its family "
        "does not fit this network; register one that does (docs/anatomy.md)."
    )


@contextmanager
def _measured(layouts: set[Layout]) -> Iterator[dict[Layout, Size]]:
    """The size of each layout's grid, from the forward pass inside the context."""
    grids: dict[Layout, Size] = {}

    def note(layout: Layout, site: Site, value: Any) -> None:
        grids[layout] = site.size_of(value)

    seen_at = {layout: layout.grid_at for layout in layouts if layout.grid_at is not None}
    handles = [handle for layout, site in seen_at.items() for handle in watch(site, partial(note, layout, site))]
    try:
        yield grids
    finally:
        for handle in handles:
            handle.remove()
    if unseen := {type(site.module).__name__ for layout, site in seen_at.items() if layout not in grids}:
        raise AnatomyError(f"no grid was seen at {', '.join(sorted(unseen))}, so the family does not fit.")
