"""What benchmarks/anatomies.py checks of one network: a function a column, which returns what it found or raises."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from tests.anatomy.map_products import Products
from tests.anatomy.zoo import Entry
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import vitclinic
from vitclinic.anatomy import Anatomy, double_differentiable, record_attention, stream, taps
from vitclinic.data import ImageSpec
from vitclinic.treatments import PatchDiversity

TREATMENTS: dict[str, tuple[dict[str, Any], ...]] = {
    "context_broadcasting": ({"scaled": True},),
    "squeeze_excitation": ({"reduction": 4},),  # of fewer hidden units, all may be idle
    "extra_block": ({},),
    "patch_diversity": ({},),
    "talking_heads": ({},),
    "uniform_heads": ({},),
    "no_softmax": ({},),
    "local_attention": ({"kernel": 99}, {"kernel": 3}),
    "gap_head": ({},),
    "conv_stem": ({"hidden": 8},),
    "relu_activation": ({},),
    "ffn_variant": ({},),
    "registers": ({},),
}
"""The options that a treatment is tried with, one after another."""
NEUTRAL = {("context_broadcasting", 0), ("talking_heads", 0), ("local_attention", 0)}
"""Treatments, and which of their options, that leave the outputs as they are."""
REPLACING = ("gap_head", "conv_stem", "ffn_variant", "uniform_heads")
"""Treatments that are there to replace or remove weights."""
TOLERANCE = 1e-5


class DoesNotApplyError(Exception):
    """The network does not have what a column is about."""


class WrongError(Exception):
    """What vitclinic said of the network is not so."""


class IdleError(WrongError):
    """Training leaves all weights that a treatment has added as they were."""


def answer(network: nn.Module, images: Tensor, grad: bool = False) -> Tensor:
    """Return all that the network returns as one tensor [B, values], whichever way it returns it."""
    torch.manual_seed(0)  # some encoders draw an order of patches
    with torch.set_grad_enabled(grad):
        output = network(images)
    plain = vars(output) if dataclasses.is_dataclass(output) and not isinstance(output, dict) else output
    return torch.cat([leaf.flatten(1) for leaf in tree_leaves(plain) if isinstance(leaf, Tensor)], dim=1)


def differs(actual: Tensor, expected: Tensor) -> bool:
    """Tell whether two tensors differ by more than rounding, relative to the largest value."""
    return not bool((actual - expected).abs().max() <= TOLERANCE * expected.abs().max())


def count_units(anatomy: Anatomy) -> str:
    """Return the family and how many units of each kind there are."""
    kinds = Counter(unit.kind for unit in anatomy.units)
    if not kinds.keys() - {"stem", "position", "head"}:
        raise ValueError("nothing but a stem and a head was found")
    return f"{anatomy.family}: " + ", ".join(f"{number} {kind}" for kind, number in kinds.items())


def read_features(anatomy: Anatomy, network: nn.Module, images: Tensor) -> str:
    """Read every unit's output on its grid, check every residual, and return the grids."""
    grids: dict[str, None] = {}  # in order
    outputs = {unit.name: unit.output for unit in anatomy.units}
    residuals = {unit.name: unit.residual for unit in anatomy.units if unit.residual is not None}
    parts = {(name, part): site for name, residual in residuals.items() for part, site in residual.sites.items()}

    def note(name: str, activation: Tensor) -> None:
        if not activation.isfinite().all():
            raise WrongError(f"the output of {name} is not finite")
        if outputs[name].layout.spatial:
            _, _, rows, columns = anatomy.grid(outputs[name], activation).shape
            grids[f"{rows}x{columns}"] = None

    with stream(outputs, note), taps(parts) as seen:
        answer(network, images)
    for name, residual in residuals.items():
        total, *added = (seen[name, part].flatten() for part in ("total", *(residual.sites.keys() - {"total"})))
        if differs(torch.stack(added).sum(0), total):
            raise WrongError(f"after {name} is not before + branch")
    if not grids:
        raise ValueError("no unit has a grid")
    return " ".join(grids)


def refuse_attention(found: list[Anatomy]) -> str:
    """Check that no map is claimed for an architecture that has none."""
    if claimed := [unit.name for anatomy in found for unit in anatomy.units if unit.attention is not None]:
        raise WrongError(f"the architecture has no softmax over tokens, yet {claimed[0]} is said to have a map")
    raise DoesNotApplyError("no softmax over tokens")


def read_attention(anatomy: Anatomy, network: nn.Module, images: Tensor) -> str:
    """Record the maps, check their rows and what they are multiplied by, and return how many units have one."""
    units = anatomy.of_kind("msa")
    mapped = [unit for unit in units if unit.attention is not None]
    if not mapped:
        raise ValueError(f"none of its {len(units)} msa units has a map" if units else "no msa unit was found")
    with Products() as products, record_attention(mapped, products.expect):
        answer(network, images)
    for name, sums in products.row_sums.items():
        if differs(sums, torch.ones_like(sums)):
            raise WrongError(f"rows of {name} sum to {float(sums.min()):.3g} at the least")
    if unapplied := products.unapplied(TOLERANCE):
        raise WrongError(f"the map of {unapplied[0]} times V is not what the network computes")
    return f"{len(products.row_sums)} of {len(units)}"


