"""What faults happen to: data, a recipe, a study, weights, a finished run with its exam, an interrupted one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from vitclinic._core.callback import Callback
from vitclinic.data.corruptions.copies import corrupt_data
from vitclinic.deployment import predict
from vitclinic.exam import examine
from vitclinic.experiments.study.conduct import study
from vitclinic.training import Run, resume, train

MODEL = {"name": "vit_tiny_fitted", "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
RECIPE: dict[str, Any] = {
    "model": {**MODEL, "class_token": False, "global_pool": "avg"},
    "data": {"source": "photos", "augment": "none"},
    "optimizer": {"lr": 0.005},
    "batch_size": 8,
    "steps": 4,
    "workers": 0,
    "device": "cpu",
    "checkpoint": {"every": "1 steps"},
    "validation": {"every": "2 steps"},
    "logging": {"trajectory": 10},
}
STUDY: dict[str, Any] = {
    "claim": "T1",
    "paper": "own",
    "source": "none",
    "title": "A higher rate makes larger weights",
    "seeds": 2,
    "base": {key: value for key, value in RECIPE.items() if key not in ("checkpoint", "validation", "logging")},
    "arms": {"slow": {}, "fast": {"optimizer": {"lr": 0.05}}},
    "measures": {"norm": {"probe": "norms", "scalar": "weight_norm"}, "accuracy": {"result": "test.accuracy"}},
    "expectations": [{"says": "it grows", "measure": "norm", "greater": ["fast", "slow"]}],
}


class _Stop(Callback):
    """Interrupts a run after its third step."""

    def on_step(self, trainer: Any) -> None:
        if trainer.step == 3:
            raise KeyboardInterrupt


def build(folder: Path) -> None:
    """Make all files in an empty folder, which becomes the current one; caches lie in `cache`."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    os.environ["VITCLINIC_CACHE"] = str(folder / "cache")
    _draw_photos(folder / "photos")
    _write_table(folder)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    (folder / "study.yaml").write_text(yaml.safe_dump(STUDY, sort_keys=False))
    train({**RECIPE, "out": "run"})
    examine("run", probes=["norms", "accuracy"], device="cpu")
    predict("run", ["photos/cat"])  # which stores its calibration
    examine("run", probes=["norms"], budget=60, device="cpu")  # which stores its plan
    corrupt_data("photos", "made", corruptions="fog", severities=1)
    save_file(load_file("run/checkpoints/last/model.safetensors"), "weights.safetensors")
    study("study.yaml", seeds=1)
    try:
        train({**RECIPE, "out": "stopped"}, callbacks=[_Stop()])
    except KeyboardInterrupt:
        shutil.copytree("stopped", "whole")
    resume("whole")


def final_weights(run: Path) -> bytes:
    """Return the last weights of a finished run, as bytes."""
    weights = Run(run).checkpoints.read_model("last")
    return b"".join(tensor.numpy().tobytes() for _, tensor in sorted(weights.items()))


def _draw_photos(folder: Path) -> None:
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for number in range(12):
            draw = np.random.default_rng(100 * label + number)
            picture = Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8))
            picture.save(folder / name / f"{number:02}.{'jpg' if number % 3 == 0 else 'png'}")
    (folder / "classes.json").write_text('{"cat": "a cat", "dog": "a dog"}')


def _write_table(folder: Path) -> None:
    from vitclinic.data.parquet import parquet_bytes

    files = [path.read_bytes() for path in sorted((folder / "photos").glob("*/*"))]
    labels = np.array([0] * 12 + [1] * 12)
    (folder / "table.parquet").write_bytes(parquet_bytes(files, [f"{n}.png" for n in range(24)], labels, ["a", "b"]))
