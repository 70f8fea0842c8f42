"""Forward and backward of one micro-batch: what step rules are made of."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitclinic.data import Batch
from vitclinic.treatments import Losses
from vitclinic.treatments.looksam import average_over_processes

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Passes:
    """The training loop's `LossesAndGradients`: of a task, under its wrappers, autocast and loss scaler."""

    def __init__(
        self,
        task: nn.Module,
        parameters: Sequence[nn.Parameter],
        scaler: torch.amp.GradScaler,
        *,
        ddp: DistributedDataParallel | None,
        compiled: bool,
        precision: str,
        accumulate: int,
    ) -> None:
        self.module, self.parameters, self.scaler = task, parameters, scaler
        self.ddp = ddp
        outer = ddp or task
        self.wrapped: nn.Module = torch.compile(outer) if compiled else outer  # type: ignore[assignment]
        self.alone: nn.Module = torch.compile(task) if compiled and ddp else task  # type: ignore[assignment]
        self.device = parameters[0].device
        self.precision, self.accumulate = precision, accumulate

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def __call__(self, batch: Batch, sync: bool = True, weight: float = 1.0) -> Losses:
        # The masks of dropout and stochastic depth belong to the samples, so that a second pass repeats them.
        torch.manual_seed(int(batch.keys[0]) & (2**63 - 1))
        with self.ddp.no_sync() if self.ddp is not None and not sync else nullcontext():
            with self._autocast():
                losses: Losses = self._outer()(batch)
            total = sum(losses.values(), torch.zeros((), device=self.device)) * (weight / self.accumulate)
            self.scaler.scale(total).backward()  # type: ignore[no-untyped-call]
        return {name: value.detach() for name, value in losses.items()}

    def _outer(self) -> nn.Module:
        """What to call: without DDP where no parameter learns, as when only the images climb.

        Such a pass has nothing to synchronise, and whoever makes it puts the buffers back. DDP would hand out the
        leading process's buffers in it, once a step, and so never in a pass that keeps them.
        """
        alone = self.ddp is not None and not any(p.requires_grad for p in self.parameters)
        return self.alone if alone else self.wrapped

    def average(self, tensors: Sequence[Tensor]) -> None:
        if self.ddp is not None:
            average_over_processes(tensors, self.ddp.process_group)

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = _AUTOCAST.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)
