"""Accuracy under FGSM and PGD."""

from __future__ import annotations

from collections.abc import Sequence

from vitclinic.measurement import Measurement
from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, draws, measured
from vitclinic.reports.figures.compared import beside, known, scalar_table


@draws("fgsm")
def fgsm(examined: Sequence[Examined]) -> list[Figure]:
    return _attacked(examined, "fgsm", "one step along the gradient", "Hyeon-Woo et al. 2023, Table 8 (H8)")


@draws("pgd")
def pgd(examined: Sequence[Examined]) -> list[Figure]:
    return _attacked(examined, "pgd", "small steps along the gradient", "Chen et al. 2022, Table 7 (C10)")


def _attacked(examined: Sequence[Examined], probe: str, how: str, paper: str) -> list[Figure]:
    found = measured(examined, probe)
    groups = known(
        found,
        {
            "clean_accuracy": "clean",
            "noise_accuracy": "random noise",
            "robust_accuracy": probe.upper(),
            "success": "fooled",
        },
    )
    if not groups:
        return []
    sizes = list(dict.fromkeys(_size(one) for _, _, one in found))
    named = [(place, f"{name}, {_size(one)}" if len(sizes) > 1 else name, one) for place, name, one in found]
    return [
        Figure(
            name=probe,
            title=f"Accuracy under {probe.upper()} ({', '.join(sizes)})",
            reading=f"Bars are the accuracy on the images as they are, with random noise, and after {how}, each change"
            " of a pixel being as large as the bound allows; 'fooled' is the share of the recognised images that the"
            " attack turns. A robust accuracy is an upper bound: if noise does as much as the attack, the gradient is"
            " masked, and the robustness is none.",
            paper=paper,
            table=scalar_table(found, {**groups, "drop": "", "zero_gradient_share": "", "epsilon": ""}),
            plot=beside(named, groups, "share of images", share=True),
        )
    ]


def _size(measurement: Measurement) -> str:
    """How far the attack may go: `2/255 in l_inf`."""
    epsilon = measurement.scalars.get("epsilon")
    norm = str(measurement.config.get("norm", "linf"))
    if epsilon is None:
        return norm
    pixels = epsilon.value * 255
    in_words = f"{pixels:.3g}/255" if norm == "linf" else f"{epsilon.value:.3g}"
    return f"{in_words} in {norm.replace('linf', 'l∞').replace('l2', 'l₂')}"
