"""Rules about the predictions: better than guessing, and as sure as they are right."""

from __future__ import annotations

from vitclinic._core.records import Scalar, Suggestion
from vitclinic.exam.findings.rule import (
    Evidence,
    Excess,
    Verdict,
    compare,
    difference,
    format_number,
    high,
    low,
    rule,
)

OVER, UNDER, NOTICED = 0.1, 0.2, 0.05
"""Under-confidence is what strong augmentation does to good networks, too: it takes more of it to be a problem."""
CALIBRATION = ("accuracy.confidence", "accuracy.accuracy")
CALIBRATION_SOURCE = (
    "no paper draws a line ([park2022] Fig. F.1 shows reliability diagrams); networks that nobody calibrated commonly "
    "have calibration errors of 0.04 to 0.16 (Guo et al. 2017, Table 1)"
)


@rule(
    "No better than guessing",
    ("accuracy.accuracy", "accuracy.commonest"),
    threshold="accuracy not above the share of the commonest class",
    source="who always names the commonest class is as good; ours",
    basis="heuristic",
    suggestions=(
        Suggestion(
            treatment="schedule.warmup=10%",
            paper="Wang et al. 2022, Table 1",
            why="If this network was trained, its training failed early: look at its curves.",
        ),
    ),
)
def guessing(evidence: Evidence) -> Verdict | None:
    """Find a network that is no better than guessing, or too few images to tell."""
    ours, guess = evidence.number("accuracy.accuracy"), evidence.number("accuracy.commonest")
    if ours is None or guess is None or low(ours) > guess.value:
        return None
    statement = f"Accuracy is {format_number(ours)}; naming the commonest class always would give {guess.value:.3g}."
    return Verdict("notice", statement, {"accuracy.accuracy": ours, "accuracy.commonest": guess})


@rule(
    "Over-confidence",
    CALIBRATION,
    threshold=f"confidence - accuracy above {OVER:g} is a problem, above {NOTICED:g} a notice",
    source=CALIBRATION_SOURCE,
    basis="heuristic",
    reference="confidence - accuracy above the reference network's by 0.05, interval against interval",
    suggestions=(
        Suggestion(
            treatment="data.augment=deit",
            paper="Park & Kim 2022, Fig. F.1",
            why="Strong augmentation makes predictions less confident.",
        ),
        Suggestion(
            treatment="data.augment.smoothing=0.1",
            paper="the DeiT recipe of Park & Kim 2022, Gong et al. 2021, Hyeon-Woo et al. 2023",
            why="Smoothed labels never ask for certainty.",
        ),
    ),
)
def over_confidence(evidence: Evidence) -> Verdict | None:
    """Find a network that is surer than it is right."""
    return _miscalibrated(evidence, sign=1)


@rule(
    "Under-confidence",
    CALIBRATION,
    threshold=f"accuracy - confidence above {UNDER:g} is a problem, above {NOTICED:g} a notice",
    source=CALIBRATION_SOURCE,
    basis="heuristic",
    reference="accuracy - confidence above the reference network's by 0.05, interval against interval",
    suggestions=(
        Suggestion(
            treatment="data.augment=light",
            paper="Park & Kim 2022, Fig. F.1",
            why="Strong augmentation (mixed images, smoothed labels) is what makes predictions under-confident.",
        ),
    ),
)
def under_confidence(evidence: Evidence) -> Verdict | None:
    """Find a network that is right more often than it is sure."""
    return _miscalibrated(evidence, sign=-1)


def _miscalibrated(evidence: Evidence, sign: int) -> Verdict | None:
    confidence, accuracy = evidence.number("accuracy.confidence"), evidence.number("accuracy.accuracy")
    if confidence is None or accuracy is None:
        return None
    found = _gap(evidence, confidence, accuracy, sign)
    if found is None:
        return None
    numbers = {"accuracy.confidence": confidence, "accuracy.accuracy": accuracy}
    if (error := evidence.number("accuracy.ece")) is not None:
        numbers["accuracy.ece"] = error
    statement = f"Mean confidence is {format_number(confidence)}, accuracy {format_number(accuracy)}{found.tail}."
    return Verdict(found.severity, statement, numbers, found.worse)


