"""Which networks can be examined and treated: every network of the zoo, column by column, yes or no with the reason.

    PYTHONPATH=src:. python benchmarks/anatomies.py [--only 'timm/*'] [--limit 60]

Each network is measured in a process of its own, with a limit of time and of memory. First come the columns of all
networks, the libraries in turn, then the treatments. Writes docs/results/anatomies.json after every network and
docs/results/anatomies.md from it; nothing in them is edited by hand. Interrupted, the same command goes on: what was
measured with the code of today is kept, and what was not stays as it was, and is counted.

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
import ast
import json
import multiprocessing
import resource
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from itertools import zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import timm
import torch
from tests.anatomy.zoo import ZOO, Entry

import vitclinic
from anatomy_checks import (
    TREATMENTS,
    DoesNotApplyError,
    WrongError,
    apply_treatment,
    count_units,
    measure_curvature,
    read_attention,
    read_features,
    refuse_attention,
    remove_units,
)
from vitclinic._core.io import fingerprint, write_json, write_text
from vitclinic.anatomy import Anatomy

Cell = dict[str, Any]
"""`yes` (None: does not apply), a `note`: what was found, or why not; `wrong` if a check failed."""

ROOT = Path(__file__).parent.parent
COMMAND = "PYTHONPATH=src:. python benchmarks/anatomies.py"
RESULTS = ROOT / "docs" / "results" / "anatomies.json"
COLUMNS = ("anatomy", "features", "attention", "lesion", "curvature")
MEMORY = 10 * 2**30
ROW_LIMIT = 60
"""The time of a row on the clock, in those of a cell on the processor: others may use it too."""
NO_ANATOMY = "no anatomy"


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise a TimeoutError if the block takes longer, on the processor."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


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


def measure(entry: Entry, limit: int, kept: dict[str, Cell]) -> dict[str, Any]:
    """Return the row of one network, with the cells that are kept as they are."""
    network, images = entry.awake(), entry.images()
    found: list[Anatomy] = []

    def observe() -> str:
        found.append(Anatomy.of(network, images[:1]))
        return count_units(found[0])

    def by_units(read: Callable[..., str]) -> Cell:
        return attempt(limit, read, found[0], network, images) if found else {"yes": False, "note": NO_ANATOMY}

    cells = {"anatomy": attempt(limit, observe)}
    measures: dict[str, Callable[[], Cell]] = {
        "features": lambda: by_units(read_features),
        "attention": lambda: (
            by_units(read_attention) if entry.has_attention else attempt(limit, refuse_attention, found)
        ),
        "lesion": lambda: by_units(remove_units),
        "curvature": lambda: attempt(limit, measure_curvature, network, images),
    }
    cells |= {name: kept[name] if name in kept else look() for name, look in measures.items()}
    notes = list(found[0].notes) if found else []
    anatomy = found[0] if found and found[0].network is network else None  # treatments see what is in a wrapper
    treated = {
        name: kept[name] if name in kept else attempt(limit, apply_treatment, entry, network, anatomy, name)
        for name in TREATMENTS
    }
    return {"library": entry.library, "notes": notes, "cells": cells, "treatments": treated}


def measure_apart(entry: Entry, limit: int, kept: dict[str, Cell]) -> dict[str, Any]:
    """Return the row of one network, measured in a process that may take so much time and memory and no more."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_send_row, args=(entry, limit, kept, there))
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
    columns, treatments = ({name: kept.get(name, lost) for name in part} for part in (COLUMNS, TREATMENTS))
    return {"library": entry.library, "notes": [], "cells": columns, "treatments": treatments}


