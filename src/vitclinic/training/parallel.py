"""How the processes of a run share a network: a copy each (DDP), or a part of every weight each (FSDP2).

With `parallel=fsdp`, a process keeps its part of all weights, gradients, averaged weights and of the optimizer's state.
The weights of a block are gathered for its forward and its backward pass and let go; what is in no block is there for
the whole pass. Gradients are averaged and divided after every pass, also where DDP would wait for the last micro-batch:
gradients that wait would be whole ones. Files hold whole tensors, so that any number of processes goes on from them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitclinic._core.distributed import Distributed
from vitclinic._core.errors import RecipeError, VitclinicError
from vitclinic._core.sharded import divide_like, gather_whole, is_sharded, join_parts, own_part, own_parts, total_norm
from vitclinic.data import ImageSpec
from vitclinic.models import Normalized
from vitclinic.tasks.criterion import Criterion
from vitclinic.training.layer_decay import examine
from vitclinic.training.network import Learner
from vitclinic.training.recipe import Recipe

NOTHING_TO_DIVIDE = "parallel is fsdp, but there is one process: it holds all weights, as with ddp"

REACHES_IN = (
    "parallel=fsdp does not fit this network: a part of it computes with the weights of a block from outside of the"
    " block; use parallel=ddp."
)


def wrap_in_ddp(learner: nn.Module, distributed: Distributed, device: torch.device) -> DistributedDataParallel | None:
    """Return the learner wrapped in DDP, or None for a process alone."""
    if distributed.size == 1:
        return None
    return DistributedDataParallel(learner, device_ids=[device.index] if device.type == "cuda" else None)


def count_micro_batches(recipe: Recipe, distributed: Distributed, sharded: bool) -> int:
    """Return how many micro-batches a step has: `accumulate`, or more if shards share ascents of fewer images.

    With shards, all processes climb together: an ascent of m images is a micro-batch of m, of all processes.

    Raises:
        RecipeError: The batch does not divide.
    """
    parts = distributed.size * recipe.accumulate
    if recipe.batch_size % parts:
        raise RecipeError(
            f"batch_size {recipe.batch_size} does not divide into {distributed.size} processes x {recipe.accumulate}"
            " micro-batches; choose a multiple."
        )
    images = recipe.batch_size // recipe.accumulate
    together = min([treatment.ascent_images(images) for treatment in recipe.treatments], default=images)
    if not sharded or together == images:
        return recipe.accumulate
    if images % together or together % distributed.size:
        raise RecipeError(
            f"With parallel=fsdp all processes climb together: {images} images do not divide into ascents of {together}"
            f" images on {distributed.size} processes; choose another m."
        )
    return recipe.batch_size // together


def describe_sharing(recipe: Recipe, blocks: Sequence[nn.Module] | None, images: int) -> list[str]:
    """Return notices of what `parallel=fsdp` changes.

    Args:
        recipe: The recipe.
        blocks: The blocks that are gathered; None if there is nothing to divide.
        images: Images of a micro-batch of all processes.
    """
    if recipe.parallel == "ddp":
        return []
    if blocks is None:
        return [NOTHING_TO_DIVIDE]
    climbing = [treatment.name for treatment in recipe.treatments if treatment.step_rule() is not None]
    found = [f"parallel is fsdp: {name} climbs on {images} images of all processes together" for name in climbing]
    return found if blocks else [*found, "parallel is fsdp: all weights are gathered at once, for want of known blocks"]


def choose_blocks(recipe: Recipe, learner: Learner, spec: ImageSpec, divided: bool) -> list[nn.Module]:
    """Return the blocks whose weights are gathered at a time.

    Args:
        recipe: The recipe.
        learner: The network with its losses.
        spec: The images.
        divided: A pass sees only a part of a process's images.

    Raises:
        RecipeError: What cannot be combined with `parallel=fsdp`.
    """
    _refuse_unshardable(recipe, learner.criterion, divided)
    blocks = find_blocks(learner.network, spec)
    refuse_indivisible(learner, blocks)
    return blocks


def _refuse_unshardable(recipe: Recipe, criterion: Criterion | None, divided: bool) -> None:
    refused = {
        "precision=fp16 (use bf16)": recipe.precision == "fp16",
        "compile=true": recipe.compile,
        "optimizer=lamb, whose rates depend on whole matrices": recipe.optimizer.name == "lamb",
        "logging.trajectory, which reads all weights in one process": recipe.logging.trajectory is not None,
        f"the task {recipe.task.name}{' with micro-batches' if divided else ''}, which computes with the whole network"
        " beside its passes": criterion is not None and criterion.needs_whole(divided),
    }
    for what, found in refused.items():
        if found:
            raise RecipeError(f"parallel=fsdp cannot be combined with {what}: change one of them.")


class Shards:
    """The parts that this process holds of a learner's weights, and what is whole only for a time.

    Args:
        network: The network, before objectives and criterion add to it.
        distributed: The processes.
        device: Where to compute.
    """

    def __init__(self, network: Normalized, distributed: Distributed, device: torch.device) -> None:
        self.network, self.distributed, self.device = network, distributed, device
        self.ema: ModelEmaV3 | None = None
        """Averages of this process's parts."""
        self.whole = copy.deepcopy(network)
        """The network to evaluate: without weights, except inside of `gathered`."""
        for module in self.whole.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self._release()

    def divide(
        self, learner: nn.Module, blocks: Sequence[nn.Module], optimizer: torch.optim.Optimizer, decay: float | None
    ) -> ModelEmaV3 | None:
        """Divide the weights of a learner that contains the network, block by block, and hand the optimizer the parts.

        Returns:
            The averages of the network's parts (`OwnParts`), if `decay` asks for such.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        before = dict(learner.named_parameters())
        mesh = init_device_mesh(self.device.type, (self.distributed.size,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(learner, mesh=mesh)
        after = dict(learner.named_parameters())
        parts = {id(parameter): after[name] for name, parameter in before.items()}
        for group in optimizer.param_groups:
            group["params"] = [parts[id(parameter)] for parameter in group["params"]]
        if decay:
            self.ema = ModelEmaV3(OwnParts(self.network), decay=decay, use_warmup=True)
        return self.ema

    def gather(self, state: Any) -> Any:
        """Return a nested state with whole tensors in the leading process, which alone keeps them."""
        if isinstance(state, Tensor):
            whole = gather_whole(state)
            if whole is state:
                return state
            return whole.cpu() if self.distributed.is_leader else None
        if isinstance(state, Mapping):
            return {key: self.gather(value) for key, value in state.items()}
        return [self.gather(value) for value in state] if isinstance(state, list | tuple) else state

    def exported_state(self) -> dict[str, Tensor]:
        """Return the weights of the network to evaluate and store, whole in the leading process."""
        found: dict[str, Tensor] = self.gather(self._exported_parts())
        return found

    def _exported_parts(self) -> dict[str, Tensor]:
        state = self.network.state_dict()
        if self.ema is None:
            return state
        averaged = self.ema.module.state_dict()
        return {name: join_parts(averaged[str(number)], like) for number, (name, like) in enumerate(state.items())}

    def load_exported(self, state: Mapping[str, Tensor]) -> None:
        """Take over the whole weights of the network to evaluate."""
        if self.ema is None:
            load_divided(self.network, state)
            return
        averaged = self.ema.module.state_dict()
        for number, (name, like) in enumerate(self.network.state_dict().items()):
            averaged[str(number)].copy_(own_part(divide_like(state[name], like)))

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Hold the whole network to evaluate in each process inside the context, which all of them enter."""
        parts = self._exported_parts()
        whole = {name: gather_whole(part) if is_sharded(part) else part.clone() for name, part in parts.items()}
        self.whole.load_state_dict(whole, assign=True)
        del parts, whole
        try:
            yield self.whole
        finally:
            self._release()

    def _release(self) -> None:
        """Let go of the weights of the network to evaluate."""
        for module in self.whole.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    blank = torch.empty_like(parameter, device="meta")
                    module._parameters[name] = nn.Parameter(blank, requires_grad=parameter.requires_grad)


