"""Neural tangent kernel, its condition number, and the changes to a network while it is measured [chen2022 App. G]."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.overrides import TorchFunctionMode

from vitclinic._core.errors import ModelError
from vitclinic._core.memory import is_out_of_memory
from vitclinic.anatomy import double_differentiable
from vitclinic.probes.footprint import Footprint
from vitclinic.probes.output import read_output

_BatchNorm = nn.modules.batchnorm._BatchNorm


def batch_norms(network: nn.Module) -> list[_BatchNorm]:
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]


class _ReLU(TorchFunctionMode):
    """Mode in which torch's GELU, called as a function or by a module, is ReLU."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function is F.gelu:
            return F.relu(args[0] if args else kwargs["input"])
        return function(*args, **(kwargs or {}))


@contextmanager
def replace_gelu(network: nn.Module) -> Iterator[None]:
    """Replace every GELU by ReLU [chen2022 App. G]: torch's own, and modules with "gelu" in their name.

    The names catch approximations of libraries, such as QuickGELU.
    """
    with ExitStack() as undo:
        for parent in network.modules():
            for name, child in parent.named_children():
                if "gelu" in type(child).__name__.lower() and not _has_parts(child):
                    undo.callback(parent._modules.__setitem__, name, child)
                    parent._modules[name] = nn.ReLU()
        undo.enter_context(_ReLU())
        yield


@contextmanager
def randomize_head(network: nn.Module, classes: int, deviation: float, seed: int) -> Iterator[None]:
    """Replace the weights of the classifier by Gaussian ones without bias, since some start at zero."""
    found = [module for module in network.modules() if isinstance(module, nn.Linear) and module.out_features == classes]
    if not found:
        raise ModelError(
            f"the network has no linear layer with {classes} outputs to be drawn with `head`. Leave it out."
        )
    head = found[-1]
    drawn = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed)) * deviation
    values = [(head.weight, drawn)] + ([] if head.bias is None else [(head.bias, torch.zeros(classes))])
    own = [parameter.detach().clone() for parameter, _ in values]
    try:
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(value)
        yield
    finally:
        with torch.no_grad():
            for (parameter, _), value in zip(values, own, strict=True):
                parameter.copy_(value)


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in (*module.children(), *module.parameters()))


@contextmanager
def recompute_batch_norm(network: nn.Module, batches: Iterable[Tensor]) -> Iterator[None]:
    """Give BatchNorm the mean and variance of these images, averaged over batches, and fix them.

    Batches should have the same size. A network without BatchNorm is not called.
    """
    norms = batch_norms(network)
    if not norms:
        yield
        return
    with ExitStack() as undo:
        for norm in norms:
            _give_own_statistics(norm, undo)
        with torch.no_grad():
            for images in batches:
                network(images)
        for norm in norms:
            norm.eval()
        yield


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _give_own_statistics(norm: _BatchNorm, undo: ExitStack) -> None:
    """Give a BatchNorm layer new running statistics that average over all batches to come."""
    for name in ("training", "momentum", "track_running_stats"):
        undo.callback(setattr, norm, name, getattr(norm, name))
    like = next((t for t in (*norm.parameters(), *norm.buffers()) if t.is_floating_point()), torch.empty(0))
    zeros = torch.zeros(norm.num_features, dtype=like.dtype, device=like.device)
    count = torch.zeros((), dtype=torch.long, device=like.device)
    for name, value in zip(_STATISTICS, (zeros, zeros + 1, count), strict=True):
        undo.callback(norm._buffers.__setitem__, name, norm._buffers.get(name))
        norm._buffers[name] = value
    norm.momentum = None
    norm.track_running_stats = True
    norm.train()


log = logging.getLogger(__name__)

GIBIBYTE = 2**30

_COLUMNS = 2**16
"""Columns of J multiplied in float64 at a time."""


@dataclass(frozen=True)
class Group:
    """Parameters whose part of J is computed together, or a part of one large parameter."""

    names: tuple[str, ...]
    columns: slice
    """Slice of their concatenated weights."""

    @property
    def width(self) -> int:
        return int(self.columns.stop - self.columns.start)


