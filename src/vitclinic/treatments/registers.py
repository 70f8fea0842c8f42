"""Register tokens: tokens of its own for what a ViT would store in patches (Darcet et al. 2024).

Shapes: B images, N tokens (P prefix tokens, then the patches), D channels, R registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Site, Unit, eval_mode, into, taps
from vitclinic.anatomy.forward import Removable, is_addition, is_looking
from vitclinic.anatomy.sites import watch
from vitclinic.anatomy.wrappers import call_with_images
from vitclinic.data import ImageSpec
from vitclinic.treatments.parts import check_tokens, examine, example_image, missing, replace_at, run_once
from vitclinic.treatments.surgery import scores_of, treatments_of
from vitclinic.treatments.treatment import Treatment, register


def insert_registers(x_bnd: Tensor, registers_rd: Tensor, prefix: int) -> Tensor:
    """Return the tokens with registers after the first `prefix` of them, [B, N + R, D]."""
    registers_brd = registers_rd.to(x_bnd.dtype).expand(len(x_bnd), -1, -1)
    return torch.cat((x_bnd[:, :prefix], registers_brd, x_bnd[:, prefix:]), dim=1)


def remove_registers(x_bnd: Tensor, count: int, prefix: int) -> Tensor:
    """Return the tokens without the `count` registers after the first `prefix` of them, [B, N - R, D]."""
    return torch.cat((x_bnd[:, :prefix], x_bnd[:, prefix + count :]), dim=1)


Axes = tuple[int, ...]
"""The axes of images, tokens and channels."""


class Registers(nn.Module):
    """Learned tokens that pass through the blocks beside the patches, and are dropped behind them.

    Its methods are hooks, or act at sites. As methods of a module they are copied with the network.

    Args:
        count: Number of registers R.
        width: Number of channels D.
        prefix: Number of prefix tokens P, such as the class token, which the registers come after.
        axes: The axes of images, tokens and channels.
    """

    def __init__(self, count: int, width: int, prefix: int, axes: Axes = (0, 1, 2)) -> None:
        super().__init__()
        self.prefix, self.axes = prefix, axes
        self.reg_token = nn.Parameter(torch.empty(count, width))
        nn.init.trunc_normal_(self.reg_token, std=0.02)

    def extra_repr(self) -> str:
        return f"{len(self.reg_token)}, after {self.prefix} tokens"

    def insert(self, x: Tensor) -> Tensor:
        """Return the tokens with the registers among them, on the axes that they came on."""
        return self._back(insert_registers(x.permute(self.axes), self.reg_token, self.prefix))

    def remove(self, x: Tensor) -> Tensor:
        """Return the tokens without the registers, on the axes that they came on."""
        if x.ndim != 3:
            raise TreatmentError(
                "registers are still there where the tokens have been pooled, because a later treatment has moved the"
                " network's last norm; list registers after it."
            )
        return self._back(remove_registers(x.permute(self.axes), len(self.reg_token), self.prefix))

    def _back(self, x_bnd: Tensor) -> Tensor:
        return x_bnd.permute(sorted(range(3), key=self.axes.__getitem__))

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
        if "patch_dropout" in treatments_of(network):
            raise TreatmentError("List registers before patch_dropout, which counts the tokens before the patches.")
        inside = _units_over_tokens(self, network, spec)
        if any(unit.runs_again for unit in inside):
            raise missing(self, network, "it runs its blocks more than once for each image")
        width = check_tokens(self, network, inside, spec)
        entry = inside[0].input
        axes = (0, 1, 2) if entry.arrangement is None else entry.arrangement.axes
        if entry.arrangement is not None and not entry.arrangement.begins_with(entry.layout.prefix):
            raise missing(self, network, "its class token is not the first of its tokens")
        ends = _find_ends(network, inside, spec)
        shape = scores_of(run_once(network, spec, batch=2)).shape
        like = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
        registers = Registers(self.count, width, entry.layout.prefix, axes).to(like)
        network.add_module("registers", registers.train(network.training))
        handles = [
            handle for end, act in zip(ends, ("insert", "remove"), strict=True) for handle in end.attach(registers, act)
        ]
        try:
            _check_pass(network, registers, spec, shape)
        except Exception as error:  # of whatever counts tokens
            for handle in handles:
                handle.remove()
            del network.registers
            reason = str(error).strip().splitlines()[0].rstrip(".")
            advice = "if another treatment counts the tokens, as local_attention does, list registers first"
            raise missing(self, network, f"with more tokens this one fails ({reason}); {advice}") from error
        return network


def _check_pass(network: nn.Module, registers: Registers, spec: ImageSpec, shape: torch.Size) -> None:
    """Raise a ValueError unless the network still answers image by image, and its answers depend on the registers."""
    with eval_mode(network), torch.enable_grad():
        scores = scores_of(call_with_images(network, example_image(network, spec, 2)))
        if scores.shape != shape:
            raise ValueError(f"its outputs become {tuple(scores.shape)}, not {tuple(shape)}")
        if torch.autograd.grad(scores.sum(), registers.reg_token, allow_unused=True)[0] is None:
            raise ValueError("they do not reach its output")


def _units_over_tokens(treatment: Treatment, network: nn.Module, spec: ImageSpec) -> list[Unit]:
    """Return the units between stem and head that act on patches; the first is read where its block gets tokens."""
    found = [unit for unit in examine(treatment, network, spec).units if unit.output.layout.spatial]
    inside = [unit for unit in found if unit.kind not in ("stem", "position", "head")]
    if not inside:
        raise missing(treatment, network)
    first = inside[0]
    blocks = dict(network.named_modules())  # a block that runs several times has a number behind its name
    block = blocks.get(first.block or "", network)
    entering: list[Any] = []
    handle = block.register_forward_pre_hook(lambda _, args: entering.extend(args[:1]))
    try:
        with taps({"state": first.input}) as seen:
            run_once(network, spec)
    finally:
        handle.remove()
    tokens = [getattr(state, "ndim", 0) for state in entering] == [3]
    if seen["state"].ndim == 4 and tokens:
        # A feature map is flattened between modules: its tokens are seen where they enter the block.
        inside[0] = replace(first, input=into(block, first.output.layout))
    return inside


class _End(NamedTuple):
    """Start or end of a module's call."""

    module: nn.Module
    at: Literal["start", "end"]

    def attach(self, registers: Registers, act: str) -> Sequence[Removable]:
        """Let the registers `insert` themselves into the tokens that pass here, or `remove` themselves."""
        if self.at == "start":
            return [self.module.register_forward_pre_hook(getattr(registers, f"{act}_before"), with_kwargs=True)]
        return [self.module.register_forward_hook(getattr(registers, f"{act}_after"))]


