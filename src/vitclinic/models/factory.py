"""The factory of networks, which take pixels in [0, 1] and normalize them themselves."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Literal, overload

import numpy as np
import timm
import torch
from PIL import Image
from timm.layers import PatchEmbed
from timm.models import is_model, list_models, load_pretrained, model_entrypoint, register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vitclinic._core.errors import ModelError, did_you_mean, first_line
from vitclinic.anatomy import eval_mode
from vitclinic.anatomy.wrappers import image_keyword
from vitclinic.data.decoding import Preprocessing
from vitclinic.models.headed import Headed


class Normalized(nn.Module):
    """A network that normalizes its own input: `backbone((x - mean) / std)`.

    Attacks, corruptions and measurements can then all work on pixels, and nobody can forget the normalization or apply
    it twice.

    Args:
        backbone: The network to wrap.
        mean: Mean of each channel, for pixels in [0, 1].
        std: Standard deviation of each channel.
    """

    mean: Tensor
    std: Tensor
    keyword: str | None = None
    """Keyword that the backbone takes images by, if they are not its first argument."""
    output: str | None = None
    """Name of the tensor to return, if the backbone returns several by name."""
    preprocessing: Preprocessing | None = None
    """The way from an image file to pixels, if it is known: `load_model` sets it, and images are then taken, too."""
    classes: tuple[str, ...] | None = None
    """The names of the outputs, if they are known: `load_model` sets them."""
    descriptive = frozenset({"preprocessing", "classes"})
    """Attributes that do not change what is computed of pixels, and so are no part of the digest."""

    def __init__(self, backbone: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.backbone = backbone
        if (keyword := image_keyword(backbone)) is not None:
            self.keyword = keyword
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(-1, 1, 1))

    @property
    def trunk(self) -> nn.Module:
        """The network that treatments change and initial weights fit: the backbone, without a task's head on it."""
        return self.backbone.backbone if isinstance(self.backbone, Headed) else self.backbone

    def put_head(self, headed: nn.Module) -> None:
        """Replace the backbone by one with a task's head on it, which takes images as its first argument."""
        if headed is not self.backbone:
            self.backbone, self.keyword, self.output = headed, None, None

    def forward(self, images: Tensor | Image.Image | Sequence[Image.Image], *more: Any) -> Any:
        """Return what the backbone returns, such as logits [B, K].

        Args:
            images: Pixels [B, C, H, W] in [0, 1]; of a run's network also an image of Pillow's, or several, of any size
                and mode, which are prepared as the run's test images were.
            more: What else a task's network takes, such as a question about each image.
        """
        x_bchw = images if isinstance(images, Tensor) else self._prepare(images)
        # Cast back: a network in half precision does not take the float32 that the mean makes of its images.
        x_bchw = ((x_bchw - self.mean) / self.std).to(x_bchw.dtype)
        returned = self.backbone(x_bchw, *more) if self.keyword is None else self.backbone(**{self.keyword: x_bchw})
        return returned if self.output is None else getattr(returned, self.output)

    def _prepare(self, images: Image.Image | Sequence[Image.Image]) -> Tensor:
        listed = [images] if isinstance(images, Image.Image) else list(images)
        if self.preprocessing is None or not all(isinstance(image, Image.Image) for image in listed):
            raise ModelError(
                "This network takes a tensor of pixels in [0, 1]; only a run's (`load_model`) takes images of Pillow."
            )
        pixels = torch.from_numpy(np.stack([self.preprocessing(image) for image in listed]))
        return (pixels.permute(0, 3, 1, 2).float() / 255).to(self.mean.device)


TIMM_ONLY = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_model_args", "cache_dir")


