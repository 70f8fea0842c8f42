"""Records of how networks were examined, kept beside their measurements so that a report can print the commands.

`origins.jsonl` has a line for each data: its digest, the target and data as they were named, and the options.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

from vitclinic._core.errors import RunError
from vitclinic._core.io import read_json, read_text, write_text
from vitclinic.exam.commands import Origin
from vitclinic.training import Run

ORIGINS = "origins.jsonl"
_FIELDS = [each.name for each in fields(Origin) if each.name != "run"]


def keep_origin(folder: Path, digest: str, origin: Origin) -> None:
    """Note in an exam's folder, where something is stored, how a network was examined on the data of a digest."""
    if not folder.is_dir():
        return
    row = {"digest": digest, **{name: getattr(origin, name) for name in _FIELDS}}
    row["options"], row["objects"] = dict(origin.options), list(origin.objects)
    rows = _read(folder)
    if rows[-1:] != [row]:
        kept = [*(each for each in rows if each["digest"] != digest), row]
        write_text(folder / ORIGINS, "".join(f"{json.dumps(each)}\n" for each in kept))


def find_origin(folder: Path, digests: Collection[str], name: str, run: Run | None) -> Origin | None:
    """Return how a network was examined last on one of these data.

    Args:
        folder: The exam's.
        digests: Of the data of its measurements.
        name: What the run is called now.
        run: The run that the network is of, if it is from one.

    Returns:
        None for a network without a run whose exam was not noted.
    """
    noted = [row for row in _read(folder) if row["digest"] in digests]
    if not noted:
        return None if run is None else Origin(name, run=run)
    known = {field: noted[-1][field] for field in _FIELDS}
    known |= {"objects": tuple(known["objects"])} | ({} if run is None else {"target": name})
    return Origin(**known, run=run)


_KINDS = {"target": str | None, "data": str | None, "named": bool, "options": dict, "objects": list, "digest": str}


def _read(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a folder; damaged ones are left out: only commands depend on them."""
    if not (folder / ORIGINS).is_file():
        return []
    rows = []
    for line in read_text(folder / ORIGINS, RunError).splitlines():
        try:
            row = read_json(line)
        except ValueError:
            continue
        if isinstance(row, dict) and all(name in row and isinstance(row[name], kind) for name, kind in _KINDS.items()):
            rows.append(row)
    return rows
