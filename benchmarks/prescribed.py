"""A prescription for 5,000 images of CIFAR-10, as a user would ask for it.

    python benchmarks/prescribed.py CIFAR10 OUT [--budget 60m] [--recipe cifar10] [KEY=VALUE ...]

Writes docs/results/prescribe.json and docs/results/prescribe.md from what `prescribe` measured; nothing in them is
edited by hand. Interrupted, the same command goes on. Nothing else should run beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from vitclinic import Prescription, prescribe
from vitclinic.experiments.display import PrescriptionDisplay, show_prescription

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def record(found: Prescription) -> dict[str, Any]:
    """The prescription without where the data lies on this machine."""
    plain = found.record()
    plain["recipe"]["data"]["source"] = "CIFAR10"
    machine = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "platform": platform.machine()}
    return {**plain, "date": time.strftime("%Y-%m-%d"), "machine": machine}


def page(found: dict[str, Any], command: str) -> str:
    timing, final, effect = found["timing"], found["final"], found["effect"]
    images = found["recipe"]["data"]["limit"]
    machine = f"{found['machine']['cores']} CPU cores ({found['machine']['threads']} threads)"
    lines = [
        f"# A prescription for {images:,} images of CIFAR-10",
        "",
        f"`{command}` on {machine}, {found['date']}; written by benchmarks/prescribed.py, all numbers:",
        f"[prescribe.json](prescribe.json). {images:,} training images (JPEG quality 75); val are 5,000 other training",
        "images, test the 10,000 test images. What the stages are: [docs/prescribe.md](../prescribe.md).",
        "",
        f"**{found['statement']}**",
        "",
        *(f"- {change}" for change in found["changes"]),
        "",
        f"Budget {timing['budget'] / 60:.0f} minutes, used {timing['used'] / 60:.1f}"
        f" ({timing['used'] / timing['budget']:.0%}).",
        "",
        f"## Final comparison: test accuracy on fresh seeds, {final['trial_seconds']:.0f} s a trial",
        "",
        "| arm | steps | " + " | ".join(f"seed {seed}" for seed in final["seeds"]) + " | mean |",
        "|---|---|" + "---|" * (len(final["seeds"]) + 1),
    ]
    for arm in final["arms"]:
        values = " | ".join(f"{value:.4f}" for value in [*arm["accuracies"], arm["mean"]])
        lines.append(f"| {arm['arm']} | {arm['steps']} | {values} |")
    lines += [
        "",
        f"Difference {effect['mean']:+.4f}, 95% t interval {effect['low']:+.4f} to {effect['high']:+.4f}"
        f" over {effect['pairs']} pairs, p = {effect['p']:.2g}.",
        "",
        "What a stage tells is the smallest difference that stands out from its noise: "
        + ", ".join(f"{stage['name']} {100 * stage['detectable']:.1f} points" for stage in [*found["rungs"], final])
        + ".",
        "",
        "## Selection, optimistic: val accuracy",
        "",
        "| arm | step cost, in plain ones | "
        + " | ".join(f"{rung['name']} ({rung['trial_seconds']:.0f} s)" for rung in found["rungs"])
        + " |",
        "|---|---|" + "---|" * len(found["rungs"]),
    ]
    costs = timing["step_seconds"]
    names = dict.fromkeys(arm["arm"] for rung in reversed(found["rungs"]) for arm in rung["arms"])
    for name in names:
        cells = []
        for rung in found["rungs"]:
            arm = next((arm for arm in rung["arms"] if arm["arm"] == name), None)
            cells.append(f"{arm['mean']:.4f} ({arm['steps']} steps)" if arm else "")
        lines.append(f"| {name} | {costs[name] / costs['plain']:.2f} | {' | '.join(cells)} |")
    lines += ["", "## Left out", "", *(f"- {name}: {reason}" for name, reason in found["left_out"].items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--budget", default="60m")
    options = parser.parse_args()
    console = Console()
    with PrescriptionDisplay(console) as display:
        found = prescribe(
            options.recipe,
            options.words,
            data=options.data,
            budget=options.budget,
            out=options.out,
            callbacks=[display],
        )
    show_prescription(found, console)
    words = " ".join([options.recipe, *options.words])
    command = f"vitclinic prescribe {words} --data CIFAR10 --budget {options.budget}"
    plain = record(found)
    (RESULTS / "prescribe.json").write_text(json.dumps(plain, indent=1) + "\n")
    (RESULTS / "prescribe.md").write_text(page(plain, command))


if __name__ == "__main__":
    main()
