"""Treatments: every remedy of the papers, and the seams through which a remedy changes a training run."""

from vitclinic.treatments.adversarial import Adversarial, FastGradientSign
from vitclinic.treatments.ascent import Ascent
from vitclinic.treatments.context_broadcasting import ContextBroadcasting, ScaledContextBroadcasting
from vitclinic.treatments.conv_stem import ConvStem, ConvStemTreatment
from vitclinic.treatments.ffn_variant import FFNVariant
from vitclinic.treatments.patch_diversity import PatchDiversity
from vitclinic.treatments.patch_losses import contrastive_loss, cosine_loss, mixing_loss
from vitclinic.treatments.sam import SharpnessAware, SharpnessAwareStep
from vitclinic.treatments.sam_optimizer import SAM
from vitclinic.treatments.squeeze_excitation import SqueezeExcitation
from vitclinic.treatments.surgery import case_of, operate, treat, treatments_of
from vitclinic.treatments.treatment import (
    BatchTransform,
    Case,
    InputAscent,
    Losses,
    LossesAndGradients,
    Objective,
    StepRule,
    TakesInputAscent,
    Treatment,
    known_treatments,
    parse_treatments,
    register,
)
from vitclinic.treatments.uniform_heads import UniformHeadAttention

__all__ = [
    "SAM",
    "Adversarial",
    "Ascent",
    "BatchTransform",
    "Case",
    "ContextBroadcasting",
    "ConvStem",
    "ConvStemTreatment",
    "FFNVariant",
    "FastGradientSign",
    "InputAscent",
    "Losses",
    "LossesAndGradients",
    "Objective",
    "PatchDiversity",
    "ScaledContextBroadcasting",
    "SharpnessAware",
    "SharpnessAwareStep",
    "SqueezeExcitation",
    "StepRule",
    "TakesInputAscent",
    "Treatment",
    "UniformHeadAttention",
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
