"""Networks: a factory over timm, pre-activation ResNet, AlterNet and the build-up rule, hybrid ViT."""

from vitclinic.models import factory as _fitted  # noqa: F401  (registers its network with timm)
from vitclinic.models.alternet import AlterNet, BuildUp, alternate, msa_pattern
from vitclinic.models.factory import Normalized, check_fit, create_model
from vitclinic.models.headed import Headed
from vitclinic.models.hybrid import ConvTokenizer
from vitclinic.models.preact_resnet import PreActResNet

__all__ = [
    "AlterNet",
    "BuildUp",
    "ConvTokenizer",
    "Headed",
    "Normalized",
    "PreActResNet",
    "alternate",
    "check_fit",
    "create_model",
    "msa_pattern",
]
