"""Replacement of every GELU of a network by ReLU."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from torch import nn
from torch.nn import functional as F

from vitclinic._core.errors import TreatmentError
from vitclinic.data import ImageSpec
from vitclinic.treatments.treatment import Treatment, register


def gelu_to_relu(network: nn.Module) -> int:
    """Replace every GELU of any network by ReLU, in place.

    A GELU is a module with "gelu" in the name of its class (PyTorch's, timm's and Hugging Face's, exact or
    approximate), or `torch.nn.functional.gelu` stored by a module as its activation. A GELU called by name in a
    `forward` cannot be found.

    Args:
        network: Any network, of a known family or not.

    Returns:
        The number of replaced activations.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        >>> gelu_to_relu(network)
        1
        >>> network[1]
        ReLU()
    """
    replaced = 0
    for parent in list(network.modules()):
        for name, child in parent._modules.items():
            if child is not None and is_gelu(child):
                parent._modules[name] = nn.ReLU()
                replaced += 1
        for name, value in list(vars(parent).items()):
            if _is_functional_gelu(value):
                setattr(parent, name, F.relu)
                replaced += 1
                if isinstance(parent, nn.TransformerEncoderLayer):
                    parent.activation_relu_or_gelu = 1  # selects its fast path: 1 is ReLU
    return replaced


def is_gelu(module: nn.Module) -> bool:
    """Tell whether a module is a GELU of any kind, by the name of its class."""
    return "gelu" in type(module).__name__.lower()


def _is_functional_gelu(value: Any) -> bool:
    return value is F.gelu or (isinstance(value, functools.partial) and value.func is F.gelu)


@register
class ReluActivation(Treatment):
    """Every GELU replaced by ReLU, the setting in which [chen2022 App. G] compares condition numbers of the NTK."""

    name: ClassVar[str] = "relu_activation"
    paper: ClassVar[str] = "chen2022 App. G; wang2022 Table 5"
    changes: ClassVar[str] = "every GELU becomes a ReLU"
    costs: ClassVar[str] = "no parameters; no more time than with GELU"
    families: ClassVar[tuple[str, ...] | None] = (
        *("timm ViT", "timm PiT", "timm Swin", "timm Swin V2", "timm MLP-Mixer", "timm ConvNeXt", "timm VOLO"),
        *("torchvision ViT", "torchvision Swin", "torchvision ConvNeXt"),
        *("Hugging Face ViT", "Hugging Face DeiT", "Hugging Face Swin"),
    )

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        if gelu_to_relu(network) == 0:
            raise TreatmentError(
                f"relu_activation found no GELU among the modules of this {type(network).__name__}: it uses other"
                " activations, or calls GELU by name in its forward."
            )
        return network
