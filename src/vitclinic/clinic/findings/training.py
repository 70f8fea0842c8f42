"""Rules about how training went, from the rows of a run's metrics.jsonl."""

from __future__ import annotations

import math
from statistics import median

from vitclinic.clinic.findings.evidence import Evidence
from vitclinic.clinic.findings.rule import Verdict, rule
from vitclinic.finding import Suggestion
from vitclinic.measurement import Scalar

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
    """A training that diverged, or whose loss jumped."""
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
    """A loss that ends where it began."""
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
    """How far a loss lay above the median of the steps before it, a twentieth of the run."""
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
