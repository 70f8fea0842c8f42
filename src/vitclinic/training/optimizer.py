"""Optimizers, and which parameters weight decay acts on."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from vitclinic.config import Config
from vitclinic.models import Normalised

Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Config):
    """`optimizer` of a recipe."""

    main_key: ClassVar[str | None] = "name"

    name: Literal["adamw", "sgd", "lamb"] = "adamw"
    lr: Annotated[float, Field(ge=0)] = Field(1e-3, description="peak learning rate, never rescaled")
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)] = Field([0.9, 0.999], description="adamw and lamb")
    momentum: Share = Field(0.9, description="sgd")
    nesterov: bool = Field(False, description="sgd")


def build_optimizer(config: OptimizerConfig, task: nn.Module, network: Normalised) -> torch.optim.Optimizer:
    groups = parameter_groups(task, network, config.weight_decay)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)
    betas = (config.betas[0], config.betas[1])
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas)
    from timm.optim.lamb import Lamb

    # Clipping is the recipe's business, not also LAMB's.
    optimizer: torch.optim.Optimizer = Lamb(groups, lr=config.lr, betas=betas, max_grad_norm=None)
    return optimizer


def parameter_groups(task: nn.Module, network: Normalised, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of trainable parameters: decayed, and not (biases, norms, tokens and position embeddings)."""
    decayed = {id(p) for p in decayed_parameters(network)}
    inside = {id(p) for p in network.parameters()}
    decay: list[nn.Parameter] = []
    keep: list[nn.Parameter] = []
    for parameter in task.parameters():
        if not parameter.requires_grad:
            continue
        decays = id(parameter) in decayed if id(parameter) in inside else parameter.ndim > 1
        (decay if decays else keep).append(parameter)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": keep, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def decayed_parameters(network: Normalised) -> list[nn.Parameter]:
    """The parameters of a network that weight decay acts on: matrices and kernels that are not tokens.

    What a network lists in `no_weight_decay()`, as timm's do, is left alone, and so is every parameter whose
    name says that it is a token or an embedding of positions.
    """
    backbone = network.backbone
    listed = getattr(backbone, "no_weight_decay", None)
    exempt = set(listed()) if callable(listed) else set()
    return [
        parameter
        for name, parameter in backbone.named_parameters()
        if parameter.requires_grad and parameter.ndim > 1 and name not in exempt and not _is_token(name)
    ]


def _is_token(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.endswith("_token") or last.endswith("_embed") or "relative_position_bias" in last
