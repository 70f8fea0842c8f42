"""One more attention or one more MLP at the end of a ViT, at nearly the same cost."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field
from timm.layers import Mlp, trunc_normal_
from timm.models.vision_transformer import Attention, ResPostBlock, VisionTransformer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy, AttentionMap, Unit, record_attention, taps
from vitclinic.data import ImageSpec
from vitclinic.treatments.attention_edit import is_edited
from vitclinic.treatments.parts import block_module, examine, find_attentions, missing, replace_at, run_once
from vitclinic.treatments.surgery import check_untouched, treatments_of
from vitclinic.treatments.treatment import Treatment, register

M = TypeVar("M", bound=nn.Module)

MLP_RATIO = 2
"""An MLP of this ratio has 4 D^2 weights, like an attention."""


class _OneStep(nn.Module):
    """x + branch(x), with norm, layer scale and stochastic depth as in the network's own blocks."""

    def __init__(
        self, norm: nn.Module, scale: nn.Module, drop_path: nn.Module, post_norm: bool = False, results: int = 1
    ) -> None:
        super().__init__()
        self.norm = norm
        self.ls = scale
        self.drop_path = drop_path
        self.post_norm = post_norm
        self.results = results

    def forward(self, x_bnd: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the state after the step in the form of the blocks before it; keywords are for the attention."""
        inner_bnd = x_bnd if self.post_norm else self.norm(x_bnd)
        branch_bnd = self.ls(self.branch(inner_bnd, **kwargs))
        after_bnd = x_bnd + self.drop_path(self.norm(branch_bnd) if self.post_norm else branch_bnd)
        return after_bnd if self.results == 1 else (after_bnd, *[None] * (self.results - 1))

    def branch(self, x_bnd: Tensor, **kwargs: Any) -> Tensor:
        raise NotImplementedError


class MsaBlock(_OneStep):
    """A block with attention only."""

    def __init__(self, attn: nn.Module, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.attn = attn

    def branch(self, x_bnd: Tensor, **kwargs: Any) -> Tensor:
        return self.attn(x_bnd, **kwargs)  # type: ignore[no-any-return]


class MlpBlock(_OneStep):
    """A block with an MLP only."""

    def __init__(self, mlp: nn.Module, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.mlp = mlp

    def branch(self, x_bnd: Tensor, **kwargs: Any) -> Tensor:
        return self.mlp(x_bnd)  # type: ignore[no-any-return]


class GridAttention(nn.Module):
    """timm's attention over all tokens of a state, [B, N, C] or [B, h, w, C]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn = Attention(width, heads, qkv_bias=True)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return self.attn(x.flatten(1, -2)).reshape(x.shape)  # type: ignore[no-any-return]


@register
class ExtraBlock(Treatment):
    """A step x + MSA(norm(x)) or x + MLP(norm(x)) after the last block [hyeonwoo2023 Sec. 3.1, Fig. 3].

    Attributes:
        kind: `msa` for attention, `mlp` for an MLP of ratio 2.
    """

    name: ClassVar[str] = "extra_block"
    paper: ClassVar[str] = "hyeonwoo2023 Sec. 3.1, Fig. 3"
    changes: ClassVar[str] = "one more attention, or one more MLP of ratio 2, at the end"
    costs: ClassVar[str] = "msa: 4 D^2 + 6 D parameters, mlp: 4 D^2 + 5 D; the time of a third of a block"
    part: ClassVar[str] = "blocks of attention or MLPs over tokens"

    kind: Literal["msa", "mlp"] = Field("msa", description="`msa`: attention; `mlp`: an MLP of ratio 2")

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        anatomy = examine(self, network, spec)
        if isinstance(network, VisionTransformer):
            attention = getattr(network.blocks[-1], "attn", None)  # timm's parallel blocks have none
            if type(attention) is Attention or (attention is not None and treatments_of(network)):
                return self._copy_step(anatomy)
        return self._append(anatomy, spec)

    def _copy_step(self, anatomy: Anatomy) -> nn.Module:
        """Append a step like those of timm's last block."""
        network = anatomy.network
        name = anatomy.blocks[-1].name
        last: Any = network.get_submodule(name)
        post_norm = isinstance(last, ResPostBlock)
        if self.kind == "msa":
            if type(last.attn) is not Attention or is_edited(last.attn):
                raise TreatmentError(
                    f"extra_block copies timm's Attention, but that of the last block is a {type(last.attn).__name__}"
                    " that another treatment may have changed; list extra_block before the treatments of attention."
                )
            check_untouched(self.name, last.attn, f"{name}.msa", act="copy")
            module: nn.Module = _copy_initialized(last.attn)
        else:
            module = _build_mlp(last)
        norm = _copy_initialized(last.norm1)
        if post_norm and last.init_values is not None:  # timm's layer scale of such blocks
            nn.init.constant_(norm.weight, last.init_values)
        scale = nn.Identity() if post_norm else _copy_initialized(last.ls1)
        block = (MsaBlock if self.kind == "msa" else MlpBlock)(
            module, norm, scale, copy.deepcopy(last.drop_path1), post_norm
        )
        blocks: nn.Sequential = network.get_submodule("blocks")  # type: ignore[assignment]
        blocks.append(block.train(network.training))
        return network

    def _append(self, anatomy: Anatomy, spec: ImageSpec) -> nn.Module:
        """Append a step of our own, with a LayerNorm before it, to the blocks of any network."""
        units = [unit for unit in anatomy.of_kind("msa", "mlp", "token_mlp") if unit.output.layout.spatial]
        if not units:
            raise missing(self, anatomy.network)
        if not self._append_to_list(anatomy, units[-1], spec):
            self._append_behind(anatomy, units[-1], spec)
        return anatomy.network

    def _append_to_list(self, anatomy: Anatomy, last: Unit, spec: ImageSpec) -> bool:
        """Append a step to the list of the last block; return False if there is none whose blocks run in turn."""
        network = anatomy.network
        home, _, key = (last.block or "").rpartition(".")
        block_before = block_module(anatomy, last)
        blocks = dict(network.named_modules()).get(home)
        if not isinstance(blocks, nn.Sequential | nn.ModuleList) or not re.search(r"\d$", key):
            return False
        state = self._state_after(block_before, last, network, spec)
        if blocks[-1] is not block_before or state is None:
            return False
        block = self._build(anatomy, *state, spec)
        before = run_once(network, spec)
        blocks.add_module(_next_name(key), block)
        if _is_neutral(block, before, network, spec, again=last.runs_again):
            return True
        delattr(blocks, _next_name(key))
        return False

    def _append_behind(self, anatomy: Anatomy, last: Unit, spec: ImageSpec) -> None:
        """Put a step behind the last block of a network that does not call a list of blocks one after another."""
        network = anatomy.network
        if last.runs_again:
            raise missing(self, network, "it runs its blocks more than once for each image")
        site = last.output
        with taps({"state": site}) as seen:
            before = run_once(network, spec, batch=2)
        shape = seen["state"].shape
        if isinstance(network, nn.Sequential) or shape[0] != 2 or len(shape) != 3:
            raise missing(self, network, f"its last state of two images is {list(shape)}, not [2, tokens, width]")
        block = self._build(anatomy, int(shape[-1]), 1, spec)
        network.add_module(self.name, block)
        handles = replace_at(site, block)
        if not _is_neutral(block, before, network, spec, batch=2):
            for handle in handles:
                handle.remove()
            delattr(network, self.name)
            raise missing(self, network, f"what follows {last.name} does not read its state from one place")

    def _state_after(self, block: nn.Module, last: Unit, network: nn.Module, spec: ImageSpec) -> tuple[int, int] | None:
        """Return the width of the state after a block, and how many results it has; None if it is none of tokens."""
        outputs: list[Any] = []
        handle = block.register_forward_hook(lambda *call: outputs.append(call[2]))
        run_once(network, spec, batch=2)
        handle.remove()
        if not outputs:
            return None
        output = outputs[-1]
        state = output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple) else None
        if state is None or state.ndim not in (3, 4) or len(state) != 2:
            return None
        if state.ndim == 4 and not last.output.layout.channels_last:
            return None
        return int(state.shape[-1]), 1 if isinstance(output, Tensor) else len(output)

    def _count_heads(self, anatomy: Anatomy, spec: ImageSpec) -> int:
        """Return the number of heads of the last attention that has a map."""
        units = [unit for unit in anatomy.of_kind("msa") if unit.attention is not None]
        if not units:
            try:
                return find_attentions(self, anatomy, spec)[-1].heads
            except TreatmentError as error:
                why = "it has no attention with a map to take its heads from; use kind mlp"
                raise missing(self, anatomy.network, why) from error
        seen: list[AttentionMap] = []
        with record_attention(units[-1:], seen.append):
            run_once(anatomy.network, spec)
        side_by_side = 1 if seen[-1].seen is None else len(seen[-1].seen.numbers)
        return seen[-1].weights.shape[1] // side_by_side

    def _build(self, anatomy: Anatomy, width: int, results: int, spec: ImageSpec) -> _OneStep:
        if self.kind == "msa":
            heads = self._count_heads(anatomy, spec)
            if width % heads:
                raise missing(self, anatomy.network, f"{heads} heads do not divide the width {width} of its last state")
            module: nn.Module = GridAttention(width, heads)
        else:
            module = Mlp(width, MLP_RATIO * width)
        parts = (nn.LayerNorm(width), nn.Identity(), nn.Identity())
        block = (MsaBlock if self.kind == "msa" else MlpBlock)(_copy_initialized(module), *parts, results=results)
        like = next(parameter for parameter in anatomy.network.parameters() if parameter.is_floating_point())
        return block.to(like).train(anatomy.network.training)