class _Place(NamedTuple):
    """A site of the network's own code, where no module hands on the tokens."""

    site: Site

    def attach(self, registers: Registers, act: str) -> Sequence[Removable]:
        """Let the registers `insert` themselves into the tokens that pass here, or `remove` themselves."""
        return replace_at(replace(self.site, arrangement=None), getattr(registers, act))


def _find_ends(network: nn.Module, inside: list[Unit], spec: ImageSpec) -> list[_End | _Place]:
    """Return where the tokens enter the first block and where they leave the last one.

    Taps at the blocks should see the registers, so these are the end of the module before the first block, and the
    start of the one behind the last block, that hand on the very same tensor; else start and end of what contains the
    block; else the sites of the first unit's input and of the last unit's output.
    """
    first, last = inside[0].input, inside[-1].output
    events = _record_calls(network, spec)
    ends = [end for end, _ in events]
    found: list[_End | _Place] = [_Place(_find_sum(network, first, spec) or first), _Place(last)]
    if first.end == "in" and first.within is None:
        start = ends.index(_End(first.module, "start"))
        if before := [end for end, tensor in reversed(events[:start]) if tensor is events[start][1]]:
            found[0] = _choose(before, "end")
    if last.end == "out" and last.within is None:
        finish = len(ends) - 1 - ends[::-1].index(_End(last.module, "end"))
        if behind := [end for end, tensor in events[finish + 1 :] if tensor is events[finish][1]]:
            found[1] = _choose(behind, "start")
    return found


class _Sums(TorchFunctionMode):
    """Function mode that keeps the results of a network's additions."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_looking() and is_addition(func, args, kwargs):
            self.results.append(result)
        return result


def _find_sum(network: nn.Module, site: Site, spec: ImageSpec) -> Site | None:
    """Return the place of the addition, such as that of a position embedding, whose result enters a module.

    There it can be replaced for all that use it, and not for the module alone.
    """
    if site.end != "in" or site.within is not None:
        return None
    sums = _Sums()
    entering: list[Any] = []
    with sums, ExitStack() as stack:
        for handle in watch(replace(site, arrangement=None), entering.append):
            stack.callback(handle.remove)
        run_once(network, spec)
    numbers = [number for number, result in enumerate(sums.results) if result is entering[0]]
    if not numbers:
        return None
    return replace(site, module=network, end="sum", item=0, addition=numbers[-1], additions=len(sums.results))


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
        run_once(network, spec)
    finally:
        for handle in handles:
            handle.remove()
    return events