def _gap(evidence: Evidence, confidence: Scalar, accuracy: Scalar, sign: int) -> Excess | None:
    ours = difference(confidence, accuracy) if sign > 0 else difference(accuracy, confidence)
    their_confidence, their_accuracy = evidence.theirs("accuracy.confidence"), evidence.theirs("accuracy.accuracy")
    theirs = None
    if their_confidence is not None and their_accuracy is not None:
        pair = (their_confidence, their_accuracy) if sign > 0 else (their_accuracy, their_confidence)
        theirs = difference(*pair)
    found = compare(ours, theirs, problem=OVER if sign > 0 else UNDER, notice=NOTICED, margin=0.05)
    if found is None or theirs is None:
        return found
    tail = f"; of their difference, {format_number(ours)}, the reference network has {format_number(theirs)}"
    return Excess(found.severity, found.worse, tail)


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
    """Find a network that loses much to noise of high frequencies."""
    name = "frequency_noise.drop_high"
    ours, slow = evidence.number(name), evidence.number("frequency_noise.drop_low")
    clean = evidence.number("frequency_noise.clean_accuracy")
    if ours is None or slow is None or clean is None or high(clean) <= 0:
        return None
    limit = max(LOST * high(clean), high(slow))
    found = compare(ours, evidence.theirs(name), problem=limit, margin=MORE_FRAGILE)
    if found is None:
        return None
    statement = (
        f"Noise of high frequencies lowers an accuracy of {format_number(clean)} by {format_number(ours)}{found.tail}; "
        f"that of low ones by {format_number(slow)}."
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
    """Find a network that decides by texture where the shape disagrees."""
    name = "shape_bias.shape_bias"
    ours, theirs = evidence.number(name), evidence.theirs(name)
    if ours is None:
        return None
    by_texture = None if theirs is None else _complement(theirs)
    found = compare(_complement(ours), by_texture, problem=BY_TEXTURE, margin=0.1)
    if found is None:
        return None
    tail = "" if theirs is None else f"; the reference network has {format_number(theirs)}"
    statement = f"Where shape and texture disagree, {format_number(ours)} of the decisions go by shape{tail}."
    return Verdict(found.severity, statement, {name: ours}, found.worse)


MEANINGLESS = 0.05


@rule(
    "Meaningless saliency maps",
    ("saliency.gain",),
    threshold=f"insertion - deletion above that of shuffled maps by less than {MEANINGLESS:g}",
    source="shuffled maps have 0 by definition; the line is ours: two small ViTs on CIFAR-10 had 0.15 and 0.19 by "
    "gradient-weighted attention, 0.08 by rollout and 0.00 and 0.01 by Grad-CAM, a ResNet 0.13 by Grad-CAM",
    basis="heuristic",
    suggestions=(
        Suggestion(
            treatment="sam",
            paper="Chen et al. 2022, Fig. 3",
            why="Attention of ViTs trained with SAM keeps to the object.",
        ),
        Suggestion(
            treatment="registers",
            paper="Darcet et al. 2024, Fig. 1",
            why="Without outlier tokens attention maps have no spots beside the object.",
        ),
    ),
)
def meaningless_saliency(evidence: Evidence) -> Verdict | None:
    """Maps that say no more than chance."""
    name = "saliency.gain"
    ours = evidence.number(name)
    if ours is None or high(ours) >= MEANINGLESS:
        return None
    statement = (
        "Saliency maps say hardly more than chance about where a class comes from: insertion - deletion is "
        f"{format_number(ours)} above that of the same maps shuffled. Another `method` may do better."
    )
    return Verdict("notice", statement, {name: ours})


@rule(
    "A weak slice",
    ("slices.weak", "slices.worst_slice_accuracy"),
    threshold="an adjusted p below 0.05: accuracy on a part of the images below that of the rest",
    source="Fisher's exact test, corrected by Holm for all slices: at most 5% of exams name one by chance; ours",
    basis="heuristic",
    suggestions=(
        Suggestion(
            treatment="data.augment=deit",
            paper="Cubuk et al. 2020 (RandAugment)",
            why="Strong augmentation varies brightness, contrast and size; more images of that part help most.",
        ),
    ),
)
def weak_slice(evidence: Evidence) -> Verdict | None:
    """Find a part of the images on which the network is worse than on the rest."""
    weak, worst = evidence.number("slices.weak"), evidence.number("slices.worst_slice_accuracy")
    rest, p = evidence.number("slices.rest_accuracy"), evidence.number("slices.smallest_p")
    if weak is None or worst is None or rest is None or p is None or not weak.value:
        return None
    arrays = evidence.measurements["slices"].arrays
    which = "its weakest slice"
    if {"slice_p", "slice_feature", "slice_value"} <= arrays.keys():
        place = int(arrays["slice_p"].argmin())
        which = f"the slice '{arrays['slice_feature'][place]}: {arrays['slice_value'][place]}'"
    others = f" {weak.value - 1:.0f} more {'is' if weak.value == 2 else 'are'} weak." if weak.value > 1 else ""
    statement = (
        f"Accuracy is {format_number(worst)} on the {worst.n} images of {which}, and {format_number(rest)} on the rest"
        f" (adjusted p = {p.value:.2g}).{others}"
    )
    numbers = {"slices.worst_slice_accuracy": worst, "slices.rest_accuracy": rest, "slices.smallest_p": p}
    return Verdict("notice", statement, numbers)


def _complement(share: Scalar) -> Scalar:
    return Scalar(value=1 - share.value, low=1 - high(share), high=1 - low(share), n=share.n)
