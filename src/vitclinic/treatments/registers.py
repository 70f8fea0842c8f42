"""Register tokens: tokens of its own for what a ViT would store in patches (Darcet et al. 2024).

Shapes: B images, N tokens (P prefix tokens, then the patches), D channels, R registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Unit, eval_mode, taps
from vitclinic.data import ImageSpec
from vitclinic.treatments.parts import examine, missing
from vitclinic.treatments.treatment import Treatment, register


def insert_registers(x_bnd: Tensor, registers_rd: Tensor, prefix: int) -> Tensor:
    """Return the tokens with registers after the first `prefix` of them, [B, N + R, D]."""
    registers_brd = registers_rd.to(x_bnd.dtype).expand(len(x_bnd), -1, -1)
    return torch.cat((x_bnd[:, :prefix], registers_brd, x_bnd[:, prefix:]), dim=1)


def remove_registers(x_bnd: Tensor, count: int, prefix: int) -> Tensor:
    """Return the tokens without the `count` registers after the first `prefix` of them, [B, N - R, D]."""
    return torch.cat((x_bnd[:, :prefix], x_bnd[:, prefix + count :]), dim=1)


class Registers(nn.Module):
    """Learned tokens that pass through the blocks beside the patches, and are dropped behind them.

    Its methods are hooks. As methods of a module they are copied with the network.

    Args:
        count: Number of registers R.
        width: Number of channels D.
        prefix: Number of prefix tokens P, such as the class token, which the registers come after.
    """

    def __init__(self, count: int, width: int, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix
        self.reg_token = nn.Parameter(torch.empty(count, width))
        nn.init.trunc_normal_(self.reg_token, std=0.02)

    def extra_repr(self) -> str:
        return f"{len(self.reg_token)}, after {self.prefix} tokens"

    def insert(self, x_bnd: Tensor) -> Tensor:
        """Return the tokens with the registers among them."""
        return insert_registers(x_bnd, self.reg_token, self.prefix)

    def remove(self, x_bnd: Tensor) -> Tensor:
        """Return the tokens without the registers."""
        if x_bnd.ndim != 3:
            raise TreatmentError(
                "registers are still there where the tokens have been pooled, because a later treatment has moved the"
                " network's last norm; list registers after it."
            )
        return remove_registers(x_bnd, len(self.reg_token), self.prefix)

    def insert_before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _replace_first(args, kwargs, self.insert)

    def insert_after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _replace_output(output, self.insert)

    def remove_before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _replace_first(args, kwargs, self.remove)

    def remove_after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _replace_output(output, self.remove)


def _replace_output(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return what a module returns with the tokens changed, which come first of several values."""
    return change(output) if isinstance(output, Tensor) else (change(output[0]), *output[1:])


