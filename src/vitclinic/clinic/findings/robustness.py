"""Rules about what a network's decisions rest on."""

from __future__ import annotations

from vitclinic.clinic.findings.evidence import Evidence, high, low, shown
from vitclinic.clinic.findings.rule import Verdict, compared, rule
from vitclinic.finding import Suggestion
from vitclinic.measurement import Scalar

LOST = 0.5
"""Of the clean accuracy."""
MORE_FRAGILE = 0.05
BY_TEXTURE = 0.5
MSA_LATE = Suggestion(
    treatment="model.name=alternet18",
    paper="Park & Kim 2022, Fig. 2b and 12",
    why="Attention at the ends of stages is a low-pass filter, robust against high frequencies and biased to shape.",
)


@rule(
    "High-frequency fragility",
    ("frequency_noise.drop_high", "frequency_noise.drop_low", "frequency_noise.clean_accuracy"),
    threshold=f"noise of high frequencies takes more than {LOST:g} of the accuracy, and more than noise of low ones",
    source="ResNets are hurt by high frequencies, ViTs by low ones [park2022 Fig. 2b]; the line is ours (a small "
    "ResNet lost 0.17 of 0.49, a small ViT 0.03 of 0.39, on 200 images of CIFAR-10)",
    basis="heuristic",
    reference=f"accuracy lost to high frequencies above the reference network's by {MORE_FRAGILE:g}, interval against "
    "interval",
    suggestions=(
        Suggestion(
            treatment="spatial_smoothing",
            paper="Park & Kim 2022, App. B",
            why="For CNNs: a blur at stage ends makes them robust against high-frequency noise.",
        ),
        MSA_LATE,
        Suggestion(
            treatment="sam",
            paper="Chen et al. 2022, Table 2",
            why="SAM gained more on corrupted images than on clean ones: +9.9 points for ViT-B/16.",
        ),
    ),
)
def high_frequency_fragility(evidence: Evidence) -> Verdict | None:
    """What noise of high frequencies takes."""
    name = "frequency_noise.drop_high"
    ours, slow = evidence.number(name), evidence.number("frequency_noise.drop_low")
    clean = evidence.number("frequency_noise.clean_accuracy")
    if ours is None or slow is None or clean is None or high(clean) <= 0:
        return None
    limit = max(LOST * high(clean), high(slow))
    found = compared(ours, evidence.theirs(name), problem=limit, margin=MORE_FRAGILE)
    if found is None:
        return None
    statement = (
        f"Noise of high frequencies lowers an accuracy of {shown(clean)} by {shown(ours)}{found.tail}; "
        f"that of low ones by {shown(slow)}."
    )
    numbers = {name: ours, "frequency_noise.drop_low": slow, "frequency_noise.clean_accuracy": clean}
    return Verdict(found.severity, statement, numbers, found.worse)


@rule(
    "Texture bias",
    ("shape_bias.shape_bias",),
    threshold=f"shape bias below {1 - BY_TEXTURE:g}: more decisions by texture than by shape",
    source="the middle of the scale; CNNs lie below it and people above (Geirhos et al. 2019)",
    basis="heuristic",
    reference="shape bias below the reference network's by 0.1, interval against interval",
    suggestions=(MSA_LATE,),
)
def texture_bias(evidence: Evidence) -> Verdict | None:
    """Decisions by texture where shape disagrees."""
    name = "shape_bias.shape_bias"
    ours, theirs = evidence.number(name), evidence.theirs(name)
    if ours is None:
        return None
    by_texture = None if theirs is None else _complement(theirs)
    found = compared(_complement(ours), by_texture, problem=BY_TEXTURE, margin=0.1)
    if found is None:
        return None
    tail = "" if theirs is None else f"; the reference network has {shown(theirs)}"
    statement = f"Where shape and texture disagree, {shown(ours)} of the decisions go by shape{tail}."
    return Verdict(found.severity, statement, {name: ours}, found.worse)


def _complement(share: Scalar) -> Scalar:
    return Scalar(value=1 - share.value, low=1 - high(share), high=1 - low(share), n=share.n)
