"""The record of a finding: a statement about an exam, the numbers it rests on, and what to try."""

from __future__ import annotations

from typing import Literal

from vitclinic.config import Config
from vitclinic.measurement import Scalar

Basis = Literal["reference network", "published range", "heuristic"]


class Suggestion(Config):
    """A treatment to try, and why."""

    treatment: str
    """As `vitclinic list treatments` names it, or the change of a recipe, such as `data.augment=deit`."""
    paper: str
    """Whose remedy it is, such as "Chen et al. 2022 (SAM)"."""
    why: str
    """One sentence."""


class Finding(Config):
    """What a rule found in the measurements of one network."""

    rule: str
    """Such as `over_smoothing`."""
    title: str
    """A few words: "Over-smoothed patches"."""
    severity: Literal["problem", "notice", "healthy"]
    statement: str
    """One or two sentences, with the numbers."""
    numbers: dict[str, Scalar]
    """What it rests on, by PROBE.NAME (or `training.NAME`)."""
    threshold: str
    """The comparison that it makes, and where that comes from."""
    basis: Basis
    suggestions: tuple[Suggestion, ...] = ()
