"""The optimizer with its parameter groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from vitclinic._core.config import Settings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vitclinic.models import Normalized

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
