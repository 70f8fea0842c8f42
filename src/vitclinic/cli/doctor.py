"""`vitclinic doctor`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
from typing import Annotated, Any

import typer

from vitclinic.cli.common import app, console_for

_GIGABYTE = 1e9


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> None:
    """Say what this machine has: versions, cores, GPU, compiler, cache, extras.

    \b
    vitclinic doctor          to read, and to paste into a bug report
    vitclinic doctor --json   the same for programs
    """
    facts = {**_versions(), **_machine(), **_cache(), "extras": _extras()}
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    console = console_for(verbose=False, quiet=False)
    for name, value in facts.items():
        for key, inner in value.items() if isinstance(value, dict) else [(None, value)]:
            shown = f"{name} {key}" if key else name
            console.print(f"{shown:24} {inner}", markup=False, highlight=False, soft_wrap=True)


def _versions() -> dict[str, Any]:
    packages = ("vitclinic", "torch", "torchvision", "timm", "numpy", "pillow", "plotly", "pydantic")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), "packages": versions}


def _machine() -> dict[str, Any]:
    import torch  # the one verb that is about it

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    compiler = next((path for name in ("c++", "g++", "clang++", "cl") if (path := shutil.which(name))), None)
    return {
        "platform": platform.platform(),
        "cores": usable,
        "threads": torch.get_num_threads(),
        "gpu": ", ".join(gpus) or "none",
        "compiler": compiler or "none: compile=true will not work",
    }


def _cache() -> dict[str, Any]:
    from vitclinic.data.cache import cache_folder, cache_limit

    folder = cache_folder()
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    sizes = [f"{size / _GIGABYTE:.1f} GB" for size in (used, cache_limit(), shutil.disk_usage(existing).free)]
    return {"cache": {"folder": str(folder), "used": sizes[0], "limit": sizes[1], "disk free": sizes[2]}}


def _extras() -> dict[str, str]:
    """Return the extras of the package, each with what is missing of it."""
    wanted: dict[str, list[str]] = {}
    for line in importlib.metadata.requires("vitclinic") or []:
        found = re.match(r"([\w.-]+).*;\s*extra\s*==\s*['\"](\w+)['\"]", line)
        if found and found[2] not in ("docs", "test"):
            wanted.setdefault(found[2], []).append(found[1])
    missing = {extra: [name for name in names if not _is_installed(name)] for extra, names in sorted(wanted.items())}
    return {
        extra: f"missing {', '.join(names)}: pip install 'vitclinic[{extra}]'" if names else "installed"
        for extra, names in missing.items()
    }


def _is_installed(package: str) -> bool:
    """Tell whether a package is there by its own name, which need not be the one that it is imported by."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
