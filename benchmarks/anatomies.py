"""Which networks can be examined and treated: every network of the zoo, column by column, yes or no with the reason.

    PYTHONPATH=src:. python benchmarks/anatomies.py [--only 'timm/*'] [--limit 60]

Writes docs/results/anatomies.json after every network and docs/results/anatomies.md from it; nothing in them is edited
by hand. Interrupted, the same command goes on: a row is measured again only if vitclinic has changed since.

  anatomy     the units that `Anatomy.of` finds, by a family or by observation
  features    every unit's output is read, on its grid where it has one; after = before + branch to 1e-5
  attention   the maps of all msa units that have one; rows sum to 1
  lesion      every removable unit: without it the output differs, with it again it is the same bit for bit
  curvature   a Hessian-vector product is finite and not zero
  treatments  how many treatments of the network's parts fit: a forward and a backward pass of the treated network
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from tests.anatomy.zoo import ZOO, Entry
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import vitclinic
from vitclinic._core.io import fingerprint, write_json, write_text
from vitclinic.anatomy import Anatomy, double_differentiable, record_attention, stream, taps
from vitclinic.data import ImageSpec
from vitclinic.treatments import PatchDiversity

Cell = dict[str, Any]
"""`yes` (None: does not apply) and a `note`: what was found, or why not."""

ROOT = Path(__file__).parent.parent
COMMAND = "PYTHONPATH=src:. python benchmarks/anatomies.py"
RESULTS = ROOT / "docs" / "results" / "anatomies.json"
COLUMNS = ("anatomy", "features", "attention", "lesion", "curvature")
TREATMENTS = (
    *("context_broadcasting", "squeeze_excitation", "extra_block", "patch_diversity", "talking_heads", "uniform_heads"),
    *("no_softmax", "local_attention", "gap_head", "conv_stem", "relu_activation", "ffn_variant", "registers"),
)
PARTS = ("skip", "branch", "total")
TOLERANCE = 1e-5
NO_ANATOMY = "no anatomy"


class DoesNotApplyError(Exception):
    """The network does not have what a column is about."""


def answer(network: nn.Module, images: Tensor, grad: bool = False) -> Tensor:
    """Return all that the network returns as one tensor [B, values], whichever way it returns it."""
    torch.manual_seed(0)  # some encoders draw an order of patches
    with torch.set_grad_enabled(grad):
        output = network(images)
    plain = vars(output) if dataclasses.is_dataclass(output) and not isinstance(output, dict) else output
    return torch.cat([leaf.flatten(1) for leaf in tree_leaves(plain) if isinstance(leaf, Tensor)], dim=1)


def differs(actual: Tensor, expected: Tensor) -> bool:
    """Tell whether two tensors differ by more than rounding, relative to the largest value."""
    return not bool((actual - expected).abs().max() <= TOLERANCE * expected.abs().max())


def count_units(anatomy: Anatomy) -> str:
    """Return the family and how many units of each kind there are."""
    kinds = Counter(unit.kind for unit in anatomy.units)
    if not kinds.keys() - {"stem", "position", "head"}:
        raise ValueError("nothing but a stem and a head was found")
    return f"{anatomy.family}: " + ", ".join(f"{number} {kind}" for kind, number in kinds.items())


def read_features(anatomy: Anatomy, network: nn.Module, images: Tensor) -> str:
    """Read every unit's output on its grid, check every residual, and return the grids."""
    grids: dict[str, None] = {}  # in order
    outputs = {unit.name: unit.output for unit in anatomy.units}
    residuals = {unit.name: unit.residual for unit in anatomy.units if unit.residual is not None}
    parts = {(name, part): getattr(sites, part) for name, sites in residuals.items() for part in PARTS}

    def note(name: str, activation: Tensor) -> None:
        if not activation.isfinite().all():
            raise ValueError(f"the output of {name} is not finite")
        if outputs[name].layout.spatial:
            _, _, rows, columns = anatomy.grid(outputs[name], activation).shape
            grids[f"{rows}x{columns}"] = None

    with stream(outputs, note), taps(parts) as seen:
        answer(network, images)
    for name in residuals:
        skip, branch, total = (seen[name, part].flatten() for part in PARTS)
        if differs(skip + branch, total):
            raise ValueError(f"after {name} is not before + branch")
    if not grids:
        raise ValueError("no unit has a grid")
    return " ".join(grids)


