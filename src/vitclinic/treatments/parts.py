"""Finding the part of a network that a treatment changes, and saying which one is missing.

A treatment fits any network that has the part named in `Treatment.part`, whatever its class or library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitclinic._core.errors import AnatomyError, TreatmentError, first_line
from vitclinic.anatomy import Anatomy, Unit, eval_mode, taps
from vitclinic.anatomy.forward import Removable, eager
from vitclinic.anatomy.maps import MHA_SIGNATURE, SeenMap
from vitclinic.anatomy.sites import Site, watch
from vitclinic.anatomy.wrappers import call_with_images
from vitclinic.treatments.attention_edit import is_edited, is_softmax_of_map

if TYPE_CHECKING:
    from vitclinic.data import ImageSpec
    from vitclinic.treatments.treatment import Treatment


def example_image(network: nn.Module, spec: ImageSpec, batch: int = 1) -> Tensor:
    """Return noise of the shape of the network's images, in its precision and on its device."""
    like = next((p for p in network.parameters() if p.is_floating_point()), torch.empty(0))
    noise = torch.rand(batch, spec.in_chans, *spec.img_size, generator=torch.Generator().manual_seed(0))
    return noise.to(like.device, like.dtype)


def run_once(network: nn.Module, spec: ImageSpec, batch: int = 1, *, grad: bool = False) -> Any:
    """Return the network's output for noise, in eval mode, uncompiled and, unless `grad`, without gradients."""
    with eager(), eval_mode(network), torch.set_grad_enabled(grad):
        return call_with_images(network, example_image(network, spec, batch))


def examine(treatment: Treatment, network: nn.Module, spec: ImageSpec) -> Anatomy:
    """Return the anatomy of the network at the size of its images.

    Raises:
        TreatmentError: The network's parts cannot be told apart.
    """
    try:
        with eager():  # a network compiled in place
            return Anatomy.of(network, example_image(network, spec))
    except AnatomyError as error:
        raise missing(treatment, network, str(error)) from error


def missing(treatment: Treatment, network: nn.Module, why: str = "") -> TreatmentError:
    """Return the error for a network without the part that a treatment changes."""
    found = why.rstrip(".") or "this network has none"
    return TreatmentError(
        f"{treatment.name} does not fit {type(network).__name__}: it needs {treatment.part}; {found}."
    )


def replace_at(site: Site, act: Callable[[Tensor], Tensor]) -> Sequence[Removable]:
    """Replace what passes a site by what `act` returns for it, also where it enters or leaves a module.

    Args:
        site: The site, of a module that runs once.
        act: A module or a method, not a closure, so that a copied network has its own.

    Returns:
        The handles of the hooks.
    """
    passing = _Passing(site, act)
    if site.within is not None or site.end not in ("in", "out"):
        return watch(site, act)
    if site.end == "in":
        return [site.module.register_forward_pre_hook(passing.enter, with_kwargs=True)]
    return [site.module.register_forward_hook(passing.leave)]


class _Passing:
    """Hooks that replace one value among those that enter or leave a module."""

    def __init__(self, site: Site, act: Callable[[Tensor], Tensor]) -> None:
        self._site, self._act = site, act

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        values = self._change([*args, *kwargs.values()])
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        return self._change([output])[0] if isinstance(output, Tensor) else type(output)(self._change([*output]))

    def _change(self, values: list[Any]) -> list[Any]:
        item, arrangement = self._site.item, self._site.arrangement
        replaced = self._act(self._site.pick(values))
        values[item] = replaced if arrangement is None else arrangement.undo(replaced, values[item])
        return values


def check_tokens(treatment: Treatment, network: nn.Module, inside: Sequence[Unit], spec: ImageSpec) -> int:
    """Return the width of the tokens; raise unless one sequence of tokens, of any length, passes the blocks' units."""
    sites = {(unit.name, end): getattr(unit, end) for unit in inside for end in ("input", "output")}
    with taps(sites) as seen:
        run_once(network, spec)
    shapes = {tuple(activation.shape) for activation in seen.values()}
    mixing = [unit.name for unit in inside if unit.kind not in ("msa", "mlp")]
    windowed = [unit.name for unit in inside if unit.attention is not None and unit.attention.is_windowed]
    if len(shapes) != 1 or any(len(shape) != 3 for shape in shapes) or mixing or windowed:
        fixed = (mixing or windowed)[:1]
        raise missing(treatment, network, *(f"{name} mixes a fixed number of tokens" for name in fixed))
    ((_, _, width),) = shapes
    return width


class Part(nn.Module):
    """A module that a treatment adds to a unit; it is not one of the unit's own layers."""


