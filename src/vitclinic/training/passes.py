"""Forward and backward passes of a run, and the step rules made of them: plain, or on perturbed images."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitclinic._core.errors import RecipeError
from vitclinic.anatomy.forward import guard_hooks
from vitclinic.data import Batch
from vitclinic.treatments import InputAscent, Losses, LossesAndGradients, StepRule, TakesInputAscent, Treatment
from vitclinic.treatments.sam_core import average_over_processes, freeze, keep_buffers

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Passes:
    """Forward and backward of a learner (`LossesAndGradients`) with DDP, compilation, autocast and loss scaler.

    A learner whose weights are divided among `processes` (FSDP) averages its gradients after each pass by itself.
    """

    def __init__(
        self,
        learner: nn.Module,
        parameters: Sequence[nn.Parameter],
        scaler: torch.amp.GradScaler,
        *,
        ddp: DistributedDataParallel | None,
        compiled: bool,
        precision: str,
        accumulate: int,
        processes: int = 1,
    ) -> None:
        self.module, self.parameters, self.scaler = learner, parameters, scaler
        self.ddp = ddp
        outer = ddp or learner
        if compiled:
            guard_hooks()
        self.wrapped: nn.Module = torch.compile(outer) if compiled else outer  # type: ignore[assignment]
        self.alone: nn.Module = torch.compile(learner) if compiled and ddp else learner  # type: ignore[assignment]
        self.device = parameters[0].device
        self.precision, self.accumulate, self.processes = precision, accumulate, processes

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def __call__(self, batch: Batch, sync: bool = True, weight: float = 1.0) -> Losses:
        # Seed dropout and stochastic depth from the samples, so that a second pass repeats the masks.
        torch.manual_seed(int(batch.keys[0]) & (2**63 - 1))
        with self.ddp.no_sync() if self.ddp is not None and not sync else nullcontext():
            with self.autocast():
                losses: Losses = self._outer()(batch)
            total = sum(losses.values(), torch.zeros((), device=self.device)) * (weight / self.accumulate)
            self.scaler.scale(total).backward()  # type: ignore[no-untyped-call]
        return {name: value.detach() for name, value in losses.items()}

    def _outer(self) -> nn.Module:
        """Return the module to call: without DDP if no parameter needs a gradient, as when only the images climb.

        Such a pass has nothing to synchronise, and its caller restores the buffers. DDP broadcasts the leading
        process's buffers once per step; it must not spend that on a pass whose buffers are thrown away.
        """
        alone = self.ddp is not None and not any(p.requires_grad for p in self.parameters)
        return self.alone if alone else self.wrapped

    def average(self, tensors: Sequence[Tensor]) -> None:
        if self.ddp is not None:
            average_over_processes(tensors, self.ddp.process_group)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass at the recipe's precision."""
        dtype = _AUTOCAST.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)


class PlainStep:
    """Plain back-propagation: the mean gradient of the micro-batches, synchronised in the last one."""

    def __call__(self, batches: Sequence[Batch], losses_and_gradients: LossesAndGradients) -> Losses:
        passes = [losses_and_gradients(batch, sync=batch is batches[-1]) for batch in batches]
        return mean_losses(passes)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class InputAscentStep(PlainStep):
    """Back-propagation on perturbed images; the pass that perturbs them leaves running statistics alone."""

    def __init__(self, inputs: InputAscent) -> None:
        self.inputs = inputs

    def __call__(self, batches: Sequence[Batch], losses_and_gradients: LossesAndGradients) -> Losses:
        return super().__call__([self._climb(batch, losses_and_gradients) for batch in batches], losses_and_gradients)

    def _climb(self, batch: Batch, losses_and_gradients: LossesAndGradients) -> Batch:
        """Return the batch with its images moved towards a higher loss."""
        started = self.inputs.start(batch)
        with keep_buffers(losses_and_gradients.module), freeze(losses_and_gradients.module):
            losses_and_gradients(started, sync=False)
        return self.inputs.finish(batch, started)


def mean_losses(passes: Sequence[Losses]) -> Losses:
    """Return the mean of each named loss over micro-batches."""
    return {name: sum(p[name] for p in passes) / len(passes) for name in passes[0]}  # type: ignore[misc]


def choose_step_rule(treatments: Sequence[Treatment]) -> StepRule:
    """Return the step rule of a run; an input ascent joins the rule's first pass, or gets a rule of its own."""
    rules = [rule for t in treatments if (rule := t.step_rule()) is not None]
    ascents = [ascent for t in treatments if (ascent := t.input_ascent()) is not None]
    if len(rules) > 1 or len(ascents) > 1:
        raise RecipeError("At most one treatment of a run may set the step rule, and at most one may perturb images.")
    if not rules:
        return choose_early_rule(treatments)
    if not ascents:
        return rules[0]
    if not isinstance(rules[0], TakesInputAscent):
        raise RecipeError(
            "The treatment that sets the step rule has no first pass in which the images could be perturbed as well."
        )
    rules[0].take_input_ascent(ascents[0])
    return rules[0]


def choose_early_rule(treatments: Sequence[Treatment]) -> StepRule:
    """Return the rule of the steps before the treatments' own step rule starts: what a run without it would have."""
    ascents = [ascent for t in treatments if (ascent := t.input_ascent()) is not None]
    return InputAscentStep(ascents[0]) if ascents else PlainStep()
