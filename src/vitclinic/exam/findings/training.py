"""Rules about how training went, from the rows of a run's metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from vitclinic._core.records import Finding, Scalar, Suggestion
from vitclinic.exam.findings.rule import (
    TRAINING,
    Evidence,
    Rule,
    Verdict,
    difference,
    format_number,
    high,
    low,
    rule,
    usable,
)

EXPLODED = 10.0
"""Times the first loss: what `vitclinic train` calls diverged."""
SPIKE = 0.5
"""Of the first loss, above the steps before."""
STALLED = 0.98
"""Of the first loss, at the end."""
ENOUGH_STEPS = 50
CONV_STEM = Suggestion(
    treatment="conv_stem",
    paper="Wang et al. 2022, Tables 1 and 2",
    why="A convolutional stem with BatchNorm and ReLU trained at rates at which the patchify stem crashed.",
)
WARMUP = Suggestion(
    treatment="schedule.warmup=10%",
    paper="Wang et al. 2022, Table 1",
    why="Warm-up keeps the first steps small, while the loss is steepest.",
)


@rule(
    "Unstable training",
    ("training.loss",),
    threshold=f"a loss that is not finite or {EXPLODED:g} times the first; or one that rises above the median of the "
    f"steps before by more than {SPIKE:g} of the first loss",
    source='the former is the "crash" of wang2022 Table 1, as `vitclinic train` tells it; the latter is ours: '
    "at most 0.28 in 44 runs at up to 16 times the usual rate, 0.39 to 1.41 in six at 64 times it (docs/results)",
    basis="heuristic",
    suggestions=(WARMUP, CONV_STEM),
)
def unstable_training(evidence: Evidence) -> Verdict | None:
    """Find a training that diverged, or whose loss jumped."""
    losses = evidence.curve("train", "loss")
    first = max(abs(losses[0]), 1.0)
    broken = [loss for loss in (*losses, *evidence.curve("val", "nll")) if not math.isfinite(loss)]
    largest = max((loss for loss in losses if math.isfinite(loss)), default=math.nan)
    numbers = {"training.loss_first": Scalar(value=losses[0]), "training.loss_largest": Scalar(value=largest)}
    if broken or largest > EXPLODED * first:
        how = "became infinite or NaN" if broken else f"rose to {largest:.3g}"
        return Verdict("problem", f"Training diverged: the loss {how}.", numbers, suggestions=_lower_rate(evidence))
    rise = _largest_rise(losses)
    if rise <= SPIKE * first:
        return None
    numbers["training.loss_rise"] = Scalar(value=rise)
    statement = f"The loss jumped by {rise:.3g} above the steps before it, from a first loss of {losses[0]:.3g}."
    return Verdict("problem", statement, numbers, suggestions=_lower_rate(evidence))


@rule(
    "Training stalled",
    ("training.loss",),
    threshold=f"median loss of the last tenth of the steps ({ENOUGH_STEPS} or more) above {STALLED:g} of the first",
    source="ours: at usual rates small ViTs on CIFAR-10 end below 0.9 after 200 steps (docs/results/remedies.md, W1)",
    basis="heuristic",
    suggestions=(WARMUP, CONV_STEM),
)
def stalled_training(evidence: Evidence) -> Verdict | None:
    """Find a training loss that ends where it began."""
    losses = evidence.curve("train", "loss")
    if len(losses) < ENOUGH_STEPS or not all(map(math.isfinite, losses)):
        return None
    last = median(losses[-(len(losses) // 10) :])
    if last <= STALLED * losses[0]:
        return None
    numbers = {"training.loss_first": Scalar(value=losses[0]), "training.loss_last": Scalar(value=last)}
    statement = f"The training loss began at {losses[0]:.3g} and ended at {last:.3g}: nothing was learnt."
    return Verdict("problem", statement, numbers, suggestions=_lower_rate(evidence))


def _largest_rise(losses: list[float]) -> float:
    """Return how far a loss lay above the median of the steps before it, a twentieth of the run."""
    window = max(5, len(losses) // 20)
    return max((losses[i] - median(losses[max(0, i - window) : i]) for i in range(1, len(losses))), default=0.0)


def _lower_rate(evidence: Evidence) -> tuple[Suggestion, ...]:
    peak = max((rate for rate in evidence.curve("train", "lr") if math.isfinite(rate)), default=0.0)
    if peak <= 0:
        return ()
    return (
        Suggestion(
            treatment=f"optimizer.lr={peak / 10:.1g}",
            paper="Wang et al. 2022, Table 1",
            why=f"The rate rose to {peak:.3g}; the same networks that crashed at a high rate trained at a lower one.",
        ),
    )


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
    """Find a network that fits its training images and no others; or neither, where a reference network does both."""
    return _gap(evidence) or _turned(evidence) or _weak_bias(evidence)


def _gap(evidence: Evidence) -> Verdict | None:
    train, test = evidence.number("train_nll.nll"), evidence.number("accuracy.nll")
    if train is None or test is None:
        return None
    floor = evidence.number("train_nll.target_entropy") or Scalar(value=0.0)
    gap = difference(test, difference(train, floor))
    if low(gap) <= NOTICED:
        return None
    seen = f"{format_number(train)} on training images{_count(evidence)}"
    statement = f"The NLL is {seen} and {format_number(test)} on others."
    numbers = {"train_nll.nll": train, "accuracy.nll": test}
    return Verdict("problem" if low(gap) > STARVED else "notice", statement, numbers)


def _count(evidence: Evidence) -> str:
    measurement = usable(evidence.measurements.get("train_nll"))
    return "" if measurement is None else f", of which there are {measurement.provenance.images},"


def _turned(evidence: Evidence) -> Verdict | None:
    """Find a loss on val that fell and rose again."""
    curve = [nll for nll in evidence.curve("val", "nll") if math.isfinite(nll)]
    if not curve or curve[-1] - min(curve) <= TURNED:
        return None
    numbers = {"training.val_nll_lowest": Scalar(value=min(curve)), "training.val_nll_last": Scalar(value=curve[-1])}
    statement = f"The NLL on val fell to {min(curve):.3g} and rose to {curve[-1]:.3g} by the end of training."
    return Verdict("problem", statement, numbers)


def _weak_bias(evidence: Evidence) -> Verdict | None:
    """Find a network that is worse on training and on test images than the reference network."""
    names = "train_nll.nll", "accuracy.accuracy"
    nll, accuracy = map(evidence.number, names)
    their_nll, their_accuracy = map(evidence.theirs, names)
    if nll is None or accuracy is None or their_nll is None or their_accuracy is None:
        return None
    if low(nll) <= high(their_nll) or high(accuracy) >= low(their_accuracy):
        return None
    statement = (
        f"It fits images of training less well than the reference network (NLL {format_number(nll)} against "
        f"{format_number(their_nll)}) and is less accurate, too ({format_number(accuracy)} against"
        f" {format_number(their_accuracy)})."
    )
    return Verdict("notice", statement, {names[0]: nll, names[1]: accuracy}, against_reference=True)


ENOUGH = 3
"""Probes, the training's metrics counting as one."""
TITLE = "Healthy"
THRESHOLD = (
    f"No rule found a problem, accuracy is above that of guessing, and {ENOUGH} probes or more (the training's metrics "
    "count as one) were looked at: our choice."
)


