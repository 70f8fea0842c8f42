"""Rules about how much data a network had for what it is."""

from __future__ import annotations

import math

from vitclinic.clinic.findings.evidence import Evidence, difference, high, low, shown, usable
from vitclinic.clinic.findings.rule import Verdict, rule
from vitclinic.finding import Suggestion
from vitclinic.measurement import Scalar

STARVED, NOTICED = 1.0, 0.5
"""Nats between images of training and others."""
TURNED = 0.5
"""Nats that the loss on val has risen above its lowest."""


@rule(
    "Data-starved",
    ("train_nll.nll", "accuracy.nll"),
    ("training.val_nll",),
    threshold=f"test NLL above training NLL (less the entropy of its targets) by more than {STARVED:g} is a problem, "
    f"by {NOTICED:g} a notice; or val NLL at the end more than {TURNED:g} above its lowest",
    source="no paper draws a line; ViTs on 2,000 images of CIFAR-10 without augmentation have 2.5 to 4, with crop and "
    "flip 0.1 (runs of docs/results/remedies.md)",
    basis="heuristic",
    reference="both a higher training NLL and a lower accuracy than the reference network, interval against interval: "
    "too little data for so weak an inductive bias, and not over-fitting [park2022 Fig. 5]",
    suggestions=(
        Suggestion(
            treatment="sam",
            paper="Chen et al. 2022, Table 5",
            why="On a tenth of ImageNet SAM raised ViT-B/16 from 32.8 to 46.1, strong augmentation to 38.5.",
        ),
        Suggestion(
            treatment="data.augment=deit",
            paper="Chen et al. 2022, Table 5; Park & Kim 2022, Fig. 5",
            why="With strong augmentation a ViT did not over-fit 2% of its data.",
        ),
        Suggestion(
            treatment="local_attention",
            paper="Park & Kim 2022, Fig. 7",
            why="A stronger inductive bias lowers both test error and training NLL on little data.",
        ),
    ),
)
def data_starved(evidence: Evidence) -> Verdict | None:
    """Images of training fitted and others not; or neither, where a reference network does both."""
    return _gap(evidence) or _turned(evidence) or _weak_bias(evidence)


def _gap(evidence: Evidence) -> Verdict | None:
    train, test = evidence.number("train_nll.nll"), evidence.number("accuracy.nll")
    if train is None or test is None:
        return None
    floor = evidence.number("train_nll.target_entropy") or Scalar(value=0.0)
    gap = difference(test, difference(train, floor))
    if low(gap) <= NOTICED:
        return None
    statement = f"The NLL is {shown(train)} on images of training{_count(evidence)} and {shown(test)} on others."
    numbers = {"train_nll.nll": train, "accuracy.nll": test}
    return Verdict("problem" if low(gap) > STARVED else "notice", statement, numbers)


def _count(evidence: Evidence) -> str:
    measurement = usable(evidence.measurements.get("train_nll"))
    return "" if measurement is None else f", of which there are {measurement.provenance.images},"


def _turned(evidence: Evidence) -> Verdict | None:
    """The loss on val fell and rose again."""
    curve = [nll for nll in evidence.curve("val", "nll") if math.isfinite(nll)]
    if not curve or curve[-1] - min(curve) <= TURNED:
        return None
    numbers = {"training.val_nll_lowest": Scalar(value=min(curve)), "training.val_nll_last": Scalar(value=curve[-1])}
    statement = f"The NLL on val fell to {min(curve):.3g} and rose to {curve[-1]:.3g} by the end of training."
    return Verdict("problem", statement, numbers)


def _weak_bias(evidence: Evidence) -> Verdict | None:
    """Worse on both sides than the reference network."""
    names = "train_nll.nll", "accuracy.accuracy"
    nll, accuracy = map(evidence.number, names)
    their_nll, their_accuracy = map(evidence.theirs, names)
    if nll is None or accuracy is None or their_nll is None or their_accuracy is None:
        return None
    if low(nll) <= high(their_nll) or high(accuracy) >= low(their_accuracy):
        return None
    statement = (
        f"It fits images of training less well than the reference network (NLL {shown(nll)} against "
        f"{shown(their_nll)}) and is less accurate, too ({shown(accuracy)} against {shown(their_accuracy)})."
    )
    return Verdict("notice", statement, {names[0]: nll, names[1]: accuracy}, against_reference=True)
