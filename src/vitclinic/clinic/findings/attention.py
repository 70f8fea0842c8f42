"""Rules about attention."""

from __future__ import annotations

from vitclinic.clinic.findings.evidence import Evidence, high, shown
from vitclinic.clinic.findings.rule import Verdict, compared, rule
from vitclinic.finding import Suggestion

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
    found = ours and compared(ours, evidence.theirs(name), problem=UNIFORM, notice=DENSE, margin=DENSER)
    if ours is None or not found:
        return None
    statement = f"Attention has {shown(ours)} of the entropy of uniform attention, mean over layers{found.tail}."
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
    shares = ", ".join(f"{name}: {shown(ratio)}" for name, ratio in layers.items())
    statement = f"Attention has collapsed onto single keys in {len(layers)} of the layers ({shares} of the entropy)."
    return Verdict("problem", statement, {f"attention_entropy.ratio of {name}": layers[name] for name in layers})