class OwnParts(nn.Module):
    """This process's parts of a network's state, numbered in its order, for `ModelEmaV3`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        for number, value in enumerate(network.state_dict().values()):
            part = own_part(value)
            if part.is_floating_point():
                self.register_parameter(str(number), nn.Parameter(part, requires_grad=False))
            else:
                self.register_buffer(str(number), part)


def load_divided(module: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> None:
    """Load whole tensors into a module, of which each process may hold a part."""
    own = module.state_dict()
    module.load_state_dict(
        {name: divide_like(value, own[name]) if name in own else value for name, value in state.items()}, strict=strict
    )


def divide_optimizer_state(state: dict[str, Any], parameters: list[nn.Parameter]) -> dict[str, Any]:
    """Return an optimizer's state with what has the shape of a parameter divided as the parameter is."""

    def divide(value: Any, like: nn.Parameter) -> Any:
        fits = isinstance(value, Tensor) and value.shape == like.shape
        return divide_like(value, like) if fits and is_sharded(like) else value

    divided = {
        number: {key: divide(value, parameters[number]) for key, value in of_parameter.items()}
        for number, of_parameter in state["state"].items()
    }
    return {**state, "state": divided}


def divide_lists(state: dict[str, Any], parameters: list[nn.Parameter]) -> dict[str, Any]:
    """Return a step rule's state with lists of one tensor for each parameter divided as the parameters are."""

    def divide(value: Any) -> Any:
        if not isinstance(value, list) or [getattr(one, "shape", None) for one in value] != shapes:
            return value
        return [divide_like(one, like) for one, like in zip(value, parameters, strict=True)]

    shapes = [parameter.shape for parameter in parameters]
    return {key: divide(value) for key, value in state.items()}


