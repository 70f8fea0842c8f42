"""Thousands of faults as careless users and bad machines make them, against what vitclinic promises.

    python benchmarks/fuzz.py 600 --out docs/results/robustness.md

tries 600 cases of each kind (`tests/fuzz/cases.py`), 0.3 s each on an idle core, and writes the table. A case is named
by its kind and its number: `1 --only "damaged cache" --first 108` tries one again. Each runs the command line in a
fresh copy of a small world (data, recipe, study, weights, runs). Run as root, so that it can become an ordinary user.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")

SLOW = {"damaged results and runs of a study": 4}
"""Kinds of which fewer cases are tried, by what they are divided."""

PAGE = """# Faults that were tried

What careless users and bad machines do, tried on one command each:
`python benchmarks/fuzz.py {cases} --processes {processes}`, {total:,} cases in {minutes:.0f} minutes ({date}).
A case *holds* if the command ends within 20 seconds, with a documented exit code and one sentence if it fails; if no
file that it had no business with has changed; and if, where it says that all is well, predictions and weights are bit
for bit those of undamaged files, or the fault was told.

| kind | cases | held | done all the same | one sentence | tracebacks | hangs | losses | wrong in silence |
|---|---|---|---|---|---|---|---|---|
{rows}

*Done all the same*: exit code 0, since the file was not needed, has a copy (`previous`), was made again (caches,
calibration, status) or the value is allowed; 5 to 9, what the command is there to tell, such as images that cannot be
read, count here, too. Bits are flipped, files cut off, blanked, doubled, filled with something else, saved in another
encoding; values of JSON and YAML replaced by others of every type; files replaced by folders, links to nowhere, to
themselves and to devices, and by pipes. Ordinary users (`nobody`) have rights taken away; files that cannot grow stand
for full disks. The default tests try a few of each kind, the slow ones more (`tests/fuzz`).

What is not tried here: kills (tests/training/test_resume.py and tests/exam/test_killed.py, at every file event), lost
processes (tests/training/test_distributed.py), GPUs.
"""


def count(faults: list[str]) -> collections.Counter[str]:
    """Return how many promises of each sort were broken."""
    sorts = collections.Counter[str]()
    for fault in faults:
        word = next((word for word in ("hang", "loss", "wrong") if fault.startswith(word)), "traceback")
        sorts[word] += 1
    return sorts


def try_kind(kind: str, numbers: range) -> str:
    """Try the cases of a kind in a small world of its own, print those that fail, and return a row of the table."""
    import torch
    from tests.fuzz.cases import try_case
    from tests.fuzz.world import build

    torch.set_num_threads(1)
    scratch = Path(tempfile.mkdtemp(prefix="vitclinic-fuzz-"))
    scratch.chmod(0o755)
    build(scratch / "world")
    codes, broken, held = collections.Counter[object](), collections.Counter[str](), 0
    for number in numbers:
        faulthandler.dump_traceback_later(120, exit=True)  # for what no signal interrupts
        ended = try_case(kind, number, scratch / "world", scratch / "case")
        codes[ended.code] += 1
        held += not ended.faults
        broken += count(ended.faults)
        if ended.faults:
            print(f"{kind}, case {number}: {ended.words} ({ended.damage})", *ended.faults, ended.err, sep="\n  ")
    faulthandler.cancel_dump_traceback_later()
    os.chdir(ROOT)
    shutil.rmtree(scratch)
    told = sum(codes[code] for code in (2, 3, 4))
    sorts = " | ".join(str(broken[sort]) for sort in ("traceback", "hang", "loss", "wrong"))
    return f"| {kind} | {len(numbers)} | {held} | {sum(codes.values()) - told} | {told} | {sorts} |"


def main() -> None:
    """Try all cases and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=1, help="kinds that are tried at the same time")
    given = parser.parse_args()
    from tests.fuzz.cases import KINDS

    kinds = {
        kind: range(given.first, given.first + (given.cases // SLOW.get(kind, 1) or 1))
        for kind in KINDS
        if given.only in kind
    }
    rows, started = [], time.monotonic()
    with ProcessPoolExecutor(given.processes, get_context("spawn"), max_tasks_per_child=1) as pool:
        for row in pool.map(try_kind, kinds, kinds.values()):
            rows.append(row)
            print(row, flush=True)
    if given.out:
        given.out.write_text(
            PAGE.format(
                cases=given.cases,
                total=sum(len(numbers) for numbers in kinds.values()),
                rows="\n".join(rows),
                minutes=(time.monotonic() - started) / 60,
                processes=given.processes,
                date=time.strftime("%Y-%m-%d"),
            )
        )


if __name__ == "__main__":
    main()
