"""The kinds of every zoo network's units as they were last looked at, so that none changes unnoticed.

A line is the units in order, with `*` where an attention map can be recorded, and `|` where a stage ends:

    stem position msa* mlp msa* mlp head

    PYTHONPATH=src:. python -m tests.anatomy.zoo.kinds 'timm/vit_*'     writes these anew: look at the difference
"""

from __future__ import annotations

import json
import sys
from fnmatch import fnmatch
from pathlib import Path

import torch

from tests.anatomy.zoo import ZOO, Entry
from vitclinic._core.io import write_json
from vitclinic.anatomy import Anatomy
from vitclinic.anatomy.wrappers import unwrap

_PATH = Path(__file__).with_suffix(".json")


def observe(entry: Entry) -> Anatomy:
    """Return the anatomy of a network as one pass shows it, whether or not a family knows it."""
    network = entry.build()
    torch.manual_seed(0)  # ViTMAE draws an order of patches
    return Anatomy._by_observation(unwrap(network)[0], network, entry.images())


def describe_kinds(anatomy: Anatomy) -> str:
    """Return the kinds of the units in order, with their maps and stages."""
    words, stage = [], 0
    for unit in anatomy.units:
        words += ["|"] * (unit.stage != stage)
        words.append(unit.kind + "*" * (unit.attention is not None))
        stage = unit.stage
    return " ".join(words)


def read_kinds() -> dict[str, str]:
    """Return the record, by the names of the zoo."""
    record: dict[str, str] = json.loads(_PATH.read_text())
    return record


def record_kinds(pattern: str) -> None:
    """Write the kinds of the networks with names like a pattern into the record."""
    record = read_kinds()
    record |= {name: describe_kinds(observe(entry)) for name, entry in ZOO.items() if fnmatch(name, pattern)}
    write_json(_PATH, {name: record[name] for name in ZOO if name in record})


if __name__ == "__main__":
    torch.set_num_threads(1)
    record_kinds(sys.argv[1])
