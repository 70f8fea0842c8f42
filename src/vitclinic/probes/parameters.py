"""Parameters of a network: which unit they belong to, and those packed into quantized layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vitclinic.anatomy import Anatomy
from vitclinic.anatomy.units import assign_parameters


def parameters_by_unit(anatomy: Anatomy) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each unit, by the unit's name; no parameter belongs to two units.

    A unit owns the parameters that it uses and that no unit before it does: of a family's unit, those of its module and
    its norm; the position embedding is a unit of its own. Some parameters belong to no unit, such as a class token or a
    norm after the stem.

    Example:
        >>> import timm, torch
        >>> anatomy = Anatomy.of(timm.create_model("vit_tiny_patch16_224", img_size=32), torch.rand(1, 3, 32, 32))
        >>> len(parameters_by_unit(anatomy)["blocks.0.mlp"])  # two linear layers and a norm
        6
    """
    return assign_parameters(anatomy.units)


def packed_weights(network: nn.Module) -> list[Tensor]:
    """Return the weights and biases that quantized layers keep in a packed form, which `parameters()` does not list.

    Example:
        >>> packed_weights(nn.Linear(2, 2))
        []
    """
    return [tensor for module in network.modules() for tensor in packed_in(module)]


def packed_in(module: nn.Module) -> list[Tensor]:
    """Return the weight and the bias of a quantized layer; nothing for any other module."""
    # Recognised by name: importing torch.ao takes a second, and it is being retired.
    if not any(base.__name__ == "WeightedQuantizedModule" for base in type(module).__mro__):
        return []
    quantized: Any = module
    return [tensor for tensor in (quantized.weight(), quantized.bias()) if tensor is not None]