def _send_row(entry: Entry, limit: int, kept: dict[str, Cell], there: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    there.send(measure(entry, limit, kept))


def strip_prose(source: str) -> str:
    """Return what a source file does, without comments and docstrings: a changed word there changes no result."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            kept = [
                part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            ]
            node.body = kept or [ast.Pass()]
    return ast.unparse(tree)


def digest_code() -> dict[str, str]:
    """Return a digest of the code that each column and each treatment depends on."""
    package = ROOT / "src" / "vitclinic"
    own = {package / "treatments" / f"{name}.py": name for name in TREATMENTS}
    own[ROOT / "tests" / "anatomy" / "map_products.py"] = "attention"
    anatomy = [*sorted((package / "anatomy").rglob("*.py")), ROOT / "benchmarks" / "anatomy_checks.py"]
    texts = {
        path: strip_prose(path.read_text()) for path in [*anatomy, *sorted((package / "treatments").glob("*.py")), *own]
    }
    codes = {}
    for name in (*COLUMNS, *TREATMENTS):
        used = [
            path for path in texts if own.get(path, name) == name and (name in TREATMENTS or path in [*anatomy, *own])
        ]
        codes[name] = fingerprint([texts[path] for path in used])[:12]
    return codes


def order() -> list[str]:
    """Return the names of the zoo: the libraries in turn, and one network of each module of timm before its others."""
    seen: set[str] = set()
    first: dict[str, list[str]] = {}
    later = []
    for name in ZOO:
        library, _, model = name.partition("/")
        module = timm.models.model_entrypoint(model).__module__ if library == "timm" else name
        (later if module in seen else first.setdefault(library, [])).append(name)
        seen.add(module)
    in_turn = [name for names in zip_longest(*first.values()) for name in names if name is not None]
    return [*in_turn, *later]


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


def is_current(row: dict[str, Any], names: tuple[str, ...], codes: dict[str, str]) -> bool:
    """Return True if these cells of a row were measured with the code of today."""
    return all(row["codes"].get(name) == codes[name] for name in names)


def shares_of(groups: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return a table of how many networks of each group have each column."""
    lines = ["| | networks | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---|" * len(COLUMNS)]
    for group, members in groups.items():
        shares = [share([row["cells"][column] for row in members]) for column in COLUMNS]
        lines.append(f"| {group} | {len(members)} | {' | '.join(shares)} |")
    return lines


def page(results: dict[str, Any]) -> str:
    """Return the Markdown page of all rows."""
    rows, codes = results["networks"], results["codes"]
    libraries = dict.fromkeys(row["library"] for row in rows.values())
    groups = {library: [row for row in rows.values() if row["library"] == library] for library in libraries}
    groups["all"] = list(rows.values())
    cells = [cell for row in rows.values() for cell in (*row["cells"].values(), *row["treatments"].values())]
    wrong = sum(cell.get("wrong", False) for cell in cells)
    lines = ["# Which networks can be examined and treated?", ""]
    lines += [f"`{COMMAND}`, {results['date']}; nothing on this page is edited by hand, all reasons are in"]
    lines += [f"[anatomies.json](anatomies.json). {len(rows)} of the zoo's {len(ZOO)} networks, small, random weights;"]
    lines += [f"{len(cells)} cells, {wrong} of them wrong: claimed, and not so by the checks below."]
    lines += ["Wanted: 95% of features and of lesions, 95% of the attention that there is, none wrong."]
    lines += ["", "```text", textwrap.dedent(__doc__[__doc__.index("  anatomy ") : __doc__.index("A **no**")]).strip()]
    lines += ["```", "", __doc__[__doc__.index("A **no**") :].strip()]
    if older := [row for row in rows.values() if not is_current(row, COLUMNS, codes)]:
        columns = {name: [row for row in group if row not in older] for name, group in groups.items()}
        lines += ["", f"**With the code of today**, {len(rows) - len(older)} networks (the libraries in turn):", ""]
        lines += [*shares_of(columns), "", "**All**, the others, marked (earlier) below, with an earlier version:"]
    lines += ["", *shares_of(groups)]
    if older := [row for row in rows.values() if not is_current(row, tuple(TREATMENTS), codes)]:
        lines += ["", f"Treatments of {len(older)} networks were tried with an earlier version."]
    lines += ["", "| treatment fits | " + " | ".join(groups) + " |", "|---|" + "---|" * len(groups)]
    for name in TREATMENTS:
        shares = [share([row["treatments"][name] for row in members]) for members in groups.values()]
        lines.append(f"| {name} | {' | '.join(shares)} |")
    lines += ["", f"| network | {' | '.join(COLUMNS)} | treatments of {len(TREATMENTS)} | why not |", "|---" * 8 + "|"]
    lines += [
        row_of(name if is_current(row, COLUMNS, codes) else f"{name} (earlier)", row) for name, row in rows.items()
    ]
    return "\n".join([*lines, *refusals(rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="networks with a name like this, such as 'timm/vit_*'")
    parser.add_argument("--limit", type=int, default=60, help="seconds of the processor that a cell may take")
    options = parser.parse_args()
    torch.set_num_threads(1)
    codes = digest_code()
    rows = json.loads(RESULTS.read_text())["networks"] if RESULTS.is_file() else {}
    for part in (COLUMNS, tuple(TREATMENTS)):
        for name in order():
            row = rows.get(name, {})
            cells = {**row.get("cells", {}), **row.get("treatments", {})}
            due = [cell for cell in (part if row else codes) if row.get("codes", {}).get(cell) != codes[cell]]
            if fnmatch(name, options.only) and due:
                started = time.perf_counter()
                kept = {cell: cells[cell] for cell in codes if cell in cells and cell not in due}
                measured = measure_apart(ZOO[name], options.limit, kept)
                rows[name] = {"codes": {**row.get("codes", {}), **{cell: codes[cell] for cell in due}}, **measured}
                print(row_of(name, rows[name]), f"{time.perf_counter() - started:.0f} s", flush=True)
                write(rows, codes)
    write(rows, codes)


def write(rows: dict[str, Any], codes: dict[str, str]) -> None:
    """Write the rows in the order of the zoo, and their page."""
    ordered = {name: rows[name] for name in ZOO if name in rows}
    results = {"date": time.strftime("%Y-%m-%d"), "codes": codes, "networks": ordered}
    write_json(RESULTS, results)
    write_text(RESULTS.with_suffix(".md"), page(results))


if __name__ == "__main__":
    main()