def refuse_attention(found: list[Anatomy]) -> str:
    """Check that no map is claimed for an architecture that has none."""
    if claimed := [unit.name for anatomy in found for unit in anatomy.units if unit.attention is not None]:
        raise ValueError(f"the architecture has no softmax over tokens, yet {claimed[0]} is said to have a map")
    raise DoesNotApplyError("no softmax over tokens")


def read_attention(anatomy: Anatomy, network: nn.Module, images: Tensor) -> str:
    """Record the maps, check that their rows sum to 1, and return how many units have one."""
    units = anatomy.of_kind("msa")
    mapped = [unit for unit in units if unit.attention is not None]
    if not mapped:
        raise ValueError(f"none of its {len(units)} msa units has a map" if units else "no msa unit was found")
    rows: dict[str, Tensor] = {}
    with record_attention(mapped, lambda seen: rows.__setitem__(seen.unit.name, seen.weights.sum(-1))):
        answer(network, images)
    for name, sums in rows.items():
        if differs(sums, torch.ones_like(sums)):
            raise ValueError(f"rows of {name} sum to {float(sums.min()):.3g} at the least")
    return f"{len(rows)} of {len(units)}"


def remove_units(anatomy: Anatomy, network: nn.Module, images: Tensor) -> str:
    """Remove every unit that can be removed, one by one, and return how many those are."""
    whole = answer(network, images)
    removable = [unit for unit in anatomy.units if unit.removal is not None]
    if not removable:
        raise ValueError("no unit can be removed")
    for unit in removable:
        with anatomy.remove(unit):
            without = answer(network, images)
        if not differs(without, whole):
            raise ValueError(f"removing {unit.name} changes nothing")
        if not torch.equal(answer(network, images), whole):
            raise ValueError(f"after {unit.name} was removed the output does not come back")
    return f"{len(removable)} of {len(anatomy.units)}"


def measure_curvature(network: nn.Module, images: Tensor) -> str:
    """Take one Hessian-vector product of a cross-entropy, and return its norm."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    with double_differentiable():
        outputs = answer(network, images, grad=True)
        loss = F.cross_entropy(outputs, torch.arange(len(outputs)))
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
        slope = sum((g * torch.randn_like(g)).sum() for g in gradients)
        product = torch.autograd.grad(slope, parameters, materialize_grads=True)
    norm = float(torch.stack([part.norm() for part in product]).norm())
    if not 0 < norm < float("inf"):
        raise ValueError(f"the Hessian-vector product has norm {norm}")
    return f"{norm:.1e}"


def apply_treatment(entry: Entry, name: str) -> str:
    """Treat the network and run it forward and backward."""
    network, images = entry.build(), entry.images()
    channels, *size = entry.image
    diversity = patch_targets = None
    if name == "patch_diversity":  # changes training, not the network
        diversity = PatchDiversity(network, classes=10, size=tuple(size))
        images, _, patch_targets = diversity.mix(images, torch.arange(len(images)))
    else:
        network = vitclinic.treat(network, name, spec=ImageSpec(10, channels, tuple(size)))
    outputs = answer(network.train(), images, grad=True)
    losses = diversity(patch_targets).values() if diversity else ()
    (F.cross_entropy(outputs, torch.arange(len(outputs))) + sum(losses)).backward()
    if not any(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in network.parameters()):
        raise ValueError("no gradient reaches the treated network")
    return "fits"


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise a TimeoutError if the block takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def attempt(limit: int, measure: Callable[..., str], *arguments: Any) -> Cell:
    """Return what `measure` finds, or the first line of its error."""
    try:
        with time_limit(limit):
            return {"yes": True, "note": measure(*arguments)}
    except DoesNotApplyError as error:
        return {"yes": None, "note": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this cell's reason
        line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        known = isinstance(error, ValueError | vitclinic.VitclinicError | TimeoutError) and line
        return {"yes": False, "note": line if known else f"{type(error).__name__}: {line}".rstrip(": ")}


def measure(entry: Entry, limit: int) -> dict[str, Any]:
    """Return the row of one network."""
    network, images = entry.awake(), entry.images()
    found: list[Anatomy] = []

    def observe() -> str:
        found.append(Anatomy.of(network, images[:1]))
        return count_units(found[0])

    def by_units(read: Callable[..., str]) -> Cell:
        return attempt(limit, read, found[0], network, images) if found else {"yes": False, "note": NO_ANATOMY}

    cells = {
        "anatomy": attempt(limit, observe),
        "features": by_units(read_features),
        "attention": by_units(read_attention) if entry.has_attention else attempt(limit, refuse_attention, found),
        "lesion": by_units(remove_units),
        "curvature": attempt(limit, measure_curvature, network, images),
    }
    treated = {name: attempt(limit, apply_treatment, entry, name) for name in TREATMENTS}
    return {"library": entry.library, "notes": entry.notes, "cells": cells, "treatments": treated}


def short(text: str, length: int = 110) -> str:
    """Return text for a cell of a table, cut to a length."""
    return textwrap.shorten(text, length, placeholder=" ...").replace("|", "\\|").replace("<", "&lt;")


def share(cells: list[Cell]) -> str:
    """Return `yes of all (percent)` of the cells that apply."""
    verdicts = [cell["yes"] for cell in cells if cell["yes"] is not None]
    return f"{sum(verdicts)} of {len(verdicts)} ({sum(verdicts) / len(verdicts):.0%})" if verdicts else "-"


def row_of(name: str, row: dict[str, Any]) -> str:
    """Return one network's line of the table."""
    marks = {True: "yes", False: "**no**", None: "-"}
    cells = row["cells"]
    reasons = {cells[column]["note"]: column for column in reversed(COLUMNS) if cells[column]["yes"] is False}
    units = short(cells["anatomy"]["note"]) if cells["anatomy"]["yes"] else marks[False]
    fits = sum(cell["yes"] for cell in row["treatments"].values())
    why = "; ".join(f"{column}: {short(note)}" for note, column in reversed(reasons.items()) if note != NO_ANATOMY)
    return f"| {name} | {units} | {' | '.join(marks[cells[c]['yes']] for c in COLUMNS[1:])} | {fits} | {why} |"


