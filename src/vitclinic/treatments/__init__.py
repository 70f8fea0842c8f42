"""Treatments: every remedy of the papers, and the seams through which a remedy changes a training run."""

from vitclinic.treatments.extra_block import ExtraBlock
from vitclinic.treatments.gap_head import GapHead
from vitclinic.treatments.local_attention import LocalAttention
from vitclinic.treatments.no_softmax import NoSoftmax
from vitclinic.treatments.relu_activation import ReluActivation, gelu_to_relu
from vitclinic.treatments.spatial_smoothing import Blur, SpatialSmoothing
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
    "Blur",
    "Case",
    "ExtraBlock",
    "GapHead",
    "LocalAttention",
    "Losses",
    "LossesAndGradients",
    "NoSoftmax",
    "Objective",
    "ReluActivation",
    "SpatialSmoothing",
    "StepRule",
    "TalkingHeads",
    "Treatment",
    "case_of",
    "gelu_to_relu",
    "known_treatments",
    "operate",
    "parse_treatments",
    "register",
    "treat",
    "treatments_of",
]
