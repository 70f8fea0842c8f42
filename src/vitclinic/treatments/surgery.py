"""Surgery: apply treatments to a network, each at most once, if they fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from vitclinic._core.errors import AnatomyError, RecipeError, TreatmentError
from vitclinic.anatomy import eval_mode
from vitclinic.anatomy.forward import guard_hooks
from vitclinic.anatomy.wrappers import call_with_images, find_example, unwrap, weight_like
from vitclinic.data import ImageSpec
from vitclinic.treatments.treatment import Treatment, parse_treatments

_RECORD = "treated_with"
"""Attribute of a network with the names of its treatments, in order."""


def treat(
    network: nn.Module, *treatments: str | dict[str, Any] | Treatment, spec: ImageSpec | None = None
) -> nn.Module:
    """Apply treatments to a network, in order.

    Treatments that change training rather than the network (sam, adversarial, patch_diversity) are refused;
    docs/treatments shows how to use each of them in your own loop.

    Args:
        network: A network, changed in place. A wrapper, such as its normalization, is kept.
        *treatments: Names, `{name: {option: value}}` or `Treatment` objects.
        spec: Image shape and number of classes of the network; found by a forward pass unless given.

    Returns:
        The treated network, which may be a different module than the one given.

    Raises:
        RecipeError: A treatment or option is unknown, or the treatment changes training rather than the network.
        TreatmentError: A treatment does not fit. The ones before it have been applied; the message says which.

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
                f" docs/treatments/{treatment.name}.md for how to use it in your own loop."
            )
    core, before = _core(network), treatments_of(network)
    if parsed:
        guard_hooks()
    try:
        treated = operate(core, parsed, spec or image_spec(network))
    except TreatmentError as error:
        if applied := treatments_of(core)[len(before) :]:
            sentence = str(error).removesuffix(".")
            raise TreatmentError(f"{sentence}; applied to the network before it: {', '.join(applied)}.") from error
        raise
    return treated if core is network else _replace_core(network, core, treated)


def operate(network: nn.Module, treatments: Sequence[Treatment], spec: ImageSpec) -> nn.Module:
    """Apply the surgery of each treatment, in order, and return the network.

    Args:
        network: The bare network, without wrappers.
        treatments: Parsed treatments.
        spec: Image shape and number of classes.

    Raises:
        TreatmentError: A treatment does not fit the network, or was applied before.
    """
    for treatment in treatments:
        had = treatments_of(network)
        if treatment.name in had:
            raise TreatmentError(f"This network has already been treated with {treatment.name}; once is enough.")
        network = treatment.operate(network, spec)
        _leave_fused_path(network)
        setattr(network, _RECORD, (*had, treatment.name))
    return network


def _leave_fused_path(network: nn.Module) -> None:
    """Let PyTorch's encoder layers call their parts; in eval mode one fused call computes the untreated layer."""
    for module in network.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0


def treatments_of(network: nn.Module) -> tuple[str, ...]:
    """Return the names of the treatments applied to a network, in order.

    Args:
        network: The network, treated or not.
    """
    names: tuple[str, ...] = getattr(_core(network), _RECORD, ())
    return names


def check_untouched(treatment: str, module: nn.Module, place: str, act: str = "replace") -> None:
    """Raise a TreatmentError if a module to replace or copy has hooks, which would be lost or doubled."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise TreatmentError(
            f"{treatment} would {act} {place}, which another treatment or a hook acts on; list {treatment} first."
        )


def image_spec(network: nn.Module) -> ImageSpec:
    """Find the number of classes, channels and image size of a network, with a forward pass.

    The image size is the one that the network states, or else the first of the usual ones that it takes.

    Args:
        network: The network, with or without wrappers.

    Returns:
        The spec to build or treat the network with.

    Raises:
        TreatmentError: The network takes images of none of the usual sizes.
    """
    core, family = unwrap(network)
    try:
        example = find_example(core, family)
    except AnatomyError as error:
        raise TreatmentError(
            f"{type(network).__name__} does not say which images it takes: give its spec, as in"
            " treat(network, ..., spec=ImageSpec(num_classes=10, in_chans=3, img_size=(224, 224)))."
        ) from error
    with torch.no_grad(), eval_mode(core):
        output = call_with_images(core, example.to(weight_like(core)))
    _, channels, height, width = example.shape
    return ImageSpec(int(scores_of(output).shape[-1]), channels, (height, width))


def scores_of(output: Any) -> Tensor:
    """Return the class scores, or the features, among all that a network returns: the logits, or the first tensor."""
    named = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    plain = vars(output) if dataclasses.is_dataclass(output) and not isinstance(output, dict) else output
    tensors = [x for x in tree_leaves(plain) if isinstance(x, Tensor)]
    found: Tensor = (
        named if named is not None else next((x for x in tensors if x.ndim), tensors[0])
    )  # a loss has no axis
    return found


def _core(network: nn.Module) -> nn.Module:
    """Return the network inside its wrappers."""
    return unwrap(network)[0]


def _replace_core(wrapper: nn.Module, core: nn.Module, treated: nn.Module) -> nn.Module:
    """Put the treated network back into its wrapper."""
    if treated is not core:
        path = next(name for name, module in wrapper.named_modules() if module is core)
        wrapper.set_submodule(path, treated)
    return wrapper
