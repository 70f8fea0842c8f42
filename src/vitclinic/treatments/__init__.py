"""Treatments: every remedy of the papers, and the seams through which a remedy changes a training run."""

from vitclinic.treatments.local_attention import LocalAttention
from vitclinic.treatments.no_softmax import NoSoftmax
from vitclinic.treatments.surgery import case_of, operate, treat, treatments_of
from vitclinic.treatments.talking_heads import TalkingHeads
from vitclinic.treatments.treatment import (
    BatchTransform,
    Case,
    Losses,
    LossesAndGradients,
    Objective,
    StepRule,
    Treatment,
    known_treatments,
    parse_treatments,
    register,
)

__all__ = [
    "BatchTransform",
    "Case",
    "LocalAttention",
    "Losses",
    "LossesAndGradients",
    "NoSoftmax",
    "Objective",
    "StepRule",
    "TalkingHeads",
    "Treatment",
    "case_of",
    "known_treatments",
    "operate",
    "parse_treatments",
    "register",
    "treat",
    "treatments_of",
]
