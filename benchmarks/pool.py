"""A pool of trained networks outside the repository: a recipe is trained once per digest, whoever asks for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitclinic.data import open_data
from vitclinic.training import Run, build_recipe, resume, train

ENDED = ("finished", "diverged")


def trained(pool: Path, recipe: Mapping[str, Any]) -> Run:
    """The run of a recipe: from the pool if it has ended there, trained or resumed otherwise."""
    checked = build_recipe(dict(recipe))
    digest = checked.digest(open_data(checked.data, size=checked.image_size).digest)
    path = pool / digest[:16]
    if (path / "recipe.yaml").is_file() and Run.open(path).status["status"] in ENDED:
        return Run.open(path)
    started = time.perf_counter()
    run = resume(path) if (path / "recipe.yaml").is_file() else train({**recipe, "out": str(path)})
    print(f"{path.name} {run.status['status']} after {time.perf_counter() - started:.0f} s", flush=True)
    if run.status["status"] not in ENDED:
        raise SystemExit(f"{path.name} was interrupted; it goes on when it is asked for again")
    return run
