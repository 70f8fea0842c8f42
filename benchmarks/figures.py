"""Figures of docs/results from its JSON files (benchmarks/examined.py): every measure by the depth of the unit.

    pip install matplotlib
    python benchmarks/figures.py

Markers tell what a unit is; lines are the mean over seeds, one for each arm.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt

RESULTS = Path(__file__).parent.parent / "docs" / "results"
MARKERS = {"msa": "o", "mlp": "s", "token_mlp": "D", "conv": "^", "stem": "x", "position": "+", "pool": "v"}
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")  # safe for colour-blind readers
PANELS = {
    "layers": [
        ("fourier", "delta_log_amplitude", "Delta log amplitude at pi"),
        ("variance", "variance", "variance over positions"),
        ("token_similarity", "absolute_cosine", "absolute cosine of patches"),
        ("sparsity", "active", "share of active neurons"),
        ("lesion", "accuracy_drop", "accuracy lost without the unit"),
        ("attention_entropy", "ratio", "entropy / maximum"),
    ],
    "depth": [
        ("token_similarity", "absolute_cosine", "absolute cosine of patches"),
        ("attention_entropy", "ratio", "entropy / maximum"),
        ("attention_entropy", "class_entropy", "entropy of the class token"),
        ("attention_distance", "relative_distance", "relative distance"),
    ],
}


def curve(runs: list[dict[str, Any]], probe: str, value: str) -> tuple[np.ndarray, np.ndarray, list[str]] | None:
    """(share of the depth, mean over seeds, kinds) of the units that have the value."""
    rows = [[row for row in run[probe][0]["units"] if value in row] for run in runs if probe in run]
    if not rows or not rows[0]:
        return None
    values = np.array([[row[value] for row in run] for run in rows])
    return np.linspace(0, 1, values.shape[1]), values.mean(0), [row["kind"] for row in rows[0]]


def main() -> None:
    for group, panels in PANELS.items():
        path = RESULTS / f"{group}.json"
        if not path.is_file():
            continue
        arms = json.loads(path.read_text())
        figure, axes = plt.subplots((len(panels) + 1) // 2, 2, figsize=(11, 3.4 * ((len(panels) + 1) // 2)))
        for (probe, value, title), axis in zip(panels, axes.flat, strict=False):
            for (name, runs), colour in zip(arms.items(), COLOURS, strict=False):
                found = curve(runs, probe, value)
                if found is None:
                    continue
                x, y, kinds = found
                axis.plot(x, y, color=colour, linewidth=1.2, label=f"{name} ({len(runs)})")
                for kind in dict.fromkeys(kinds):
                    at = [number for number, other in enumerate(kinds) if other == kind]
                    axis.scatter(x[at], y[at], color=colour, marker=MARKERS.get(kind, "."), s=22)
            if value == "variance":
                axis.set_yscale("log")
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("depth", fontsize=9)
        axes.flat[0].legend(fontsize=8)
        kinds = "o MSA, □ MLP, ◇ token MLP, △ conv, ▽ pooling, x stem, + position"
        figure.text(0.5, 0.005, f"{kinds}; in brackets the number of trainings", ha="center", fontsize=8)
        figure.tight_layout(rect=(0, 0.02, 1, 1))
        figure.savefig(RESULTS / f"{group}.png", dpi=85)


if __name__ == "__main__":
    main()
