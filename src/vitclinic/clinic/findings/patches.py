"""Rules about the patches of an image."""

from __future__ import annotations

from vitclinic.clinic.findings.evidence import Evidence, low, shown
from vitclinic.clinic.findings.rule import Verdict, compared, rule
from vitclinic.finding import Suggestion

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
    found = ours and compared(ours, evidence.theirs(name), problem=OVER_SMOOTHED, margin=MORE_ALIKE)
    if ours is None or rise is None or not found or low(rise) <= 0:
        return None
    statement = (
        f"After the last block the patches of an image have an absolute cosine of {shown(ours)}, "
        f"{shown(rise)} more than after the first{found.tail}."
    )
    return Verdict(found.severity, statement, {name: ours, growth: rise}, found.worse)
