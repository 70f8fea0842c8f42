"""SAM for your own training loop: a wrapper around any torch optimizer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitclinic._core.errors import TreatmentError
from vitclinic._core.sharded import total_norm
from vitclinic.treatments.sam_core import (
    Ascent,
    Group,
    OrthogonalPart,
    average_over_processes,
    sharpness_aware_gradients,
)

Closure = Callable[[], Tensor]
"""Forward and backward; returns the loss."""


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization around any torch optimizer [chen2022 Eq. 1-2].

        eps = rho g / |g|,    g the gradient at w; the optimizer steps from w with the gradient at w + eps

    Parameter groups and state are the optimizer's own, so learning-rate schedulers and gradient scalers accept either
    the wrapper or the optimizer. torch's random numbers (dropout masks) are the same in both passes. `copy.deepcopy`
    copies optimizer, parameters and `module` together: the copy belongs to the network `copy.module`, or to the one
    copied with it.

    Args:
        optimizer: The optimizer that takes the steps, such as AdamW or SGD.
        rho: Length of the ascent; 0 is the plain step.
        adaptive: ASAM: eps = rho T^2 g / |T g| with T = |w| + eta [Kwon et al., ICML 2021].
        eta: ASAM's eta.
        every: LookSAM: an ascent every so many steps [Liu et al., CVPR 2022].
        alpha: LookSAM: length of the reused component relative to the gradient.
        module: The module that the closure calls. Its BatchNorm statistics are then updated in the first pass only
            and, if it is a DistributedDataParallel, only the second gradient is synchronised.

    Raises:
        ValueError: An option is out of range.
        TreatmentError: The optimizer is already wrapped, or runs passes of its own (LBFGS).

    Example:
        >>> _ = torch.manual_seed(0)
        >>> network = nn.Linear(3, 1)
        >>> optimizer = SAM(torch.optim.AdamW(network.parameters(), lr=0.01), rho=0.1, module=network)
        >>> def closure():
        ...     loss = network(torch.ones(4, 3)).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> first = optimizer.step(closure)
        >>> bool(optimizer.step(closure) < first)
        True

    Micro-batches: one closure that loops over them uses one eps for all; several closures, one per micro-batch, use an
    eps each. Either way, the closures divide their losses by the number of micro-batches.

    With gradient clipping or a `torch.amp.GradScaler` (the closures then differentiate the scaled loss), split the
    passes and the step into two calls. Never use `step(closure)` with a scaled loss: it does not know the scale and
    would step with gradients that are too long by that factor.

        loss = sam.gradients(closure)
        scaler.unscale_(sam)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        scaler.step(sam)
        scaler.update()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rho: float = 0.1,
        *,
        adaptive: bool = False,
        eta: float = 0.01,
        every: int = 1,
        alpha: float = 0.7,
        module: nn.Module | None = None,
    ) -> None:
        if not (math.isfinite(rho) and math.isfinite(eta)) or rho < 0 or eta < 0 or every < 1:
            raise ValueError(
                f"rho and eta must be finite and not negative, and every at least 1 (got {rho}, {eta}, {every})."
            )
        _check_base(optimizer)
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self.optimizer, self.module = optimizer, module
        self.ascent = Ascent(rho, adaptive, eta)
        self.reused = OrthogonalPart(every, alpha) if every > 1 else None
        self._share()

    def gradients(self, closure: Closure, *more: Closure) -> Tensor:
        """Compute the gradient to step with, in `.grad` (replacing what was there), and return the loss at w.

        Args:
            closure: Runs forward and backward and returns the loss.
            *more: Further micro-batches of the same step. Each closure has its own eps; their second gradients and
                losses add up. They must not clear gradients.
        """
        closures = (closure, *more)
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.zero_grad()
        if self.ascent.rho == 0:
            return self._one_pass(closures)
        if self.reused is not None and not self.reused.due(parameters):
            loss = self._one_pass(closures)
            self.reused.reuse(parameters)
            return loss
        groups = [self._two_passes(part, parameters, last=number == len(more)) for number, part in enumerate(closures)]
        return _total(
            sharpness_aware_gradients(
                groups, parameters, self.ascent, self.reused, module=self.module, average=self._average
            )
        )

    def _one_pass(self, closures: Sequence[Closure]) -> Tensor:
        losses = []
        for number, closure in enumerate(closures):
            with self._synchronize(number == len(closures) - 1):
                losses.append(closure())
        return _total(losses)

    def _two_passes(self, closure: Closure, parameters: list[nn.Parameter], last: bool) -> Group[Tensor]:
        """Return the two passes of one closure, with the same random numbers in both."""
        cuda = sorted({p.get_device() for p in parameters if p.is_cuda})

        def first() -> Tensor:
            with torch.random.fork_rng(cuda), self._synchronize(False):
                return closure()

        def second(finite: bool) -> None:
            # After a first gradient that is not finite the weights are still at w: the second pass repeats the first.
            with self._synchronize(last):
                closure()

        return Group(first, second)

    def _average(self, tensors: list[Tensor]) -> None:
        if isinstance(self.module, DistributedDataParallel):
            average_over_processes(tensors, self.module.process_group)

    def step(self, closure: Closure | None = None, *more: Closure) -> Tensor | None:  # type: ignore[override]
        """Make one step: `gradients`, then the optimizer's step unless the gradient is not finite.

        Args:
            closure: Runs forward and backward and returns the loss; without one, only the optimizer steps, with the
                gradient that `gradients` left.
            *more: Further micro-batches, as in `gradients`.

        Returns:
            The loss at w, or None without a closure.
        """
        if closure is None:
            self.optimizer.step()
            return None
        with torch.enable_grad():
            loss = self.gradients(closure, *more)
        found = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if math.isfinite(total_norm(found)):
            self.optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and, with LookSAM, the reused component."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "reused": None if self.reused is None else self.reused.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["optimizer"])
        if self.reused is not None and state_dict["reused"] is not None:
            self.reused.load_state_dict(state_dict["reused"])
        self._share()

    def _share(self) -> None:
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle; groups and state are in the optimizer."""
        return {name: getattr(self, name) for name in ("defaults", "optimizer", "module", "ascent", "reused")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _synchronize(self, wanted: bool) -> AbstractContextManager[object]:
        """Synchronise the gradients of the passes inside between processes only if `wanted`."""
        if wanted or not isinstance(self.module, DistributedDataParallel):
            return nullcontext()
        return self.module.no_sync()


def _check_base(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, SAM):
        raise TreatmentError("This optimizer is already wrapped by SAM; wrap it once.")
    required = [
        name
        for name, parameter in inspect.signature(type(optimizer).step).parameters.items()
        if name != "self" and parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if required:
        raise TreatmentError(
            f"{type(optimizer).__name__} runs its own passes in a step, so SAM cannot give it a gradient: wrap an"
            " optimizer that uses the gradients it finds, such as AdamW or SGD."
        )


def _total(losses: list[Tensor]) -> Tensor:
    return losses[0] if len(losses) == 1 else torch.stack([loss.detach() for loss in losses]).sum()
