"""Surgery: treatments applied to a network, each once, where they fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vitclinic._core.errors import AnatomyError, RecipeError, TreatmentError
from vitclinic.anatomy import eval_mode
from vitclinic.anatomy.families import recognise
from vitclinic.data import ImageSpec
from vitclinic.treatments.treatment import Treatment, parse_treatments

_RECORD = "treated_with"
"""The attribute of a network that holds the names of the treatments it had, in order."""


def treat(
    network: nn.Module, *treatments: str | dict[str, Any] | Treatment, spec: ImageSpec | None = None
) -> nn.Module:
    """Apply the surgery of treatments to a network, in order.

    Treatments that change training rather than the network (sam, patch_diversity) are refused: docs/treatments says
    how each is used in a loop of your own.

    Args:
        network: A network of a known family; changed in place. Its normalization or another wrapper is kept.
        *treatments: Names, `{name: {option: value}}` or `Treatment` objects.
        spec: The images and classes of the network; found by a forward pass unless given.

    Returns:
        The treated network, which may be another module than the one given.

    Raises:
        TreatmentError: Where a treatment does not fit. Those before it have been applied, and the error says which.

    Example:
        >>> import timm
        >>> network = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> treatments_of(treat(network, "conv_stem", {"context_broadcasting": {"position": "mlp_mid"}}))
        ('conv_stem', 'context_broadcasting')
    """
    parsed = parse_treatments(treatments)
    for treatment in parsed:
        if type(treatment).operate is Treatment.operate:
            raise RecipeError(
                f"{treatment.name} changes training, not the network: list it in a recipe, or see"
                f" docs/treatments/{treatment.name}.md for its use in a loop of your own."
            )
        check_family(treatment, network)
    core, before = _core(network), treatments_of(network)
    try:
        treated = operate(core, parsed, spec or image_spec(network))
    except TreatmentError as error:
        if applied := treatments_of(core)[len(before) :]:
            sentence = str(error).removesuffix(".")
            raise TreatmentError(f"{sentence}; applied to the network before it: {', '.join(applied)}.") from error
        raise
    return treated if core is network else _replace_core(network, core, treated)


def operate(network: nn.Module, treatments: Sequence[Treatment], spec: ImageSpec) -> nn.Module:
    """Return the network after the surgery of each treatment, in order.

    Raises:
        TreatmentError: Where a treatment does not fit the network, or was applied before.
    """
    for treatment in treatments:
        check_family(treatment, network)
        had = treatments_of(network)
        if treatment.name in had:
            raise TreatmentError(f"This network has already been treated with {treatment.name}; once is enough.")
        network = treatment.operate(network, spec)
        setattr(network, _RECORD, (*had, treatment.name))
    return network


def treatments_of(network: nn.Module) -> tuple[str, ...]:
    """Return the names of the treatments whose surgery a network had, in order."""
    names: tuple[str, ...] = getattr(_core(network), _RECORD, ())
    return names


def check_family(treatment: Treatment, network: nn.Module) -> None:
    """Raise where `network` is of no family that the treatment fits."""
    if treatment.families is None:
        return
    fitting = ", ".join(treatment.families)
    try:
        _, family = recognise(network)
    except AnatomyError as error:
        raise TreatmentError(
            f"{treatment.name} does not fit {type(network).__name__}, a network of no known family; it fits {fitting}."
        ) from error
    if family.name not in treatment.families:
        raise TreatmentError(f"{treatment.name} does not fit a {family.name}; it fits {fitting}.")


def check_untouched(treatment: str, module: nn.Module, place: str, act: str = "replace") -> None:
    """Raise where something acts on a module that `treatment` would replace or copy, and would be lost or doubled."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise TreatmentError(
            f"{treatment} would {act} {place}, on which another treatment or a hook acts; list {treatment} first."
        )


def image_spec(network: nn.Module) -> ImageSpec:
    """Return the number of classes, channels and image size of a network of a known family, by a forward pass."""
    core, family = recognise(network)
    channels, height, width = family.input_size(core)
    like = next(parameter for parameter in core.parameters() if parameter.is_floating_point())
    with torch.no_grad(), eval_mode(core):
        logits = core(torch.zeros(1, channels, height, width, dtype=like.dtype, device=like.device))
    return ImageSpec(int(getattr(logits, "logits", logits).shape[-1]), channels, (height, width))


def _core(network: nn.Module) -> nn.Module:
    """The network inside its wrappers; itself where its family is not known."""
    try:
        return recognise(network)[0]
    except AnatomyError:
        return network


def _replace_core(wrapper: nn.Module, core: nn.Module, treated: nn.Module) -> nn.Module:
    if treated is not core:
        path = next(name for name, module in wrapper.named_modules() if module is core)
        wrapper.set_submodule(path, treated)
    return wrapper