def own_modules(module: nn.Module) -> list[nn.Module]:
    """Return `module` and all modules in it, in order, except for those that treatments added."""
    children = [child for child in module.children() if not isinstance(child, Part)]
    return [module, *(inner for child in children for inner in own_modules(child))]


def is_linear(layer: nn.Module) -> bool:
    """Return True for a linear layer over channels: a Linear, what stands in for one, or a 1 x 1 convolution."""
    pointwise = isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and layer.groups == 1
    return pointwise or isinstance(getattr(layer, "in_features", None), int)


def own_module(anatomy: Anatomy, unit: Unit) -> nn.Module | None:
    """Return the module that does the work of this unit and of no other, as a block that has two of them would."""
    if unit.module is None:
        return None
    inside = set(unit.module.modules())
    others = [other for other in anatomy.units if other is not unit and other.block == unit.block]
    return None if any(other.module in inside for other in others) else unit.module


def block_module(anatomy: Anatomy, unit: Unit) -> nn.Module:
    """Return the module that is a unit's block; the network, if the block is no one module."""
    modules: dict[str, nn.Module] = dict(anatomy.network.named_modules())
    return modules.get(unit.block or "", anatomy.network)


def layers_in(anatomy: Anatomy, units: Sequence[Unit], spec: ImageSpec) -> dict[str, list[nn.Module]]:
    """Return the layers that run inside each unit, by its name and in the order in which they run.

    A layer is a linear one, or a module without children. Inside is what its own module contains or, if it has none,
    what runs between its input and the end of its branch.
    """
    ran: list[nn.Module | tuple[str, str]] = []
    handles: list[Removable] = []
    for layer in _layers(anatomy.network):
        handles.append(layer.register_forward_hook(lambda module, *_: ran.append(module)))
    for unit in units:
        for end, site in (("start", unit.input), ("end", unit.branch or unit.output)):
            handles += watch(site, partial(_mark, ran, (end, unit.name)))
    try:
        run_once(anatomy.network, spec)
    finally:
        for handle in handles:
            handle.remove()
    return {unit.name: _layers_of(anatomy, unit, ran) for unit in units}


def _mark(ran: list[Any], mark: tuple[str, str], _: Any) -> None:
    ran.append(mark)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, Part):
            continue
        if is_linear(child) or not any(True for _ in child.children()):
            yield child
        else:
            yield from _layers(child)


def _layers_of(anatomy: Anatomy, unit: Unit, ran: Sequence[nn.Module | tuple[str, str]]) -> list[nn.Module]:
    inside: Sequence[Any] = ran
    if (module := own_module(anatomy, unit)) is not None:
        own = set(own_modules(module))
        inside = [layer for layer in ran if layer in own]
    elif ("start", unit.name) in ran and ("end", unit.name) in ran:
        end = ran.index(("end", unit.name))
        start = max(place for place in range(end) if ran[place] == ("start", unit.name))
        inside = ran[start:end]
    return list(dict.fromkeys(layer for layer in inside if isinstance(layer, nn.Module)))


class Attention:
    """An attention whose map is in reach: its unit, the module that computes it, and its number of heads."""

    def __init__(self, unit: Unit, module: nn.Module) -> None:
        self.unit, self.module = unit, module
        self.heads: int = getattr(module, "map_heads", 0)  # of an attention that was edited before
        self.maps = 1 if is_edited(module) else 0
        self.cut = False
        """True if a pass with gradients computes the map without."""


def find_attentions(treatment: Treatment, anatomy: Anatomy, spec: ImageSpec, *, mixed: bool = False) -> list[Attention]:
    """Return the attentions of a network that compute one map over tokens a call, by functions that can be replaced.

    Attention without such a map (an outlooker's), or whose map is changed after the softmax or computed in groups of
    heads, is left out where there is other attention.

    Args:
        treatment: The treatment that needs them.
        anatomy: The anatomy of the network.
        spec: Image shape and number of classes.
        mixed: Whether the network itself may mix the heads of a map after the softmax (talking heads, as in CaiT).

    Raises:
        TreatmentError: There is none, or one of them computes its map in another way.
    """
    found: dict[nn.Module, Attention] = {}
    for unit in anatomy.of_kind("msa"):
        if (module := _attention_module(anatomy, unit, mixed)) is not None:
            found.setdefault(module, Attention(unit, module))
    if not found:
        mapped = next((unit.name for unit in anatomy.of_kind("msa") if unit.attention is not None), None)
        reason = "" if mapped is None else f"that of {mapped} is changed after its softmax, or has several softmaxes"
        raise missing(treatment, anatomy.network, reason)
    with ExitStack() as stack:
        for attention in found.values():
            if not is_edited(attention.module):
                stack.enter_context(_witnessed(attention))
        try:
            run_once(anatomy.network, spec, grad=True)
        except RuntimeError as error:  # of layers that have no gradient, or work in place on what they may not
            reason = f"a pass with gradients fails ({first_line(error)})"
            raise missing(treatment, anatomy.network, reason) from error
    for attention in found.values():
        if (why := _obstacle(attention)) is not None:
            kind = type(attention.module).__name__
            raise missing(treatment, anatomy.network, f"{attention.unit.name} is a {kind}, which {why}")
    return list(found.values())


