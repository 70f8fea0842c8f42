"""Which networks can be examined and treated: every network of the zoo, column by column, yes or no with the reason.

    PYTHONPATH=src:. python benchmarks/anatomies.py [--only 'timm/*'] [--limit 60]

Each network is measured in a process of its own, with a limit of time and of memory. Writes docs/results/anatomies.json
after every network and docs/results/anatomies.md from it; nothing in them is edited by hand. Interrupted, the same
command goes on: what was measured with the code of today is kept.

  anatomy     the units that `Anatomy.of` finds, by a family or by observation
  features    every unit's output is read, finite, on its grid where it has one; after = before + branch to 1e-5
  attention   the maps of all msa units that have one: rows sum to 1, and map x V is what the network computes, to 1e-5
  lesion      every removable unit: without it the state passes as it is (total = skip) and the output differs; with it
              again the output is the same bit for bit
  curvature   a Hessian-vector product is finite and not zero
  treatments  how many treatments fit: two steps of training with finite losses change what was added (or else the
              weights), no other weight is renamed, and the neutral setting leaves the outputs to 1e-5

A **no** is something that vitclinic says or raises. **wrong** is what it does not say: a check that fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import resource
import signal
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tests.anatomy.map_products import Products
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
"""`yes` (None: does not apply), a `note`: what was found, or why not; `wrong` if a check failed."""

ROOT = Path(__file__).parent.parent
COMMAND = "PYTHONPATH=src:. python benchmarks/anatomies.py"
RESULTS = ROOT / "docs" / "results" / "anatomies.json"
COLUMNS = ("anatomy", "features", "attention", "lesion", "curvature")
TREATMENTS: dict[str, tuple[dict[str, Any], ...]] = {
    "context_broadcasting": ({"scaled": True},),
    "squeeze_excitation": ({},),
    "extra_block": ({},),
    "patch_diversity": ({},),
    "talking_heads": ({},),
    "uniform_heads": ({},),
    "no_softmax": ({},),
    "local_attention": ({"kernel": 99}, {"kernel": 3}),
    "gap_head": ({},),
    "conv_stem": ({"hidden": 8},),
    "relu_activation": ({},),
    "ffn_variant": ({},),
    "registers": ({},),
}
"""The options that a treatment is tried with, one after another."""
NEUTRAL = {("context_broadcasting", 0), ("talking_heads", 0), ("local_attention", 0)}
"""Treatments, and which of their options, that leave the outputs as they are."""
REPLACING = ("gap_head", "conv_stem", "ffn_variant", "uniform_heads")
"""Treatments that are there to replace or remove weights."""
PARTS = ("skip", "branch", "total")
TOLERANCE = 1e-5
MEMORY = 10 * 2**30
ROW_LIMIT = 15
"""The time of a row, in those of a cell."""
NO_ANATOMY = "no anatomy"


class DoesNotApplyError(Exception):
    """The network does not have what a column is about."""


class WrongError(Exception):
    """What vitclinic said of the network is not so."""


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
            raise WrongError(f"the output of {name} is not finite")
        if outputs[name].layout.spatial:
            _, _, rows, columns = anatomy.grid(outputs[name], activation).shape
            grids[f"{rows}x{columns}"] = None

    with stream(outputs, note), taps(parts) as seen:
        answer(network, images)
    for name in residuals:
        skip, branch, total = (seen[name, part].flatten() for part in PARTS)
        if differs(skip + branch, total):
            raise WrongError(f"after {name} is not before + branch")
    if not grids:
        raise ValueError("no unit has a grid")
    return " ".join(grids)


def refuse_attention(found: list[Anatomy]) -> str:
    """Check that no map is claimed for an architecture that has none."""
    if claimed := [unit.name for anatomy in found for unit in anatomy.units if unit.attention is not None]:
        raise WrongError(f"the architecture has no softmax over tokens, yet {claimed[0]} is said to have a map")
    raise DoesNotApplyError("no softmax over tokens")


def read_attention(anatomy: Anatomy, network: nn.Module, images: Tensor) -> str:
    """Record the maps, check their rows and what they are multiplied by, and return how many units have one."""
    units = anatomy.of_kind("msa")
    mapped = [unit for unit in units if unit.attention is not None]
    if not mapped:
        raise ValueError(f"none of its {len(units)} msa units has a map" if units else "no msa unit was found")
    with Products() as products, record_attention(mapped, products.expect):
        answer(network, images)
    for name, sums in products.row_sums.items():
        if differs(sums, torch.ones_like(sums)):
            raise WrongError(f"rows of {name} sum to {float(sums.min()):.3g} at the least")
    if unapplied := products.unapplied(TOLERANCE):
        raise WrongError(f"the map of {unapplied[0]} times V is not what the network computes")
    return f"{len(products.row_sums)} of {len(units)}"


def remove_units(anatomy: Anatomy, network: nn.Module, images: Tensor) -> str:
    """Remove every unit that can be removed, one by one, and return how many those are."""
    whole = answer(network, images)
    removable = [unit for unit in anatomy.units if unit.removal is not None]
    if not removable:
        raise ValueError("no unit can be removed")
    for unit in removable:
        silenced = unit.residual is not None and unit.removal is not None and "set to zero" in unit.removal.how
        sites = {"skip": unit.residual.skip, "total": unit.residual.total} if silenced and unit.residual else {}
        with anatomy.remove(unit), taps(sites) as seen:
            without = answer(network, images)
        if sites and differs(seen["total"].flatten(), seen["skip"].flatten()):
            raise WrongError(f"without {unit.name} the state does not pass as it is")
        if not differs(without, whole):
            raise WrongError(f"removing {unit.name} changes nothing")
        if not torch.equal(answer(network, images), whole):
            raise WrongError(f"after {unit.name} was removed the output does not come back")
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
        raise WrongError(f"the Hessian-vector product has norm {norm}")
    return f"{norm:.1e}"


def apply_treatment(entry: Entry, name: str) -> str:
    """Treat the network with each of the options in turn, check it, and train it for two steps."""
    channels, *size = entry.image
    spec = ImageSpec(10, channels, tuple(size))
    for number, options in enumerate(TREATMENTS[name]):
        network, images = entry.awake(), entry.images()
        if name == "patch_diversity":  # changes training, not the network
            train_diversely(network, images, spec)
            continue
        names, before = set(network.state_dict()), answer(network, images)
        treated = vitclinic.treat(network, {name: options}, spec=spec)
        if (name, number) in NEUTRAL and differs(answer(treated, images), before):
            raise WrongError(f"with {options or 'its first weights'} the outputs are not what they were")
        if name not in REPLACING and (renamed := names - set(treated.state_dict())):
            raise WrongError(f"{min(renamed)} has lost its name")
        train(treated, images, lambda: answer(treated, images, grad=True), names)
    return "fits"


def train_diversely(network: nn.Module, images: Tensor, spec: ImageSpec) -> None:
    """Train for two steps with the losses of patch_diversity."""
    diversity = PatchDiversity(network, classes=spec.num_classes, size=spec.img_size)
    mixed, _, targets = diversity.mix(images, torch.arange(len(images)))
    train(
        nn.ModuleList((network, diversity)),
        images,
        lambda: answer(network, mixed, grad=True),
        {f"0.{name}" for name in network.state_dict()},
        lambda: sum(diversity(targets).values(), torch.zeros(())),
    )


def train(
    network: nn.Module,
    images: Tensor,
    forward: Callable[[], Tensor],
    known: set[str],
    losses: Callable[[], Tensor] = lambda: torch.zeros(()),
) -> None:
    """Make two steps of SGD; raise unless losses are finite and what is not `known`, or else any weight, changes."""
    network.train()
    trained = {name: p for name, p in network.named_parameters() if name not in known} or dict(
        network.named_parameters()
    )
    start = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(), torch.arange(len(images))) + losses()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            raise WrongError("the loss is not finite")
    if not all(p.isfinite().all() for p in network.parameters()):
        raise WrongError("a weight is not finite after two steps")
    if all(torch.equal(p, start[name]) for name, p in trained.items()):
        raise WrongError("two steps of training change nothing")


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
    except WrongError as error:
        return {"yes": False, "wrong": True, "note": str(error)}
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
    notes = list(found[0].notes) if found else []
    treated = {name: attempt(limit, apply_treatment, entry, name) for name in TREATMENTS}
    return {"library": entry.library, "notes": notes, "cells": cells, "treatments": treated}


def measure_apart(entry: Entry, limit: int) -> dict[str, Any]:
    """Return the row of one network, measured in a process that may take so much time and memory and no more."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_send_row, args=(entry, limit, there))
    process.start()
    there.close()
    try:
        if here.poll(ROW_LIMIT * limit):
            row: dict[str, Any] = here.recv()
            return row
        why = f"took longer than {ROW_LIMIT * limit} s"
    except EOFError:
        why = "ended the process"
    finally:
        process.kill()
        process.join()
    lost = {"yes": False, "note": why}
    columns, treatments = dict.fromkeys(COLUMNS, lost), dict.fromkeys(TREATMENTS, lost)
    return {"library": entry.library, "notes": [], "cells": columns, "treatments": treatments}


