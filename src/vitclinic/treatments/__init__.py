"""Treatments: every remedy of the papers, and the seams through which a remedy changes a training run."""

from vitclinic.treatments.conv_stem import ConvStem, ConvStemTreatment
from vitclinic.treatments.ffn_variant import FFNVariant
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

__all__ = [
    "BatchTransform",
    "Case",
    "ConvStem",
    "ConvStemTreatment",
    "FFNVariant",
    "Losses",
    "LossesAndGradients",
    "Objective",
    "StepRule",
    "Treatment",
    "case_of",
    "known_treatments",
    "operate",
    "parse_treatments",
    "register",
    "treat",
    "treatments_of",
]
