"""Rules about what is inside a network: the curvature of its loss, its neurons, its tokens and its attention."""

from __future__ import annotations

from vitclinic._core.records import Scalar, Suggestion
from vitclinic.exam.findings.rule import Evidence, Verdict, compare, format_number, high, low, rule

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


DEAD, SATURATED = 0.01, 0.99
LOWER_RATE = Suggestion(
    treatment="schedule.warmup=10%",
    paper="Wang et al. 2022, Table 1",
    why="A longer warm-up keeps the first, largest steps from driving activations to one side.",
)


@rule(
    "Dead units",
    ("sparsity.active",),
    threshold=f"a layer of which less than {DEAD:g} of the neurons are active",
    source="below 0.1 is usual in a trained ViT-B/16 [chen2022 Fig. 2], and ours have 0.43 to 0.56; the line is ours",
    basis="heuristic",
    suggestions=(LOWER_RATE,),
)
def dead_units(evidence: Evidence) -> Verdict | None:
    """Find layers whose neurons are almost never active."""
    layers = {name: share for name, share in evidence.units("sparsity", "active").items() if high(share) < DEAD}
    return _verdict(layers, "Hardly any neuron is ever active in") if layers else None


@rule(
    "Saturated units",
    ("sparsity.active",),
    threshold=f"a layer of which more than {SATURATED:g} of the neurons are active",
    source="an activation function that is always on is linear; the line is ours",
    basis="heuristic",
    suggestions=(LOWER_RATE,),
)
def saturated_units(evidence: Evidence) -> Verdict | None:
    """Find layers whose neurons are almost always active, so that the activation function does nothing."""
    layers = {name: share for name, share in evidence.units("sparsity", "active").items() if low(share) > SATURATED}
    return _verdict(layers, "All neurons are active, and the activation function is linear, in") if layers else None


def _verdict(layers: dict[str, Scalar], says: str) -> Verdict:
    shares = ", ".join(f"{name}: {format_number(share)}" for name, share in layers.items())
    numbers = {f"sparsity.active of {name}": share for name, share in layers.items()}
    return Verdict("problem", f"{says} {len(layers)} of the layers ({shares}).", numbers)


OVER_SMOOTHED = 0.7
MORE_ALIKE = 0.1
"""More than twice as far as seeds of one recipe lay apart: docs/results/layers.md, G1."""


def _is_transformer(evidence: Evidence, probe: str = "token_similarity") -> bool:
    """Return True for a transformer; positions behind the ReLU of a CNN are alike by nature."""
    kinds = evidence.kinds(probe)
    return kinds.count("msa") > kinds.count("conv") + kinds.count("token_mlp")


@rule(
    "Over-smoothed patches",
    ("token_similarity.absolute_cosine_last", "token_similarity.absolute_cosine_rise"),
    threshold=f"absolute cosine of patches after the last block above {OVER_SMOOTHED:g}, and grown over the blocks "
    "(transformers only)",
    source="more than 0.7 in DeiT-Base24 [gong2021 Sec. 3, Fig. 1b]",
    basis="published range",
    reference=f"absolute cosine after the last block above the reference network's by {MORE_ALIKE:g}, interval against "
    "interval, and grown over the blocks",
    suggestions=(
        Suggestion(
            treatment="patch_diversity",
            paper="Gong et al. 2021, Tables 1 and 5, Fig. 3",
            why="Three losses on the patches keep them apart: 80.3 to 82.2 for DeiT-Small24.",
        ),
        Suggestion(
            treatment="conv_stem",
            paper="Wang et al. 2022, Fig. 1",
            why="A convolutional stem gives more diverse tokens to the lower layers.",
        ),
    ),
    applies=_is_transformer,
)
def over_smoothing(evidence: Evidence) -> Verdict | None:
    """Find patches that become alike with depth."""
    name, growth = "token_similarity.absolute_cosine_last", "token_similarity.absolute_cosine_rise"
    ours, rise = evidence.number(name), evidence.number(growth)
    found = ours and compare(ours, evidence.theirs(name), problem=OVER_SMOOTHED, margin=MORE_ALIKE)
    if ours is None or rise is None or not found or low(rise) <= 0:
        return None
    statement = (
        f"After the last block the patches of an image have an absolute cosine of {format_number(ours)}, "
        f"{format_number(rise)} more than after the first{found.tail}."
    )
    return Verdict(found.severity, statement, {name: ours, growth: rise}, found.worse)


OUTLYING, SOME_OUTLYING = 0.02, 0.005