def check_differentiable(treatment: Treatment, network: nn.Module, attentions: Sequence[Attention]) -> None:
    """Raise a TreatmentError if the derivative of an attention is written by hand: an edited map has another one."""
    if cut := next((attention for attention in attentions if attention.cut), None):
        why = f"that of {cut.unit.name} is computed without gradients (an autograd.Function, no_grad, or a reentrant"
        raise missing(treatment, network, f"{why} checkpoint), so that its edit could not be trained")


def _attention_module(anatomy: Anatomy, unit: Unit, mixed: bool) -> nn.Module | None:
    """Return the module that computes a unit's map, or that computed it before it was edited; None without a map.

    If several units have their maps in one module, as when a network calls one attention repeatedly, it is the unit's
    own module.
    """
    if unit.attention is None or not _is_one_softmax(unit.attention.seen, mixed):
        inside = [] if unit.module is None else own_modules(unit.module)
        return next((module for module in inside if is_edited(module)), None)
    module = unit.attention.module
    shared = [other for other in anatomy.of_kind("msa") if other.attention and other.attention.module is module]
    return module if len(shared) == 1 or unit.module is None else unit.module


def _is_one_softmax(seen: SeenMap | None, mixed: bool) -> bool:
    """Return True if a map is what one softmax returns, applied as it is or, if allowed, with its heads mixed."""
    return seen is None or (len(seen.numbers) == 1 and seen.operand is None and (mixed or not seen.mixed_later))


def _obstacle(attention: Attention) -> str | None:
    """Return why the map of an attention cannot be edited, or None."""
    if getattr(attention.module, "uniform_heads", getattr(attention.module, "uniform_head", False)):
        return "has a uniform head already"
    if attention.maps != 1:
        return f"computes {attention.maps} maps" if attention.maps else "computes its map by other functions"
    seen = None if attention.unit.attention is None else attention.unit.attention.seen
    if seen is not None and not _is_plain(seen, attention.heads):
        return "has its windows and heads on other axes than [images x windows, heads, queries, keys]"
    return None


def _is_plain(seen: SeenMap, heads: int) -> bool:
    """Return True for a map [B * W, H, Q, K] or [B, W, H, Q, K], or [B * H, Q, K] without windows."""
    images = (-1,) if seen.windows == 1 else (-1, seen.windows)
    one_axis = (-1,) if heads == 1 else (-1, heads)
    if seen.tail != (-2, -1):
        return False
    apart = ((-1,), (seen.windows,), (heads,))
    return seen.splits in ((images, (heads,)), apart) or (seen.windows == 1 and seen.splits == (one_axis,))


@contextmanager
def _witnessed(attention: Attention) -> Iterator[None]:
    """Count the maps of an attention, and read their number of heads, while its module runs."""
    witness = _Witness(attention)
    handles = [
        attention.module.register_forward_pre_hook(witness.start, prepend=True),
        attention.module.register_forward_hook(witness.stop, always_call=True),
    ]
    try:
        yield
    finally:
        witness.stop()
        for handle in handles:
            handle.remove()


class _Witness(TorchFunctionMode):
    """Function mode that sees the calls that an edit would replace."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self._attention = attention
        self._on = False

    def start(self, *_: Any) -> None:
        self._attention.maps = 0
        self._on = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self, *_: Any) -> None:
        if self._on:
            self._on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            self._note(int(MHA_SIGNATURE.bind(*args, **kwargs).arguments["num_heads"]))
        elif func is F.scaled_dot_product_attention or is_softmax_of_map(func, args, kwargs):
            tensor: Tensor = args[0] if args else next(iter(kwargs.values()))
            self._note(tensor.shape[-3])  # for [B * H, N, D], the heads of the only image
        return func(*args, **kwargs)

    def _note(self, heads: int) -> None:
        self._attention.maps += 1
        self._attention.cut |= not torch.is_grad_enabled()
        self._attention.heads = heads
