"""Facts about a probe that do not depend on the network: its title, its place, its key numbers, its figures.

A probe declares them as class attributes, and each of its measurements carries them in its JSON. A report reads them
from there, so that it imports no probe and treats the probes of installed packages like ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from vitclinic._core.config import Config

Better = Literal["higher", "lower", "nearer to 0"]

KeyScalars = Mapping[str, Better | None]
"""The scalars that a summary shows, in order, and which way each is better; None if neither way."""

LAST = 1000
"""The rank of a probe that states none."""
OTHER = "Other"
"""The group of a probe that states none."""


class FigureSpec(Config):
    """Declaration of a figure that is drawn from a probe's numbers, without code.

    Four kinds of plot suffice for most probes:

    - `states`: a value of the units by depth, joined, for numbers of the state *after* each unit; the shade between two
      points is the unit that leads from one to the other.
    - `units`: a value of the units by depth, as bars, for numbers of the unit itself.
    - `layers`: one panel a value, all networks in it, from the first layer that has the value to the last.
    - `scalars`: bars of the measurement's scalars, a bar a network.

    Example:
        >>> spec = FigureSpec(
        ...     name="confidence",
        ...     kind="scalars",
        ...     values={"confidence": "mean confidence"},
        ...     axis="share",
        ...     title="Mean confidence",
        ...     reading="Each bar is one network. Higher is more confident.",
        ... )
        >>> spec.kind
        'scalars'
    """

    name: str
    """Name for `Exam.figure`: letters, digits and hyphens."""
    kind: Literal["states", "units", "layers", "scalars"]
    values: dict[str, str]
    """The values or scalars to plot, each with the title of its axis (of `scalars`: of its row)."""
    axis: str = ""
    """Title of the other axis: of `layers`, what a point stands for (a unit); of `scalars`, what the bars measure."""
    title: str
    reading: str
    """Two sentences on how to read it."""
    paper: str = ""
    share: bool = False
    """True if the values are shares, shown in percent."""
    table: list[str] = Field(default_factory=list)
    """Further values that the figure's table has."""

    @model_validator(mode="after")
    def _one_value_in_a_panel(self) -> FigureSpec:
        if not self.values or (self.kind in ("states", "units") and len(self.values) > 1):
            raise ValueError(f"a figure of kind '{self.kind}' shows one value; 'layers' and 'scalars' show several")
        return self


class ProbeFacts(Config):
    """Facts about a probe, as its measurements carry them."""

    title: str
    question: str = ""
    """The question that the probe answers, in one sentence."""
    group: str = OTHER
    """The part of the report it belongs to."""
    rank: int = LAST
    """Its place in plans, and within its group: smaller comes first."""
    key_scalars: dict[str, Better | None] = Field(default_factory=dict)
    """The scalars of the summary, in order, and which way each is better; empty: the first six, neither way better."""
    paper: str = ""
    figures: list[FigureSpec] = Field(default_factory=list)