def _send_row(entry: Entry, limit: int, there: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    there.send(measure(entry, limit))


def short(text: str, length: int = 110) -> str:
    """Return text for a cell of a table, cut to a length."""
    return textwrap.shorten(text, length, placeholder=" ...").replace("|", "\\|").replace("<", "&lt;")


def share(cells: list[Cell]) -> str:
    """Return `yes of all (percent)` of the cells that apply."""
    verdicts = [cell["yes"] for cell in cells if cell["yes"] is not None]
    return f"{sum(verdicts)} of {len(verdicts)} ({sum(verdicts) / len(verdicts):.0%})" if verdicts else "-"


def mark(cell: Cell) -> str:
    """Return a cell in a word."""
    return "**wrong**" if cell.get("wrong") else {True: "yes", False: "**no**", None: "-"}[cell["yes"]]


def row_of(name: str, row: dict[str, Any]) -> str:
    """Return one network's line of the table."""
    cells = row["cells"]
    units = short(cells["anatomy"]["note"]) if cells["anatomy"]["yes"] else mark(cells["anatomy"])
    fits = sum(cell["yes"] for cell in row["treatments"].values())
    failed = {column: cell["note"] for column, cell in cells.items() if cell["yes"] is False}
    failed |= {treatment: cell["note"] for treatment, cell in row["treatments"].items() if cell.get("wrong")}
    why = "; ".join(f"{what}: {short(note)}" for what, note in failed.items() if note != NO_ANATOMY)
    return f"| {name} | {units} | {' | '.join(mark(cells[c]) for c in COLUMNS[1:])} | {fits} | {why} |"


def refusals(rows: dict[str, Any]) -> list[str]:
    """Return a table of why a treatment does not fit, with the networks, the names of their parts left out."""
    lines = ["", "| treatment | does not fit | why |", "|---|---|---|"]
    for treatment in TREATMENTS:
        reasons: dict[str, list[str]] = {}
        for name, row in rows.items():
            cell = row["treatments"][treatment]
            if cell["yes"] is False:
                reason = cell["note"].rpartition("; ")[2] if "does not fit" in cell["note"] else cell["note"]
                reasons.setdefault(short(reason, 90), []).append(name.partition("/")[2])
        for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
            lines.append(f"| {treatment} | {len(names)}: {short(', '.join(names), 70)} | {reason} |")
    return lines


def page(results: dict[str, Any]) -> str:
    """Return the Markdown page of all rows."""
    rows = results["networks"]
    libraries = dict.fromkeys(row["library"] for row in rows.values())
    groups = {library: [row for row in rows.values() if row["library"] == library] for library in libraries}
    groups["all"] = list(rows.values())
    older = sum(row["code"] != results["code"] for row in rows.values())
    cells = [cell for row in rows.values() for cell in (*row["cells"].values(), *row["treatments"].values())]
    wrong = sum(cell.get("wrong", False) for cell in cells)
    lines = ["# Which networks can be examined and treated?", ""]
    lines += [f"`{COMMAND}`, {results['date']}; nothing on this page is edited by hand, all reasons are in"]
    lines += [f"[anatomies.json](anatomies.json). {len(rows)} of the zoo's {len(ZOO)} networks, small, random weights;"]
    lines += [f"{len(cells)} cells, {wrong} of them wrong: claimed, and not so by the checks below."]
    lines += [f"{older} rows were measured with an earlier version of vitclinic."] if older else []
    lines += ["", "```text", textwrap.dedent(__doc__[__doc__.index("  anatomy ") : __doc__.index("A **no**")]).strip()]
    lines += ["```", "", __doc__[__doc__.index("A **no**") :].strip()]
    lines += ["", "| | networks | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---|" * len(COLUMNS)]
    for group, members in groups.items():
        shares = [share([row["cells"][column] for row in members]) for column in COLUMNS]
        lines.append(f"| {group} | {len(members)} | {' | '.join(shares)} |")
    lines += ["", "| treatment fits | " + " | ".join(groups) + " |", "|---|" + "---|" * len(groups)]
    for name in TREATMENTS:
        shares = [share([row["treatments"][name] for row in members]) for members in groups.values()]
        lines.append(f"| {name} | {' | '.join(shares)} |")
    lines += ["", f"| network | {' | '.join(COLUMNS)} | treatments of {len(TREATMENTS)} | why not |", "|---" * 8 + "|"]
    lines += [row_of(name, row) for name, row in rows.items()]
    return "\n".join([*lines, *refusals(rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="networks with a name like this, such as 'timm/vit_*'")
    parser.add_argument("--limit", type=int, default=60, help="seconds a cell may take")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sources = [path for part in ("anatomy", "treatments") for path in (ROOT / "src/vitclinic" / part).rglob("*.py")]
    code = fingerprint([path.read_text() for path in [*sorted(sources), Path(__file__)]])[:12]
    rows = json.loads(RESULTS.read_text())["networks"] if RESULTS.is_file() else {}
    for name, entry in ZOO.items():
        if not fnmatch(name, options.only) or rows.get(name, {}).get("code") == code:
            continue
        started = time.perf_counter()
        rows[name] = {"code": code, **measure_apart(entry, options.limit)}
        print(row_of(name, rows[name]), f"{time.perf_counter() - started:.0f} s", flush=True)
        ordered = {known: rows[known] for known in ZOO if known in rows}
        results = {"date": time.strftime("%Y-%m-%d"), "code": code, "networks": ordered}
        write_json(RESULTS, results)
        write_text(RESULTS.with_suffix(".md"), page(results))


if __name__ == "__main__":
    main()