def fit_patch_size(side: int) -> int:
    """Return the largest patch size, up to 16, that divides an image of `side` pixels into at least 8 x 8 patches.

    Example:
        >>> [fit_patch_size(side) for side in (8, 28, 32, 64, 96, 224)]
        [1, 2, 4, 8, 12, 16]
    """
    return next(patch for patch in range(min(16, max(1, side // 8)), 0, -1) if side % patch == 0)


def load_exported(network: nn.Module, name: str, exported: dict[str, Any] | None) -> None:
    """Load the weights of a folder or repository that `export` wrote.

    Args:
        network: The network.
        name: Its name in timm's registry.
        exported: What `take_exported` returned.

    Raises:
        ModelError: Pretrained weights are asked for by the name alone; there are none.
    """
    if exported is None:
        return
    if not (exported.get("file") or exported.get("hf_hub_id")):
        raise ModelError(f"'{name}' has no published weights.")
    channels = exported["input_size"][0]
    load_pretrained(network, pretrained_cfg=exported, num_classes=exported["num_classes"], in_chans=channels)


def take_exported(keywords: dict[str, Any]) -> dict[str, Any] | None:
    """Remove from an entry point's keywords what is timm's alone, and return where weights are, if they are asked for.

    The number of classes of an exported network becomes a keyword.
    """
    given = keywords.get("pretrained_cfg")
    found = dict(given if isinstance(given, dict) else vars(given)) if given is not None else {}
    wanted = keywords.get("pretrained", False)
    for name in TIMM_ONLY:
        keywords.pop(name, None)
    if wanted and found.get("num_classes"):
        keywords.setdefault("num_classes", found["num_classes"])
    return found if wanted else None


@register_model  # type: ignore[untyped-decorator]
def vit_tiny_fitted(**keywords: Any) -> VisionTransformer:
    """Build ViT-Tiny (width 192, depth 12, 3 heads) with `patch_size` derived from `img_size` unless given."""
    exported = take_exported(keywords)
    size = keywords.setdefault("img_size", 224)
    side = size if isinstance(size, int) else min(size)
    defaults = {"patch_size": fit_patch_size(side), "embed_dim": 192, "depth": 12, "num_heads": 3}
    network = VisionTransformer(**{**defaults, **keywords})
    load_exported(network, "vit_tiny_fitted", exported)
    return network


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@overload
def create_model(
    name: str,
    *,
    img_size: int | tuple[int, int] | None = None,
    pretrained: bool = False,
    normalize: Literal[True] = True,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **keywords: Any,
) -> Normalized: ...


@overload
def create_model(
    name: str,
    *,
    img_size: int | tuple[int, int] | None = None,
    pretrained: bool = False,
    normalize: Literal[False],
    **keywords: Any,
) -> nn.Module: ...


def create_model(
    name: str,
    *,
    img_size: int | tuple[int, int] | None = None,
    pretrained: bool = False,
    normalize: bool = True,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **keywords: Any,
) -> nn.Module:
    """Create a network from timm's registry, which also has ours.

    Args:
        name: A name from `vitclinic list models`.
        img_size: Pixels per side, or height and width; ignored by networks that run at any size.
        pretrained: Load timm's published weights.
        normalize: Wrap the network so that it takes pixels in [0, 1]; False returns timm's network as it is.
        mean: Mean of each channel to normalize with; the network's published one unless given.
        std: Standard deviation of each channel; the network's published one unless given.
        **keywords: Everything else goes to timm: `num_classes`, `in_chans`, `patch_size`, `depth` ...

    Returns:
        The network, as a `Normalized` unless `normalize` is False.

    Raises:
        ModelError: There is no such network, or it does not accept a keyword.

    Example:
        >>> network = create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, depth=2, num_classes=10)
        >>> network(torch.rand(1, 3, 32, 32)).shape
        torch.Size([1, 10])
        >>> type(network).__name__, type(create_model("resnet18", normalize=False)).__name__
        ('Normalized', 'ResNet')
    """
    if not normalize and (mean is not None or std is not None):
        raise ModelError("mean and std are for normalization: remove them, or remove normalize=False.")
    if not is_model(name):
        raise ModelError(f"There is no model '{name}'.{did_you_mean(name, list_models())} See `vitclinic list models`.")
    if img_size is not None:
        keywords["img_size"] = list(img_size) if isinstance(img_size, tuple) else img_size
    backbone = _build(name, pretrained, keywords)
    if not normalize:
        return backbone
    channels = int(keywords.get("in_chans", 3))
    published = getattr(backbone, "pretrained_cfg", None) or {}
    mean = mean if mean is not None else published.get("mean", IMAGENET_MEAN)
    std = std if std is not None else published.get("std", IMAGENET_STD)
    return Normalized(backbone, _per_channel(mean, channels), _per_channel(std, channels))


def check_fit(network: nn.Module, channels: int, size: tuple[int, int], classes: int) -> None:
    """Check that a network works on the data, by running it once on images of that shape.

    Args:
        network: The network.
        channels: Image channels.
        size: Height and width.
        classes: Expected number of outputs; 0 for a network without a head, which returns features.

    Raises:
        ModelError: The network does not accept such images, or its number of outputs is not `classes`.
    """
    try:
        parameter = next(network.parameters())
        with torch.no_grad(), eval_mode(network):
            x_bchw = torch.full((2, channels, *size), 0.5, dtype=parameter.dtype, device=parameter.device)
            logits = network(x_bchw)
    except (RuntimeError, AssertionError, ValueError, IndexError, TypeError) as error:
        raise ModelError(
            f"The network does not accept {channels} x {size[0]} x {size[1]} images: {first_line(error)}."
            " To change size or patches, set model.img_size=... or model.patch_size=..."
        ) from error
    _refuse_cut_borders(network, size)
    if logits.shape != (2, classes or logits.shape[-1]):
        raise ModelError(f"The network returns {tuple(logits.shape)} for 2 images and {classes} classes.")


def _refuse_cut_borders(network: nn.Module, size: tuple[int, int]) -> None:
    """Raise a ModelError if timm's patches do not cover the image: the rest would never be seen."""
    for module in network.modules():
        if not isinstance(module, PatchEmbed) or module.dynamic_img_pad or module.img_size is None:
            continue
        patch, sides = module.patch_size, module.img_size
        if tuple(sides) == size and any(side % length for side, length in zip(sides, patch, strict=True)):
            raise ModelError(
                f"Patches of {patch[0]} x {patch[1]} do not cover {size[0]} x {size[1]} images: pixels at the border"
                " would never be seen. Set model.patch_size or model.img_size so that one divides the other."
            )


def _build(name: str, pretrained: bool, keywords: dict[str, Any]) -> nn.Module:
    """Build timm's network; retry without `img_size` if it does not take one."""
    try:
        network = _create(name, pretrained, keywords)
    except TypeError as error:
        unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unexpected and unexpected[1] == "img_size":
            return _build(name, pretrained, {k: v for k, v in keywords.items() if k != "img_size"})
        if unexpected:
            raise ModelError(f"'{name}' does not accept model.{unexpected[1]}; remove it.") from error
        raise ModelError(f"'{name}' cannot be built: {first_line(error)}.") from error
    except (RuntimeError, AssertionError, ValueError, KeyError, ZeroDivisionError, OSError) as error:
        raise ModelError(f"'{name}' cannot be built: {first_line(error)}.") from error
    _refuse_other_than_booleans(network, keywords)
    return network


def _refuse_other_than_booleans(network: nn.Module, keywords: dict[str, Any]) -> None:
    """Raise a ModelError for a value other than true or false where the network's class has one: any text is true."""
    for name, parameter in inspect.signature(type(network)).parameters.items():
        if isinstance(parameter.default, bool) and keywords.get(name, False) not in (True, False):
            raise ModelError(f"model.{name} must be true or false (got {keywords[name]!r}).")


def _create(name: str, pretrained: bool, keywords: dict[str, Any]) -> nn.Module:
    try:
        built: nn.Module = timm.create_model(name, pretrained=pretrained, **keywords)
        return built
    except TypeError as error:
        if "multiple values for keyword" not in str(error):
            raise
    name, _, tag = name.partition(".")
    built = _entry_point(name, keywords)(pretrained=pretrained, pretrained_cfg=tag or None)
    return built


def _entry_point(name: str, keywords: dict[str, Any]) -> Callable[..., nn.Module]:
    """Return a copy of timm's entry point in which `keywords` override its own arguments of the network's class.

    Some entry points write `dict(patch_size=16, **kwargs)`, which cannot be overridden from outside. We copy the
    functions of the module and let those that build the class add our keywords; timm itself is not changed.
    """
    module = sys.modules[model_entrypoint(name).__module__]
    namespace = dict(vars(module))

    def build(*arguments: Any, **theirs: Any) -> nn.Module:
        network: nn.Module = module.build_model_with_cfg(*arguments, **{**theirs, **keywords})
        return network

    for key, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            copied = FunctionType(value.__code__, namespace, value.__name__, value.__defaults__, value.__closure__)
            copied.__kwdefaults__ = value.__kwdefaults__
            namespace[key] = copied
    namespace["build_model_with_cfg"] = build
    entry_point: Callable[..., nn.Module] = namespace[name]
    return entry_point


def _per_channel(values: Sequence[float], channels: int) -> list[float]:
    """Return `values`, or their mean for every channel if the network has another number of channels."""
    values = list(values)
    return values if len(values) == channels else [sum(values) / len(values)] * channels
