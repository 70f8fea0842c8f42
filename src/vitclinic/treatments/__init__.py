"""Treatments: every remedy from the papers, and the hooks through which a treatment changes a training run."""

from typing import TYPE_CHECKING

from vitclinic._core import make_lazy

if TYPE_CHECKING:
    from vitclinic.treatments.adversarial import Adversarial, FastGradientSign
    from vitclinic.treatments.context_broadcasting import ContextBroadcasting, ScaledContextBroadcasting
    from vitclinic.treatments.conv_stem import ConvStem, ConvStemTreatment
    from vitclinic.treatments.extra_block import ExtraBlock
    from vitclinic.treatments.ffn_variant import FFNVariant
    from vitclinic.treatments.gap_head import GapHead
    from vitclinic.treatments.local_attention import LocalAttention
    from vitclinic.treatments.mimetic_init import MimeticInit
    from vitclinic.treatments.no_softmax import NoSoftmax
    from vitclinic.treatments.patch_diversity import PatchDiversity
    from vitclinic.treatments.patch_dropout import PatchDropout, PatchDropoutTreatment
    from vitclinic.treatments.patch_losses import Objective, contrastive_loss, cosine_loss, mixing_loss
    from vitclinic.treatments.registers import Registers, RegistersTreatment
    from vitclinic.treatments.relu_activation import ReluActivation, gelu_to_relu
    from vitclinic.treatments.sam import SharpnessAware, SharpnessAwareStep
    from vitclinic.treatments.sam_core import Ascent
    from vitclinic.treatments.sam_optimizer import SAM
    from vitclinic.treatments.sequence_pooling import SequencePool, SequencePooling
    from vitclinic.treatments.spatial_smoothing import Blur, SpatialSmoothing
    from vitclinic.treatments.squeeze_excitation import SqueezeExcitation
    from vitclinic.treatments.stems import PoolingStem, ResidualStem
    from vitclinic.treatments.surgery import image_spec, operate, treat, treatments_of
    from vitclinic.treatments.talking_heads import TalkingHeads
    from vitclinic.treatments.treatment import (
        BatchTransform,
        InputAscent,
        Losses,
        LossesAndGradients,
        MixedSteps,
        StepRule,
        TakesInputAscent,
        Treatment,
        Treatments,
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
    "Blur",
    "ContextBroadcasting",
    "ConvStem",
    "ConvStemTreatment",
    "ExtraBlock",
    "FFNVariant",
    "FastGradientSign",
    "GapHead",
    "InputAscent",
    "LocalAttention",
    "Losses",
    "LossesAndGradients",
    "MimeticInit",
    "MixedSteps",
    "NoSoftmax",
    "Objective",
    "PatchDiversity",
    "PatchDropout",
    "PatchDropoutTreatment",
    "PoolingStem",
    "Registers",
    "RegistersTreatment",
    "ReluActivation",
    "ResidualStem",
    "ScaledContextBroadcasting",
    "SequencePool",
    "SequencePooling",
    "SharpnessAware",
    "SharpnessAwareStep",
    "SpatialSmoothing",
    "SqueezeExcitation",
    "StepRule",
    "TakesInputAscent",
    "TalkingHeads",
    "Treatment",
    "Treatments",
    "UniformHeadAttention",
    "contrastive_loss",
    "cosine_loss",
    "gelu_to_relu",
    "image_spec",
    "known_treatments",
    "mixing_loss",
    "operate",
    "parse_treatments",
    "register",
    "treat",
    "treatments_of",
]

make_lazy(__name__)
