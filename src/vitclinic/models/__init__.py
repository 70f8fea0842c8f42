"""Networks: one factory over timm, and what no library has."""

from vitclinic.models import fitted as _fitted  # noqa: F401  (registers its network with timm)
from vitclinic.models.factory import check_fit, create_model
from vitclinic.models.normalised import Normalised

__all__ = ["Normalised", "check_fit", "create_model"]