class TangentKernel:
    """Neural tangent kernel: `TangentKernel(network)(images)` returns Theta = J J^T, [m, m] in float64.

    All parameters count, also frozen ones. The network must process each image independently, so BatchNorm must be in
    eval mode.

    Args:
        network: The network.
        memory: Maximum bytes of J to hold.
        at_a_time: Images per pass.

    Example:
        >>> network = nn.Linear(3, 2)
        >>> images = torch.eye(3)
        >>> TangentKernel(network)(images)  # for each of two outputs x_i . x_j, and 1 for its bias
        tensor([[4., 2., 2.],
                [2., 4., 2.],
                [2., 2., 4.]], dtype=torch.float64)
    """

    def __init__(self, network: nn.Module, *, memory: int = GIBIBYTE, at_a_time: int = 48) -> None:
        self.network = network
        self.parameters = {name: p.detach() for name, p in network.named_parameters() if p.is_floating_point()}
        if not self.parameters:
            raise ModelError("the network has no trainable parameters.")
        self.dtype = reduce(torch.promote_types, (p.dtype for p in self.parameters.values()))
        self.memory = memory
        self.at_a_time = at_a_time
        self.one_by_one = False
        """True if vmap fails for the network, so that images are processed one by one."""

    @property
    def rounding(self) -> float:
        """Relative rounding error of the network's coarsest dtype."""
        return max(torch.finfo(p.dtype).eps for p in self.parameters.values())

    def __call__(self, images: Tensor) -> Tensor:
        m = len(images)
        theta = torch.zeros(m, m, dtype=torch.float64, device=images.device)
        with double_differentiable(), torch.enable_grad():  # vmap needs the plain attention kernel
            for group in self.groups(m):
                for columns in torch.split(self._jacobian(group, images), _COLUMNS, dim=1):
                    exact = columns.double()
                    theta.addmm_(exact, exact.T)
        if not bool(theta.isfinite().all()):
            raise ModelError("the gradients of the network's outputs are not finite (NaN or infinity).")
        return theta

    def groups(self, images: int) -> list[Group]:
        """Return the parameters in groups whose rows of J fit into memory for this many images."""
        sizes = {name: p.numel() for name, p in self.parameters.items()}
        # Half of the memory: the gradients of a pass exist beside the rows that they are copied into.
        return list(_group(sizes, max(1, self.memory // (2 * self.dtype.itemsize * images))))

    def peak_memory(self, footprint: Footprint, images: int) -> float:
        """Estimate the bytes held at the peak: rows of J beside the gradients of a pass, twice, or their graph."""
        size, peaks = self.dtype.itemsize, []
        for group in self.groups(images):
            at_a_time = min(images, self._images_at_a_time(group))
            rows, gradients = images * group.width * size, at_a_time * self._width(group) * size
            exact = images * min(group.width, _COLUMNS) * 8
            peaks.append(rows + max(2 * gradients, exact, gradients + footprint.image_gradient(at_a_time)))
        return footprint.image * images + max(peaks)

    def _width(self, group: Group) -> int:
        return sum(self.parameters[name].numel() for name in group.names)

    def _images_at_a_time(self, group: Group) -> int:
        return max(1, min(self.at_a_time, self.memory // (2 * self._width(group) * self.dtype.itemsize)))

    def _jacobian(self, group: Group, images: Tensor) -> Tensor:
        """Return the columns of J of a group, [m, p]."""
        rows = torch.empty(len(images), group.width, dtype=self.dtype, device=images.device)
        start = 0
        for some in torch.split(images, self._images_at_a_time(group)):
            gradients = self._gradients(group.names, some)
            flat = torch.cat([gradients[name].flatten(1) for name in group.names], dim=1)
            rows[start : start + len(some)] = flat[:, group.columns]
            start += len(some)
            del gradients, flat  # before those of the next images are made
        return rows

    def _gradients(self, names: tuple[str, ...], images: Tensor) -> Mapping[str, Tensor]:
        """Return the gradients of the summed outputs of each image, {name: [m, ...]}."""
        wanted = {name: self.parameters[name] for name in names}
        rest = {name: p for name, p in self.parameters.items() if name not in wanted}

        def sum_logits(parameters: dict[str, Tensor], image: Tensor) -> Tensor:
            return read_output(functional_call(self.network, {**rest, **parameters}, (image[None],))).sum()

        if not self.one_by_one:
            try:
                return vmap(grad(sum_logits), in_dims=(None, 0))(wanted, images)  # type: ignore[no-any-return]
            except Exception as error:  # vmap fails in many ways
                if is_out_of_memory(error):
                    raise
                log.info("vmap fails for the network; processing images one by one", exc_info=error)
                self.one_by_one = True
        return _differentiate_one_by_one(sum_logits, wanted, images)


def _differentiate_one_by_one(
    function: Callable[[dict[str, Tensor], Tensor], Tensor], parameters: Mapping[str, Tensor], images: Tensor
) -> dict[str, Tensor]:
    leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    rows: dict[str, list[Tensor]] = {name: [] for name in leaves}
    for image in images:
        value = function(leaves, image)
        found: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if value.requires_grad:  # otherwise it depends on none of these parameters
            found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        for (name, leaf), part in zip(leaves.items(), found, strict=True):
            rows[name].append(torch.zeros_like(leaf) if part is None else part)
    return {name: torch.stack(parts).detach() for name, parts in rows.items()}


def _group(sizes: Mapping[str, int], limit: int) -> Iterator[Group]:
    """Yield groups of neighbouring parameters of at most `limit` weights; a larger parameter comes in parts."""
    names: list[str] = []
    width = 0
    for name, size in sizes.items():
        if names and width + size > limit:
            yield Group(tuple(names), slice(0, width))
            names, width = [], 0
        if size > limit:
            for start in range(0, size, limit):
                yield Group((name,), slice(start, min(start + limit, size)))
        else:
            names.append(name)
            width += size
    if names:
        yield Group(tuple(names), slice(0, width))


@dataclass(frozen=True)
class Conditioning:
    """Eigenvalues of a kernel in descending order, and kappa = lambda_1 / lambda_m."""

    eigenvalues: NDArray[np.float64]
    kappa: float
    """Condition number; a lower bound unless `resolved`."""
    resolved: bool
    """True if lambda_m is larger than the rounding error."""


def conditioning(theta: Tensor, rounding: float) -> Conditioning:
    """Return the condition number of a kernel J J^T, where J has a relative error of about `rounding`.

    The error of J is about |J| rounding, which changes an eigenvalue as small as lambda_1 rounding^2 by its own size.
    Values below a few times that (errors of many operations add up), or below the rounding of the product in float64,
    cannot be told from zero.
    """
    eigenvalues = torch.linalg.eigvalsh(theta).flip(0).cpu().numpy()
    largest, smallest = float(eigenvalues[0]), float(eigenvalues[-1])
    if largest <= 0:
        raise ModelError("the gradients of the network's outputs are all zero.")
    least = largest * max((10 * rounding) ** 2, 10 * len(eigenvalues) * float(np.finfo(np.float64).eps))
    return Conditioning(eigenvalues, largest / max(smallest, least), smallest > least)
