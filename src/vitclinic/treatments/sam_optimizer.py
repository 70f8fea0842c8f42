"""SAM for a training loop of one's own: a wrapper around any torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from vitclinic.treatments.ascent import Ascent, gradients_apart, kept_buffers
from vitclinic.treatments.looksam import OrthogonalPart, average_over_processes, filled

Closure = Callable[[], Tensor]
"""Forward and backward; returns the loss."""


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation [chen2022 Eq. 1-2] around a torch optimizer, which takes the steps.

    `adaptive` is ASAM, `every` above 1 is LookSAM (see `ascent`, `looksam`). `module` is what the closure calls: its
    BatchNorm statistics then move in the first pass only and, if it is wrapped by DistributedDataParallel, only the
    second gradient is synchronised. Parameter groups and state are the optimizer's own, so that learning-rate
    schedulers and gradient scalers take the wrapper or the optimizer. torch's random numbers (dropout masks) are the
    same in both passes.

    Example:
        >>> network = nn.Linear(3, 1)
        >>> optimizer = SAM(torch.optim.AdamW(network.parameters(), lr=0.01), rho=0.1, module=network)
        >>> def closure():
        ...     loss = network(torch.ones(4, 3)).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> first = optimizer.step(closure)
        >>> bool(optimizer.step(closure) < first)
        True

    With clipping or a `torch.amp.GradScaler` (whose scaled loss the closure differentiates) the passes and the step
    are two calls:

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
        if not rho >= 0 or not eta >= 0 or every < 1:
            raise ValueError(f"rho and eta must not be negative, every not below 1 (got {rho}, {eta}, {every}).")
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self.optimizer, self.module = optimizer, module
        self.ascent = Ascent(rho, adaptive, eta)
        self.reused = OrthogonalPart(every, alpha) if every > 1 else None
        self._share()

    def gradients(self, closure: Closure) -> Tensor:
        """Leave the gradient to step with in `.grad`, in place of what was there; returns the loss at w."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.zero_grad()
        if self.ascent.rho == 0:
            return closure()
        if self.reused is not None and not self.reused.due(parameters):
            loss = closure()
            self.reused.reuse(parameters)
            return loss
        cuda = sorted({p.get_device() for p in parameters if p.is_cuda})
        with gradients_apart(parameters) as gradients, torch.random.fork_rng(cuda), self._no_sync():
            loss = closure()
        first = filled(parameters, gradients) if self.reused is not None else []
        with ExitStack() as stack:
            # A first gradient that is not finite moves nothing: the second pass then repeats it in every process.
            stack.enter_context(self.ascent.climbed(parameters, gradients))
            if self.module is not None:
                stack.enter_context(kept_buffers(self.module))
            closure()
        if self.reused is not None:
            if isinstance(self.module, DistributedDataParallel):
                average_over_processes(first, self.module.process_group)
            self.reused.learn(parameters, first)
        return loss

    def step(self, closure: Closure | None = None) -> Tensor | None:  # type: ignore[override]
        """Both passes and the optimizer's step, which a gradient that is not finite skips; returns the loss at w.

        Without a closure: the optimizer's step alone, after `gradients`.
        """
        if closure is None:
            self.optimizer.step()
            return None
        with torch.enable_grad():
            loss = self.gradients(closure)
        found = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if math.isfinite(float(get_total_norm(found))):
            self.optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and, with LookSAM, the reused vector."""
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

    def _no_sync(self) -> AbstractContextManager[object]:
        return self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else nullcontext()