def _replace_first(args: Any, kwargs: Any, change: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    """Return a call's arguments with the first of them changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    (name, first), *others = kwargs.items()
    return args, {name: change(first), **dict(others)}


@register
class RegistersTreatment(Treatment):
    """Learned register tokens beside the patches, dropped before the head (Darcet et al. 2024, Sec. 3).

    Attributes:
        count: The number of registers.
    """

    name: ClassVar[str] = "registers"
    paper: ClassVar[str] = "darcet2024 Sec. 3, Fig. 6"
    changes: ClassVar[str] = "learned tokens pass the blocks beside the patches and are dropped before the head"
    costs: ClassVar[str] = "R D parameters, and R more tokens: 2% more time for 4 beside 196 patches"
    part: ClassVar[str] = "one sequence of tokens with global attention through all blocks"

    count: int = Field(4, ge=1, description="number of registers")

    def operate(self, network: nn.Module, spec: ImageSpec) -> nn.Module:
        inside = [unit for unit in examine(self, network, spec).units if unit.block is not None]
        width = _check_tokens(self, network, inside, spec)
        ends = _find_ends(self, network, inside, spec)
        like = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
        registers = Registers(self.count, width, inside[0].input.layout.prefix).to(like)
        network.add_module("registers", registers.train(network.training))
        handles = [end.attach(registers, act) for end, act in zip(ends, ("insert", "remove"), strict=True)]
        try:
            _run_once(network, spec)
        except Exception as error:  # of whatever counts tokens
            for handle in handles:
                handle.remove()
            del network.registers
            reason = str(error).strip().splitlines()[0].rstrip(".")
            advice = "if another treatment counts the tokens, as local_attention does, list registers first"
            raise missing(self, network, f"with more tokens this one fails ({reason}); {advice}") from error
        return network


def _check_tokens(treatment: Treatment, network: nn.Module, inside: list[Unit], spec: ImageSpec) -> int:
    """Return the width of the tokens; raise unless one sequence of tokens, of any length, passes all blocks."""
    sites = {(unit.name, end): getattr(unit, end) for unit in inside for end in ("input", "output")}
    with taps(sites) as seen:
        _run_once(network, spec)
    shapes = {tuple(activation.shape) for activation in seen.values()}
    mixing = [unit.name for unit in inside if unit.kind not in ("msa", "mlp")]
    windowed = [unit.name for unit in inside if unit.attention is not None and unit.attention.is_windowed]
    if len(shapes) != 1 or any(len(shape) != 3 for shape in shapes) or mixing or windowed:
        fixed = (mixing or windowed)[:1]
        raise missing(treatment, network, *(f"{name} mixes a fixed number of tokens" for name in fixed))
    ((_, _, width),) = shapes
    return width


class _End(NamedTuple):
    """Start or end of a module's call."""

    module: nn.Module
    at: Literal["start", "end"]

    def attach(self, registers: Registers, act: str) -> RemovableHandle:
        """Let the registers `insert` themselves into the tokens that pass here, or `remove` themselves."""
        if self.at == "start":
            return self.module.register_forward_pre_hook(getattr(registers, f"{act}_before"), with_kwargs=True)
        return self.module.register_forward_hook(getattr(registers, f"{act}_after"))


def _find_ends(treatment: Treatment, network: nn.Module, inside: list[Unit], spec: ImageSpec) -> tuple[_End, _End]:
    """Return the calls at which tokens enter the first block and leave the last one.

    Taps at the blocks must see the registers, so these are the end of the module before the first block, and the start
    of the one behind the last block, that hand on the very same tensor; else start and end of what contains the block.
    """
    first, last = inside[0].input.module, inside[-1].output.module
    events = _record_calls(network, spec)
    ends = [end for end, _ in events]
    start, finish = ends.index(_End(first, "start")), len(ends) - 1 - ends[::-1].index(_End(last, "end"))
    before = [end for end, tensor in reversed(events[:start]) if tensor is events[start][1]]
    behind = [end for end, tensor in events[finish + 1 :] if tensor is events[finish][1]]
    for found, where in ((before, "before the first"), (behind, "behind the last")):
        if not found:
            raise missing(
                treatment, network, f"no module hands on the tokens {where} block: put an nn.Identity() there"
            )
    return _choose(before, "end"), _choose(behind, "start")


def _choose(ends: list[_End], at: Literal["start", "end"]) -> _End:
    """Return the nearest module beside the block, or else the nearest around it."""
    return next((end for end in ends if end.at == at), ends[0])


def _record_calls(network: nn.Module, spec: ImageSpec) -> list[tuple[_End, Any]]:
    """Return start and end of every module's call in one forward pass, each with its first input or its output."""
    events: list[tuple[_End, Any]] = []

    def start(module: nn.Module, args: Any, kwargs: Any) -> None:
        events.append((_End(module, "start"), next(iter((*args, *kwargs.values())), None)))

    def end(module: nn.Module, args: Any, output: Any) -> None:
        events.append((_End(module, "end"), output[0] if isinstance(output, tuple) else output))

    handles = []
    try:
        for module in network.modules():
            handles += [
                module.register_forward_pre_hook(start, with_kwargs=True),
                module.register_forward_hook(end),
            ]
        _run_once(network, spec)
    finally:
        for handle in handles:
            handle.remove()
    return events


@torch.no_grad()
def _run_once(network: nn.Module, spec: ImageSpec) -> None:
    like = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
    with eval_mode(network):
        network(torch.zeros(1, spec.in_chans, *spec.img_size, dtype=like.dtype, device=like.device))
