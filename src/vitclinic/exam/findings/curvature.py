"""Rules about the curvature of the loss."""

from __future__ import annotations

from vitclinic._core.records import Scalar, Suggestion
from vitclinic.exam.findings.rule import Evidence, Verdict, compare, format_number, high, rule

SHARP_VIT, SHARP_RESNET = 700.0, 179.8
"""lambda_max of about that of ViT-B/16, and of ResNet-152, trained on ImageNet without SAM [chen2022 Table 1]."""
SHARPER = 2.0
"""So many times the reference network's: Lanczos' interval is narrow, and says nothing of other trainings."""
NON_CONVEX = 0.1


@rule(
    "Sharp minimum",
    ("sharpness.lambda_max",),
    threshold=f"lambda_max above {SHARP_VIT:g} is a problem, above {SHARP_RESNET:g} a notice",
    source="ViT-B/16 has 738.8 and ResNet-152 179.8 on ImageNet; with SAM 20.9 and 42.0 [chen2022 Table 1]",
    basis="published range",
    reference=f"lambda_max more than {SHARPER:g} times the reference network's, at losses within a factor of 2: "
    "cross-entropy flattens as it is fitted",
    suggestions=(
        Suggestion(
            treatment="sam",
            paper="Chen et al. 2022, Tables 1 and 2",
            why="SAM lowered lambda_max of ViT-B/16 from 738.8 to 20.9 and raised its accuracy by 5.3 points.",
        ),
        Suggestion(
            treatment="conv_stem",
            paper="Wang et al. 2022, Table 1; Chen et al. 2022, Table 4",
            why="The embedding is the sharpest component; with a convolutional stem SAM no longer beat AdamW.",
        ),
    ),
)
def sharp_minimum(evidence: Evidence) -> Verdict | None:
    """Find a minimum whose Hessian has a large largest eigenvalue."""
    name = "sharpness.lambda_max"
    ours, theirs = evidence.number(name), evidence.theirs(name) if _losses_alike(evidence) else None
    if ours is None:
        return None
    found = compare(ours, theirs, problem=SHARP_VIT, notice=SHARP_RESNET, margin=0.0, factor=SHARPER)
    if found is None:
        return None
    statement = f"The largest eigenvalue of the training loss's Hessian is {format_number(ours)}{found.tail}."
    return Verdict(found.severity, statement, {name: ours}, found.worse)


def _losses_alike(evidence: Evidence) -> bool:
    """Return True if the reference network is at a loss where its curvature can be compared with this one's."""
    ours, theirs = evidence.number("sharpness.loss"), evidence.theirs("sharpness.loss")
    eigenvalue = evidence.theirs("sharpness.lambda_max")
    if ours is None or theirs is None or eigenvalue is None or min(ours.value, theirs.value, eigenvalue.value) <= 0:
        return False
    return 0.5 <= ours.value / theirs.value <= 2.0


@rule(
    "No minimum yet",
    ("sharpness.lambda_max",),
    threshold="lambda_max below 0",
    source="no direction bends down at a minimum; our reading, no paper draws a line",
    basis="heuristic",
    suggestions=(
        Suggestion(
            treatment="schedule.name=cosine",
            paper="Chen et al. 2022, Table 12 (its recipes decay the rate to 0)",
            why="Training longer, down to a rate of 0, lets the weights settle.",
        ),
    ),
)
def no_minimum(evidence: Evidence) -> Verdict | None:
    """Find weights at which even the largest eigenvalue of the Hessian is negative."""
    ours = evidence.number("sharpness.lambda_max")
    if ours is None or high(ours) >= 0:
        return None
    statement = (
        f"The Hessian's eigenvalue of largest magnitude is negative, {format_number(ours)}: training has not arrived."
    )
    return Verdict("notice", statement, {"sharpness.lambda_max": ours})


@rule(
    "Non-convex loss",
    ("hessian_spectrum.nep",),
    threshold=f"NEP above {NON_CONVEX:g}, measured early in training (at the end of warm-up)",
    source='"ViT has a number of negative Hessian eigenvalues, ResNet only a few" [park2022 Fig. 4] gives no number; '
    "at the end of warm-up a small ResNet had 0 and a small ViT 0.25 (docs/results/curvature.md)",
    basis="heuristic",
    reference="NEP above the reference network's, interval against interval",
    suggestions=(
        Suggestion(
            treatment="gap_head",
            paper="Park & Kim 2022, Fig. 6",
            why="The mean of the patches in place of a class token: fewer negative eigenvalues, +2.7 points.",
        ),
        Suggestion(
            treatment="local_attention",
            paper="Park & Kim 2022, Fig. 7",
            why="Attention to a neighbourhood (kernel 5 most) has fewer negative eigenvalues than global attention.",
        ),
    ),
)
def non_convex_loss(evidence: Evidence) -> Verdict | None:
    """Find a loss with many negative ones among the largest eigenvalues of mini-batches."""
    name = "hessian_spectrum.nep"
    ours = evidence.number(name)
    found = ours and compare(ours, evidence.theirs(name), problem=NON_CONVEX, margin=0.0)
    if ours is None or not found:
        return None
    numbers: dict[str, Scalar] = {name: ours}
    if (positive := evidence.number("hessian_spectrum.ape")) is not None:
        numbers["hessian_spectrum.ape"] = positive
    statement = (
        f"Of the largest Hessian eigenvalues of training mini-batches {format_number(ours)} are negative{found.tail}."
    )
    return Verdict(found.severity, statement, numbers, found.worse, _more_heads(evidence))


def _more_heads(evidence: Evidence) -> tuple[Suggestion, ...]:
    measurement = evidence.measurements.get("attention_entropy")
    heads = None if measurement is None else measurement.arrays.get("head_entropy")
    if heads is None or heads.ndim != 2 or heads.shape[1] == 0:
        return ()
    return (
        Suggestion(
            treatment=f"model.num_heads={2 * heads.shape[1]}",
            paper="Park & Kim 2022, Fig. C.5",
            why="A lack of heads makes the loss non-convex: NEP and APE fall as heads are added.",
        ),
    )
