"""Treatments: the seams through which a remedy changes a training run."""

from vitclinic.treatments.treatment import (
    BatchTransform,
    Case,
    Losses,
    LossesAndGradients,
    Objective,
    StepRule,
    Treatment,
    parse_treatments,
    register,
)

__all__ = [
    "BatchTransform",
    "Case",
    "Losses",
    "LossesAndGradients",
    "Objective",
    "StepRule",
    "Treatment",
    "parse_treatments",
    "register",
]