@rule(
    "Outlier tokens",
    ("token_norms.outliers_most",),
    threshold=f"more than {OUTLYING:g} of the patches stand out by their norm after some block is a problem, more than "
    f"{SOME_OUTLYING:g} a notice (transformers only)",
    source="about 2% of the tokens of a large DINOv2 have some ten times the norm of the others, and none do after "
    "training with registers [darcet2024 Sec. 2, Fig. 7]; two small ViTs on CIFAR-10 have none",
    basis="published range",
    suggestions=(
        Suggestion(
            treatment="registers",
            paper="Darcet et al. 2024, Table 2, Fig. 7",
            why="Tokens of its own take what the network stores in patches that it does not need; maps become smooth.",
        ),
    ),
    applies=lambda evidence: _is_transformer(evidence, "token_norms"),
)
def outlier_tokens(evidence: Evidence) -> Verdict | None:
    """Patches that the network has made use of for something else."""
    name = "token_norms.outliers_most"
    ours = evidence.number(name)
    found = ours and compare(ours, None, problem=OUTLYING, notice=SOME_OUTLYING, margin=0)
    if ours is None or not found:
        return None
    shares = evidence.units("token_norms", "outliers")
    unit = next((each for each, share in shares.items() if share.value == ours.value), None)
    where = "" if unit is None else f" after {unit}"
    statement = f"A share of {format_number(ours)} of the patches has a norm far above that of the others{where}."
    return Verdict(found.severity, statement, {name: ours})


UNIFORM, DENSE = 0.99, 0.95
DENSER = 0.03
"""As far as seeds of one recipe lay apart: docs/results/layers.md, H1."""
ONE_KEY = 0.05


def _guesses(evidence: Evidence) -> bool:
    """Tell whether the network is known to be no better than naming the commonest class."""
    accuracy, commonest = evidence.number("accuracy.accuracy"), evidence.number("accuracy.commonest")
    return accuracy is not None and commonest is not None and low(accuracy) <= commonest.value


@rule(
    "Over-dense attention",
    ("attention_entropy.ratio",),
    threshold=f"entropy above {UNIFORM:g} of its maximum, mean over layers, is a problem, above {DENSE:g} a notice",
    source="trained ViT-S and -B have 4.4 of 5.3, 0.83 [hyeonwoo2023 Fig. 4], but small ViTs on CIFAR-10 0.91 to 0.98 "
    "(docs/results/layers.md): dense is usual, and only attention that does no more than average is called sick",
    basis="heuristic",
    reference=f"entropy / maximum above the reference network's by {DENSER:g}, interval against interval",
    suggestions=(
        Suggestion(
            treatment="context_broadcasting",
            paper="Hyeon-Woo et al. 2023, Fig. 7a and 9, Table 1",
            why="The mean of all tokens comes for nothing, attention may be sparse; it gains most with few heads.",
        ),
        Suggestion(
            treatment="local_attention",
            paper="Park & Kim 2022, Fig. 7",
            why="A neighbourhood of 5 x 5 has fewer keys to average, and beat global attention on small data.",
        ),
    ),
)
def over_dense_attention(evidence: Evidence) -> Verdict | None:
    """Find attention close to the mean of all tokens, in a network that has learned: untrained ones have 0.9999."""
    name = "attention_entropy.ratio"
    ours = None if _guesses(evidence) else evidence.number(name)
    found = ours and compare(ours, evidence.theirs(name), problem=UNIFORM, notice=DENSE, margin=DENSER)
    if ours is None or not found:
        return None
    statement = (
        f"Attention has {format_number(ours)} of the entropy of uniform attention, mean over layers{found.tail}."
    )
    return Verdict(found.severity, statement, {name: ours}, found.worse)


@rule(
    "Saturated attention",
    ("attention_entropy.ratio",),
    threshold=f"a layer whose entropy is below {ONE_KEY:g} of its maximum",
    source="each query then sees about one key, and the softmax passes hardly any gradient "
    "(its Jacobian is sum(a - a^2), hyeonwoo2023 Sec. 3.1); the line is ours",
    basis="heuristic",
    suggestions=(
        Suggestion(
            treatment="conv_stem",
            paper="Wang et al. 2022, Table 1",
            why="A convolutional stem trains at rates at which a patchify stem breaks down.",
        ),
    ),
)
def saturated_attention(evidence: Evidence) -> Verdict | None:
    """Find attention whose softmax picks a single key."""
    ratios = evidence.units("attention_entropy", "ratio")
    layers = {name: ratio for name, ratio in ratios.items() if high(ratio) < ONE_KEY}
    if not layers:
        return None
    shares = ", ".join(f"{name}: {format_number(ratio)}" for name, ratio in layers.items())
    statement = f"Attention has collapsed onto single keys in {len(layers)} of the layers ({shares} of the entropy)."
    numbers = {f"attention_entropy.ratio of {name}": ratio for name, ratio in layers.items()}
    steepness = evidence.units("softmax_jacobian", "ratio")
    numbers |= {f"softmax_jacobian.ratio of {name}": steepness[name] for name in layers if name in steepness}
    return Verdict("problem", statement, numbers)