def remove_units(anatomy: Anatomy, network: nn.Module, images: Tensor) -> str:
    """Remove every unit that can be removed, one by one, and return how many those are."""
    whole = answer(network, images)
    removable = [unit for unit in anatomy.units if unit.removal is not None]
    if not removable:
        raise ValueError("no unit can be removed")
    for unit in removable:
        silenced = unit.residual is not None and unit.removal is not None and "set to zero" in unit.removal.how
        sites = unit.residual.sites if silenced and unit.residual else {}
        with anatomy.remove(unit), taps(sites) as seen:
            without = answer(network, images)
        left = [seen[part].flatten() for part in sites if part not in ("branch", "total")]
        if sites and differs(seen["total"].flatten(), torch.stack(left).sum(0)):
            raise WrongError(f"without {unit.name} the state does not pass as it is")
        if not differs(without, whole):
            raise WrongError(f"removing {unit.name} changes nothing")
        if not torch.equal(answer(network, images), whole):
            raise WrongError(f"after {unit.name} was removed the output does not come back")
    return f"{len(removable)} of {len(anatomy.units)}"


def measure_curvature(network: nn.Module, images: Tensor) -> str:
    """Take one Hessian-vector product of a cross-entropy, and return its norm."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    with double_differentiable():
        outputs = answer(network, images, grad=True)
        loss = F.cross_entropy(outputs, torch.arange(len(outputs)))
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
        slope = sum((g * torch.randn_like(g)).sum() for g in gradients)
        product = torch.autograd.grad(slope, parameters, materialize_grads=True)
    norm = float(torch.stack([part.norm() for part in product]).norm())
    if not 0 < norm < float("inf"):
        raise WrongError(f"the Hessian-vector product has norm {norm}")
    return f"{norm:.1e}"


@contextmanager
def known(anatomy: Anatomy | None) -> Iterator[None]:
    """Let the first `Anatomy.of` return an anatomy that was copied with its network, since observing takes longest."""
    find, left = Anatomy.of, [anatomy]

    def of(network: nn.Module, *arguments: Any, **keywords: Any) -> Anatomy:
        found = left.pop() if left else None
        return found if found is not None else find(network, *arguments, **keywords)

    with mock.patch.object(Anatomy, "of", of):
        yield


def apply_treatment(entry: Entry, untreated: nn.Module, anatomy: Anatomy | None, name: str) -> str:
    """Treat copies of the network with each of the options in turn, check them, and train them for two steps."""
    for number, options in enumerate(TREATMENTS[name]):
        try:
            treat_and_train(
                entry, copy.deepcopy((untreated, anatomy)), name, options, (name, number) in NEUTRAL, seed=0
            )
        except IdleError:  # all hidden units of a small new part may be idle by chance: not twice
            treat_and_train(
                entry, copy.deepcopy((untreated, anatomy)), name, options, (name, number) in NEUTRAL, seed=1
            )
    return "fits"


def treat_and_train(
    entry: Entry,
    copied: tuple[nn.Module, Anatomy | None],
    name: str,
    options: dict[str, Any],
    neutral: bool,
    seed: int,
) -> None:
    """Treat a network, check it, and train it for two steps."""
    network, images = copied[0], entry.images()
    channels, *size = entry.image
    spec = ImageSpec(10, channels, tuple(size))
    names, before = set(network.state_dict()), answer(network, images)
    torch.manual_seed(seed)
    with known(copied[1]):
        if name == "patch_diversity":  # changes training, not the network
            train_diversely(network, images, spec)
            return
        treated = vitclinic.treat(network, {name: options}, spec=spec)
    if neutral and differs(answer(treated, images), before):
        raise WrongError(f"with {options or 'its first weights'} the outputs are not what they were")
    if name not in REPLACING and (renamed := names - set(treated.state_dict())):
        raise WrongError(f"{min(renamed)} has lost its name")
    train(treated, images, partial(answer, treated, images, grad=True), names)


def train_diversely(network: nn.Module, images: Tensor, spec: ImageSpec) -> None:
    """Train for two steps with the losses of patch_diversity."""
    diversity = PatchDiversity(network, classes=spec.num_classes, size=spec.img_size)
    mixed, _, targets = diversity.mix(images, torch.arange(len(images)))
    train(
        nn.ModuleList((network, diversity)),
        images,
        partial(answer, network, mixed, grad=True),
        {f"0.{name}" for name in network.state_dict()},
        lambda: sum(diversity(targets).values(), torch.zeros(())),
    )


def train(
    network: nn.Module,
    images: Tensor,
    forward: Callable[[], Tensor],
    known: set[str],
    losses: Callable[[], Tensor] = lambda: torch.zeros(()),
) -> None:
    """Make two steps of SGD; raise unless losses are finite and what is not `known`, or else any weight, changes."""
    network.train()
    trained = {name: p for name, p in network.named_parameters() if name not in known} or dict(
        network.named_parameters()
    )
    start = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(), torch.arange(len(images))) + losses()
        loss.backward()
        optimizer.step()
        if not loss.isfinite():
            raise WrongError("the loss is not finite")
    if not all(p.isfinite().all() for p in network.parameters()):
        raise WrongError("a weight is not finite after two steps")
    if all(torch.equal(p, start[name]) for name, p in trained.items()):
        raise IdleError("two steps of training change nothing")