def _next_name(key: str) -> str:
    """Return the name of the block after `key` in its list.

    Example:
        >>> _next_name("encoder_layer_9")
        'encoder_layer_10'
    """
    number = re.search(r"\d+$", key)
    assert number is not None  # lists name their entries by number
    return f"{key[: number.start()]}{int(number[0]) + 1}"


def _is_neutral(
    block: _OneStep, before: Any, network: nn.Module, spec: ImageSpec, batch: int = 1, *, again: bool = False
) -> bool:
    """Return True if the network runs a block once, and computes what it did before if the block adds zeros.

    Otherwise the block does not see the state, or its blocks are not called one after another. A network that runs all
    of its blocks `again` may run this one several times.
    """
    calls: list[None] = []
    handles = [
        block.register_forward_hook(lambda *_: calls.append(None)),
        block.ls.register_forward_hook(lambda *call: torch.zeros_like(call[2])),
    ]
    try:
        after = run_once(network, spec, batch)
    except Exception:  # noqa: BLE001 the user's own code may raise anything
        return False
    finally:
        for handle in handles:
            handle.remove()
    pairs = zip(_tensors(before), _tensors(after), strict=True)
    return (len(calls) == 1 or (again and bool(calls))) and all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in pairs)


def _tensors(output: Any) -> list[Tensor]:
    """Return the tensors among all that a network returns."""
    plain = vars(output) if dataclasses.is_dataclass(output) and not isinstance(output, dict) else output
    return [leaf for leaf in tree_leaves(plain) if isinstance(leaf, Tensor)]


def _build_mlp(block: Any) -> nn.Module:
    """Build an MLP of ratio 2 with the activation, dropout and dtype of a block's own MLP, if it has them."""
    like: Tensor = block.norm1.weight
    mlp: nn.Module = Mlp(
        like.shape[0],
        MLP_RATIO * like.shape[0],
        bias=block.attn.proj.bias is not None,
        drop=getattr(getattr(block.mlp, "drop1", None), "p", 0.0),
        device=like.device,
        dtype=like.dtype,
    )
    if isinstance(getattr(block.mlp, "act", None), nn.Module):
        mlp.act = copy.deepcopy(block.mlp.act)
    return _copy_initialized(mlp)


def _copy_initialized(module: M) -> M:
    """Return a copy with timm's initial values for ViTs: truncated normal matrices (std 0.02), zero biases."""
    module = copy.deepcopy(module)
    for part in module.modules():
        reset = getattr(part, "reset_parameters", None)
        if isinstance(part, nn.Linear):
            trunc_normal_(part.weight, std=0.02)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif callable(reset):
            reset()
    return module