def page(results: dict[str, Any]) -> str:
    """Return the Markdown page of all rows."""
    rows = results["networks"]
    libraries = dict.fromkeys(row["library"] for row in rows.values())
    groups = {library: [row for row in rows.values() if row["library"] == library] for library in libraries}
    groups["all"] = list(rows.values())
    older = sum(row["code"] != results["code"] for row in rows.values())
    lines = ["# Which networks can be examined and treated?", ""]
    lines += [f"`{COMMAND}`, {results['date']}; nothing on this page is edited by hand, all reasons are in"]
    lines += [f"[anatomies.json](anatomies.json). {len(rows)} of the zoo's {len(ZOO)} networks, small, random weights."]
    lines += [f"{older} rows were measured with an earlier version of vitclinic."] if older else []
    lines += ["", "```text", textwrap.dedent(__doc__[__doc__.index("  anatomy ") :]).strip(), "```"]
    lines += ["", "| | networks | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---|" * len(COLUMNS)]
    for group, members in groups.items():
        shares = [share([row["cells"][column] for row in members]) for column in COLUMNS]
        lines.append(f"| {group} | {len(members)} | {' | '.join(shares)} |")
    lines += ["", "| treatment | " + " | ".join(groups) + " |", "|---|" + "---|" * len(groups)]
    for name in TREATMENTS:
        shares = [share([row["treatments"][name] for row in members]) for members in groups.values()]
        lines.append(f"| {name} | {' | '.join(shares)} |")
    lines += ["", f"| network | {' | '.join(COLUMNS)} | treatments of {len(TREATMENTS)} | why not |", "|---" * 8 + "|"]
    return "\n".join([*lines, *(row_of(name, row) for name, row in rows.items())]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="networks with a name like this, such as 'timm/vit_*'")
    parser.add_argument("--limit", type=int, default=60, help="seconds a cell may take")
    options = parser.parse_args()
    torch.set_num_threads(1)
    code = fingerprint([path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))])[:12]
    rows = json.loads(RESULTS.read_text())["networks"] if RESULTS.is_file() else {}
    for name, entry in ZOO.items():
        if not fnmatch(name, options.only) or rows.get(name, {}).get("code") == code:
            continue
        started = time.perf_counter()
        rows[name] = {"code": code, **measure(entry, options.limit)}
        print(row_of(name, rows[name]), f"{time.perf_counter() - started:.0f} s", flush=True)
        ordered = {known: rows[known] for known in ZOO if known in rows}
        results = {"date": time.strftime("%Y-%m-%d"), "code": code, "networks": ordered}
        write_json(RESULTS, results)
        write_text(RESULTS.with_suffix(".md"), page(results))


if __name__ == "__main__":
    main()