def healthy(evidence: Evidence, found: Sequence[Finding], rules: Sequence[Rule]) -> Finding | None:
    """Return the finding that no rule found a problem, with what was looked at; None where too little was."""
    accuracy, guess = evidence.number("accuracy.accuracy"), evidence.number("accuracy.commonest")
    if accuracy is None or guess is None or low(accuracy) <= guess.value:
        return None
    looked = [rule for rule in rules if rule.looks(evidence)]
    names = dict.fromkeys(name for rule in looked for group in rule.needs for name in group if evidence.has(name))
    if any(finding.severity == "problem" for finding in found) or len({_probe(name) for name in names}) < ENOUGH:
        return None
    return Finding(
        rule="healthy",
        title=TITLE,
        severity="healthy",
        statement=_statement(accuracy, found, looked, [rule for rule in rules if rule not in looked]),
        numbers={name: number for name in names if (number := evidence.number(name)) is not None},
        threshold=THRESHOLD,
        basis="heuristic",
    )


def _statement(accuracy: Scalar, found: Sequence[Finding], looked: Sequence[Rule], missed: Sequence[Rule]) -> str:
    noticed = list(dict.fromkeys(finding.title.lower() for finding in found if finding.severity == "notice"))
    others = [rule for rule in looked if rule.title.lower() not in noticed]
    says = f"Accuracy is {format_number(accuracy)}, and no problem was found. Looked for: {_titles(others)}."
    if noticed:
        says = f"{says} Worth a look: {', '.join(noticed)}."
    return f"{says} Not looked for, as its numbers are not there: {_titles(missed)}." if missed else says


def _titles(rules: Sequence[Rule]) -> str:
    return ", ".join(rule.title.lower() for rule in rules)


def _probe(name: str) -> str:
    return "training" if name in TRAINING else name.partition(".")[0]
