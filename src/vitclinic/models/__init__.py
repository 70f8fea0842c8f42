"""Networks: one factory over timm, and what no library has."""

from vitclinic.models import fitted as _fitted  # noqa: F401  (registers its network with timm)
from vitclinic.models.alternet import AlterNet, alternating
from vitclinic.models.build_up import BuildUp, alternate
from vitclinic.models.factory import check_fit, create_model
from vitclinic.models.normalised import Normalised
from vitclinic.models.preact_resnet import PreActResNet

__all__ = [
    "AlterNet",
    "BuildUp",
    "Normalised",
    "PreActResNet",
    "alternate",
    "alternating",
    "check_fit",
    "create_model",
]
