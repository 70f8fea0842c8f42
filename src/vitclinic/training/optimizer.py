"""Durations, the learning-rate schedule, and the optimizer with its parameter groups."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from vitclinic._core.config import Settings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vitclinic.models import Normalized

_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(steps?|epochs?|%)?")


def _check_duration(value: str | int | float) -> str | int | float:
    match = _PATTERN.fullmatch(str(value).strip())
    if match is None:
        raise ValueError("write a number of epochs, or a text such as '500 steps' or '5%'")
    if match[2] == "%" and float(match[1]) > 100:
        raise ValueError("a run has no more than 100%")
    return value


Duration = Annotated[str | int | float, AfterValidator(_check_duration)]
"""A stretch of training: `5` (epochs), `"5 epochs"`, `"500 steps"` or `"5%"` of the run."""


def is_share(duration: Duration) -> bool:
    """Tell whether a duration is a share of the run."""
    return str(duration).strip().endswith("%")


def in_steps(duration: Duration, steps_per_epoch: float, total_steps: int) -> float:
    """Convert a duration to a number of steps.

    Example:
        >>> in_steps(2, 10, 100), in_steps("30 steps", 10, 100), in_steps("5%", 10, 100)
        (20.0, 30.0, 5.0)
    """
    match = _PATTERN.fullmatch(str(duration).strip())
    assert match is not None  # `Duration` was validated
    amount, unit = float(match[1]), match[2] or "epochs"
    if unit == "%":
        return amount / 100 * total_steps
    return amount if unit.startswith("step") else amount * steps_per_epoch


class ScheduleConfig(Settings):
    """`schedule` of a recipe."""

    main_key: ClassVar[str | None] = "name"

    name: Literal["cosine", "linear", "polynomial", "exponential", "constant"] = "cosine"
    warmup: Duration = Field("5%", description="linear rise from 0: epochs, 'n steps' or 'n%'")
    final: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="last learning rate, as a share of lr")
    power: Annotated[float, Field(gt=0)] = Field(0.9, description="polynomial only: (1 - progress) ** power")

    @model_validator(mode="after")
    def _exponential_has_an_end(self) -> ScheduleConfig:
        if self.name == "exponential" and not self.final:
            raise ValueError("an exponential schedule never reaches 0: set 'final' above 0, such as 0.01")
        if "power" in self.model_fields_set and self.name != "polynomial" and self.power != 0.9:
            raise ValueError("'power' is only for the polynomial schedule")
        return self


class Schedule:
    """The factor on the peak learning rate as a function of the step, counted from 0."""

    def __init__(self, config: ScheduleConfig, steps_per_epoch: float, total_steps: int) -> None:
        self.config = config
        self.total = total_steps
        self.warmup = min(in_steps(config.warmup, steps_per_epoch, total_steps), total_steps)

    def __call__(self, step: float) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        if self.config.name == "constant":
            return 1.0
        progress = (step - self.warmup) / max(1.0, self.total - self.warmup)
        if self.config.name == "exponential":
            return float(self.config.final**progress)
        if self.config.name == "cosine":
            fall = (1 + math.cos(math.pi * progress)) / 2
        else:
            fall = (1 - progress) ** (self.config.power if self.config.name == "polynomial" else 1)
        return self.config.final + (1 - self.config.final) * fall


Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Settings):
    """`optimizer` of a recipe."""

    main_key: ClassVar[str | None] = "name"

    name: Literal["adamw", "sgd", "lamb", "muon", "rmsprop"] = Field(
        "adamw", description="muon: for matrices between the first layer and the head, with adamw for the rest"
    )
    lr: Annotated[float, Field(gt=0)] = Field(1e-3, description="peak learning rate, never rescaled")
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    weight_decay_end: Annotated[float, Field(ge=0)] | None = Field(
        None, description="weight decay at the end of the run, reached along a cosine"
    )
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)] = Field(
        [0.9, 0.999], description="decay of the two moments (adamw, lamb, and the adamw beside muon)"
    )
    momentum: Share = Field(0.9, description="sgd and rmsprop only")
    nesterov: bool = Field(False, description="Nesterov momentum (sgd only)")

    @model_validator(mode="after")
    def _check_unused_options(self) -> OptimizerConfig:
        fields = OptimizerConfig.model_fields
        unused = [key for key in ("momentum", "nesterov") if getattr(self, key) != fields[key].default]
        if self.weight_decay_end is not None and not self.weight_decay:
            raise ValueError("'weight_decay_end' needs a 'weight_decay' above 0 to start from")
        if self.name == "muon" and unused:
            raise ValueError(f"'{unused[0]}' is only for sgd: muon always has Nesterov's momentum, 0.95; remove it")
        return self


def build_optimizer(
    config: OptimizerConfig, task: nn.Module, network: Normalized, scales: Mapping[int, float] | None = None
) -> torch.optim.Optimizer:
    """Build the recipe's optimizer for everything trainable in `task`; weight decay follows `parameter_groups`.

    `scales` are factors on the learning rate of parameters, by their id; each makes a group of its own, which knows it
    as `lr_scale`.

    With `muon`, the hidden matrices of the network (`training.muon.hidden_matrices`) are a group of their own, which
    comes first; AdamW trains the rest, such as the parameters of added objectives.
    """
    import torch

    groups = parameter_groups(task, network, config.weight_decay)
    if scales:
        groups = [part for group in groups for part in _split_by_scale(group, scales, config.lr)]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)
    if config.name == "rmsprop":
        return torch.optim.RMSprop(groups, lr=config.lr, momentum=config.momentum)
    betas = (config.betas[0], config.betas[1])
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas)
    if config.name == "muon":
        return _build_muon(config.lr, betas, groups, network)
    from timm.optim.lamb import Lamb

    # The recipe's `clip` does the clipping; LAMB must not clip again.
    optimizer: torch.optim.Optimizer = Lamb(groups, lr=config.lr, betas=betas, max_grad_norm=None)
    return optimizer


def _build_muon(
    lr: float, betas: tuple[float, float], groups: list[dict[str, Any]], network: Normalized
) -> torch.optim.Optimizer:
    from vitclinic.training.muon import Muon, hidden_matrices

    matrices = hidden_matrices(network, weight_decay_parameters(network))
    chosen = {id(parameter) for parameter in matrices}
    others = [{**group, "params": [p for p in group["params"] if id(p) not in chosen]} for group in groups]
    hidden = [{**group, "params": [p for p in group["params"] if id(p) in chosen]} for group in groups]
    return Muon([group for group in hidden if group["params"]] or hidden[:1], others, lr, betas)


def _split_by_scale(group: dict[str, Any], scales: Mapping[int, float], lr: float) -> list[dict[str, Any]]:
    """Return a parameter group as several, one for each factor on the learning rate."""
    by_scale: dict[float, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        by_scale.setdefault(scales.get(id(parameter), 1.0), []).append(parameter)
    return [{**group, "params": part, "lr": lr * scale, "lr_scale": scale} for scale, part in by_scale.items()]


def parameter_groups(task: nn.Module, network: Normalized, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: with weight decay, and without (biases, norms, tokens, position embeddings).

    The group with decay comes first and exists even if the decay is 0: stored optimizer states rely on this order.
    """
    from timm.optim import param_groups_weight_decay

    exempt = {id(p) for p in network.backbone.parameters()} - {id(p) for p in weight_decay_parameters(network)}
    names = [name for name, parameter in task.named_parameters() if id(parameter) in exempt]
    groups = param_groups_weight_decay(task, 1.0, no_weight_decay_list=names)
    return [{**group, "weight_decay": weight_decay * group["weight_decay"]} for group in reversed(groups)]


def weight_decay_parameters(network: Normalized) -> list[nn.Parameter]:
    """Return the parameters weight decay acts on: matrices and kernels, but not tokens.

    Parameters listed in the network's `no_weight_decay()` (a timm convention) are exempt, and so is every parameter
    named like a token or a position embedding, since networks of other libraries have no such list.
    """
    from timm.optim import param_groups_weight_decay

    backbone = network.backbone
    listed = getattr(network.trunk, "no_weight_decay", None)
    prefix = "" if network.trunk is backbone else "backbone."  # under a task's head
    exempt = {f"{prefix}{name}" for name in listed()} if callable(listed) else set()
    exempt |= {name for name, _ in backbone.named_parameters() if _is_token(name)}
    groups = param_groups_weight_decay(backbone, 1.0, no_weight_decay_list=exempt)
    return [parameter for group in groups if group["weight_decay"] for parameter in group["params"]]


def _is_token(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.endswith("_token") or last.endswith("_embed") or "relative_position_bias" in last
