"""Treatments: every remedy of the papers, and the seams through which a remedy changes a training run."""

from vitclinic.treatments.patch_diversity import PatchDiversity
from vitclinic.treatments.patch_losses import contrastive_loss, cosine_loss, mixing_loss
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
    "Losses",
    "LossesAndGradients",
    "Objective",
    "PatchDiversity",
    "StepRule",
    "Treatment",
    "case_of",
    "contrastive_loss",
    "cosine_loss",
    "known_treatments",
    "mixing_loss",
    "operate",
    "parse_treatments",
    "register",
    "treat",
    "treatments_of",
]
