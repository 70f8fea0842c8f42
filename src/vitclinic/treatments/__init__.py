"""Treatments: every remedy of the papers, and the seams through which a remedy changes a training run."""

from vitclinic.treatments.context_broadcasting import ContextBroadcasting, ScaledContextBroadcasting
from vitclinic.treatments.squeeze_excitation import SqueezeExcitation
from vitclinic.treatments.surgery import case_of, operate, treat, treatments_of
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
from vitclinic.treatments.uniform_heads import UniformHeadAttention

__all__ = [
    "BatchTransform",
    "Case",
    "ContextBroadcasting",
    "Losses",
    "LossesAndGradients",
    "Objective",
    "ScaledContextBroadcasting",
    "SqueezeExcitation",
    "StepRule",
    "Treatment",
    "UniformHeadAttention",
    "case_of",
    "known_treatments",
    "operate",
    "parse_treatments",
    "register",
    "treat",
    "treatments_of",
]
