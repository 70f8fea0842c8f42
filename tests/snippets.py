"""Run the Python blocks of a Markdown page as a reader would who goes through it from top to bottom.

The blocks of one page share one namespace and run in a folder that has what the pages speak of: `photos/`, trained runs
under `runs/`, and the names of `NAMES`. A block that cannot run here has a comment before it that says why:

    <!-- not run: takes an hour -->
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import vitclinic
from vitclinic.exam import request

BUDGET = "10s"
"""Of an exam that a page does not give a budget for."""
ROOT = Path(__file__).parents[1]
CLASSES = ("cat", "dog", "owl")
_TINY = {"name": "vit_tiny_patch16_224", "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
_RUN = {
    "model": _TINY,
    "data": {"source": "photos/", "augment": "none"},
    "epochs": 2,
    "batch_size": 16,
    "checkpoint": {"keep_epochs": [0, 1, 2]},
    "workers": 0,
}
_RUNS: dict[str, dict[str, Any]] = {
    "photos": {},
    "plain": {},
    "sam": {"treatments": ["sam"]},
    "treated": {"treatments": ["context_broadcasting"]},
    "with_cb_s": {"treatments": [{"context_broadcasting": {"scaled": True}}]},
    "shapes": {"data": {"source": "shapes:200", "augment": "none"}},
}
_BLOCK = re.compile(r"(?ms)^(?:<!-- not run: (?P<reason>.+?) -->\n+)?```python\n(?P<code>.*?)^```$")


@dataclass(frozen=True)
class Block:
    """One Python block: its code, the line its code begins at, and why it is not run, if it is not."""

    code: str
    line: int
    reason: str | None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["code"], text[: found.start("code")].count("\n"), found["reason"])
        for found in _BLOCK.finditer(text)
    ]


def prepare(folder: Path) -> None:
    """Make the folders of images: 60 of each class of `photos/`, 3 of each of `sketches/`."""
    for name, count in (("photos", 60), ("sketches", 3)):
        for label, kind in enumerate(CLASSES):
            (folder / name / kind).mkdir(parents=True)
            for number, image in enumerate(_pictures(label, count)):
                Image.fromarray(image).save(folder / name / kind / f"{number}.png")
    (folder / "sketches.yaml").write_text("".join(f"{name}: {name}\n" for name in CLASSES))


def run_page(page: Path) -> None:
    """Run all blocks of the page in the current directory; errors show the page's own lines."""
    text = page.read_text(encoding="utf-8")
    _train_runs(sorted(set(re.findall(r"runs/(\w+)", text)) & _RUNS.keys()))
    namespace = {"__name__": "page", **_names()}
    for block in blocks_of(page):
        if block.reason is None:
            exec(compile("\n" * block.line + block.code, str(page), "exec"), namespace)  # noqa: S102


def registers(page: Path) -> bool:
    """Return whether a block registers something, which would stay known to the tests that come after."""
    return any(
        re.search(r"^@(register|rule|draws)|register\w*\(", block.code, re.MULTILINE) for block in blocks_of(page)
    )


def _train_runs(names: list[str]) -> None:
    for name in names:
        if not Path("runs", name).exists():
            vitclinic.train(**{**_RUN, **_RUNS[name]}, out=f"runs/{name}")


def _names() -> dict[str, Any]:
    """Return what every page may take for granted: libraries, networks, one batch of images and a loader of them."""
    torch.manual_seed(0)
    small = {key: value for key, value in _TINY.items() if key != "name"}

    def vit() -> torch.nn.Module:
        return timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=len(CLASSES), **small)

    pixels = torch.from_numpy(np.concatenate([np.stack(list(_pictures(label, 8))) for label in range(len(CLASSES))]))
    images, labels = pixels.permute(0, 3, 1, 2).float() / 255, torch.arange(len(CLASSES)).repeat_interleave(8)
    return {
        "vitclinic": vitclinic,
        "torch": torch,
        "timm": timm,
        "network": vit(),
        "model": vit(),
        "vit": vit(),
        "resnet": timm.create_model("resnet10t", num_classes=len(CLASSES)),
        "images": images,
        "labels": labels,
        "loader": DataLoader(TensorDataset(images, labels), batch_size=12),
    }


def _pictures(label: int, count: int) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Yield images of noise, each class brighter in a channel of its own."""
    for number in range(count):
        pixels = np.random.default_rng([label, number]).integers(0, 200, (32, 32, 3), dtype=np.uint8)
        pixels[..., label] += 55
        yield pixels


def run_page_apart(page: Path, folder: Path, errors: Path) -> None:
    """Run all blocks of the page in a process of their own, whose target this is; leave its traceback in a file."""
    os.chdir(folder)
    request.BUDGET = BUDGET
    torch.set_num_threads(1)
    try:
        run_page(page)
    except BaseException:
        errors.write_text(traceback.format_exc())
        raise
