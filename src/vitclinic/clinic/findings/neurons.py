"""Rules about the neurons behind activation functions."""

from __future__ import annotations

from vitclinic.clinic.findings.evidence import Evidence, high, low, shown
from vitclinic.clinic.findings.rule import Verdict, rule
from vitclinic.finding import Suggestion
from vitclinic.measurement import Scalar

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
    shares = ", ".join(f"{name}: {shown(share)}" for name, share in layers.items())
    numbers = {f"sparsity.active of {name}": share for name, share in layers.items()}
    return Verdict("problem", f"{says} {len(layers)} of the layers ({shares}).", numbers)
