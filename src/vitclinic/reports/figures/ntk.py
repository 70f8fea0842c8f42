"""Condition number and spectrum of the neural tangent kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, Table, draws, measured
from vitclinic.reports.figures.compared import Measured, beside, known, scalar_table
from vitclinic.reports.figures.drawing import Floats, band, canvas, finite, label, line, number

_GROUPS = {"condition_number": "κ = λ<sub>1</sub> / λ<sub>m</sub>"}


@draws("ntk")
def ntk(examined: Sequence[Examined]) -> list[Figure]:
    found = measured(examined, "ntk")
    with_spectrum = [each for each in found if "eigenvalues" in each[2].arrays]
    return [
        *(_condition(found) if known(found, _GROUPS) else []),
        *(_spectrum(with_spectrum) if with_spectrum else []),
    ]


def _condition(found: Measured) -> list[Figure]:
    return [
        Figure(
            name="ntk-condition",
            title="Condition number of the tangent kernel",
            reading="The largest eigenvalue of the neural tangent kernel over its smallest, mean over blocks of images"
            " with a 95% interval. Larger means that some directions are learnt far later than others; the paper's"
            " numbers are of networks at initialisation.",
            paper="Chen et al. 2022, Table 1 (C3)",
            table=scalar_table(found, {**_GROUPS, "lambda_1": "", "lambda_m": "", "block": ""}),
            plot=beside(found, _GROUPS, "condition number"),
        )
    ]


def _spectrum(found: Measured) -> list[Figure]:
    figure = canvas(340, legend=2 * len(found))
    rows = []
    for place, name, one in found:
        ratios = _relative(one.arrays["eigenvalues"])
        rank = np.arange(1, ratios.shape[1] + 1)
        middle, low, high = np.exp(np.log(ratios).mean(0)), ratios.min(0), ratios.max(0)
        text = label(name, one, f"κ {number(one.scalars.get('condition_number'))}")
        figure.add_trace(band(place, rank, low, high))
        figure.add_trace(line(place, text, rank, middle, mode="lines", hovertemplate="eigenvalue %{x}: %{y:.2g}"))
        rows += [
            (name, block, k, value)
            for block, values in enumerate(one.arrays["eigenvalues"].tolist())
            for k, value in enumerate(values, start=1)
        ]
    figure.update_xaxes(title_text="number of the eigenvalue, from the largest")
    figure.update_yaxes(title_text="λ<sub>k</sub> / λ<sub>1</sub> (log)", type="log", exponentformat="power", dtick=1)
    return [
        Figure(
            name="ntk-spectrum",
            title="Spectrum of the tangent kernel",
            reading="The eigenvalues of the tangent kernel as shares of the largest: the geometric mean over blocks of"
            " images, the band from the lowest to the highest block. The curve ends at one over the condition number:"
            " the farther it falls, the later the last directions are learnt.",
            paper="Chen et al. 2022, App. G (C3)",
            table=Table(("network", "block", "rank", "eigenvalue"), rows),
            plot=figure,
        )
    ]


def _relative(eigenvalues: Floats) -> Floats:
    """As shares of each block's largest; what is not positive is a gap on a logarithmic axis."""
    values = finite(eigenvalues)
    positive: Floats = np.where(values > 0, values, np.nan)
    return positive / positive[:, :1]
