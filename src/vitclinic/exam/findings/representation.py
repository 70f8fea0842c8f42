"""Rules about the neurons behind activation functions."""

from __future__ import annotations

from vitclinic._core.records import Scalar, Suggestion
from vitclinic.exam.findings.rule import Evidence, Verdict, compare, format_number, high, low, rule

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
    """Layers that give nothing."""
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
    """Layers whose activation function does nothing."""
    layers = {name: share for name, share in evidence.units("sparsity", "active").items() if low(share) > SATURATED}
    return _verdict(layers, "All neurons are active, and the activation function is linear, in") if layers else None


def _verdict(layers: dict[str, Scalar], says: str) -> Verdict:
    shares = ", ".join(f"{name}: {format_number(share)}" for name, share in layers.items())
    numbers = {f"sparsity.active of {name}": share for name, share in layers.items()}
    return Verdict("problem", f"{says} {len(layers)} of the layers ({shares}).", numbers)


OVER_SMOOTHED = 0.7
MORE_ALIKE = 0.1
"""More than twice as far as seeds of one recipe lay apart: docs/results/layers.md, G1."""


def _is_transformer(evidence: Evidence) -> bool:
    """Positions behind a ReLU are alike by nature, in CNNs: the paper's number is one of transformers."""
    kinds = evidence.kinds("token_similarity")
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
    """Patches that have become alike with depth."""
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


UNIFORM, DENSE = 0.99, 0.95
DENSER = 0.03
"""As far as seeds of one recipe lay apart: docs/results/layers.md, H1."""
ONE_KEY = 0.05


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
    """Attention close to the mean of all tokens."""
    name = "attention_entropy.ratio"
    ours = evidence.number(name)
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
    """A softmax that picks one key."""
    ratios = evidence.units("attention_entropy", "ratio")
    layers = {name: ratio for name, ratio in ratios.items() if high(ratio) < ONE_KEY}
    if not layers:
        return None
    shares = ", ".join(f"{name}: {format_number(ratio)}" for name, ratio in layers.items())
    statement = f"Attention has collapsed onto single keys in {len(layers)} of the layers ({shares} of the entropy)."
    return Verdict("problem", statement, {f"attention_entropy.ratio of {name}": layers[name] for name in layers})