def clip_gradients(parameters: list[nn.Parameter], most: float) -> float:
    """Scale the gradients to a norm of at most `most`, and return the norm that they had, the same in every process."""
    if not any(is_sharded(parameter) for parameter in parameters):
        return float(nn.utils.clip_grad_norm_(parameters, most))
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = total_norm(gradients)
    if most / (norm + 1e-6) < 1:  # as torch has it
        torch._foreach_mul_(own_parts(gradients), most / (norm + 1e-6))
    return norm


def find_blocks(network: nn.Module, spec: ImageSpec) -> list[nn.Module]:
    """Return the blocks of a network's anatomy that are modules which a pass calls; none without an anatomy."""
    called: set[nn.Module] = set()
    handles = [m.register_forward_pre_hook(lambda module, _: called.add(module)) for m in network.modules()]
    try:
        anatomy = examine(network, spec)
    except VitclinicError:
        return []
    finally:
        for handle in handles:
            handle.remove()
    modules = dict(anatomy.network.named_modules())
    blocks = dict.fromkeys(modules[block.name] for block in anatomy.blocks if block.name in modules)
    return [module for module in blocks if module in called and any(True for _ in module.parameters())]


def count_gathered(learner: nn.Module, blocks: Sequence[nn.Module]) -> int:
    """Return about how many bytes of weights and gradients a process has whole at a time.

    These are the weights of a block and of the next, the gradient of one, and those of what is in no block.
    """
    of_blocks = [sum(parameter.nbytes for parameter in block.parameters()) for block in blocks]
    others = sum(parameter.nbytes for parameter in learner.parameters()) - sum(of_blocks)
    return 3 * max(of_blocks, default=0) + 2 * others


def refuse_indivisible(learner: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise a RecipeError for single numbers, and for weights that a block shares with what is outside of it."""
    block_of = {module: number for number, block in enumerate(blocks) for module in block.modules()}
    owners: dict[int, int | None] = {}
    for path, module in learner.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 0:
                raise RecipeError(f"parallel=fsdp cannot divide '{path}.{name}', a single number; use parallel=ddp.")
            if owners.setdefault(id(parameter), block_of.get(module)) != block_of.get(module):
                raise RecipeError(
                    f"parallel=fsdp cannot divide '{path}.{name}', which a block shares with another part of the"
                    " network; use parallel=ddp."
                )
