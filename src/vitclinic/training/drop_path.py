"""Stochastic depth that changes late in a run: 0.3, then 0.5 in the last fifth [gong2021 5.2; Liu et al., ICCV 2021].

Which rate a step has depends on its place in the run alone, so that a resumed run goes on with the right one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from vitclinic._core.config import Settings
from vitclinic._core.errors import RecipeError

if TYPE_CHECKING:
    from torch import nn

_CLASSES = ("DropPath", "StochasticDepth")
"""Ends of the names of modules that leave out paths: timm's and Hugging Face's, torchvision's."""
_RATES = ("drop_prob", "p")


class LateDropPathConfig(Settings):
    """`late_drop_path` of a recipe.

    Example:
        >>> LateDropPathConfig(rate=0.5).share
        0.2
    """

    main_key: ClassVar[str | None] = "rate"

    rate: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="stochastic depth in the last part of a run; model.drop_path_rate is that of the first part"
    )
    share: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="the last part, as a share of the run")

    @model_validator(mode="after")
    def _check_unused_options(self) -> LateDropPathConfig:
        if self.rate is None and self.share != type(self).model_fields["share"].default:
            raise ValueError("'share' has no effect without a 'rate'")
        return self


class LateDropPath:
    """Rates at which the blocks of a network are left out, by the share of the run that is done.

    In the last part of the run the largest is `config.rate`, and the others, which grow with depth, keep their
    proportions to it.

    Args:
        config: The late rate and when it starts; without a rate nothing ever changes.
        network: The network, whose modules have the rates of the first part.

    Raises:
        RecipeError: The network leaves out no paths.

    Example:
        >>> import timm
        >>> vit = timm.create_model("vit_tiny_patch16_224", depth=4, drop_path_rate=0.3)
        >>> LateDropPath(LateDropPathConfig(rate=0.5), vit)(0.8)
        >>> [round(block.drop_path1.drop_prob, 3) for block in vit.blocks[1:]]
        [0.167, 0.333, 0.5]
    """

    def __init__(self, config: LateDropPathConfig, network: nn.Module) -> None:
        self._early = [] if config.rate is None else find_drop_paths(network)
        if config.rate is None:
            return
        if not self._early:
            raise RecipeError(
                "late_drop_path changes the rate at which blocks are left out, and this network leaves none out:"
                " set model.drop_path_rate."
            )
        self._start = 1 - config.share - 1e-9
        self._factor = config.rate / max(rate for _, _, rate in self._early)

    def __call__(self, done: float) -> None:
        """Set the rates of a step before which this share of the run is done."""
        for module, name, rate in self._early:
            setattr(module, name, rate * self._factor if done >= self._start else rate)


def find_drop_paths(network: nn.Module) -> list[tuple[Any, str, float]]:
    """Return the modules that leave out paths in training, with the name of their rate and its value."""
    found = []
    for module in network.modules():
        if type(module).__name__.endswith(_CLASSES):
            name = next((name for name in _RATES if getattr(module, name, None)), None)
            if name is not None:
                found.append((module, name, float(getattr(module, name))))
    return found
