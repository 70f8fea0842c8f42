"""What step rules are tested with: a small float64 network, batches, and the training loop's own passes."""

from __future__ import annotations

import torch
from torch import nn

from vitclinic.data import Batch
from vitclinic.tasks import Classification
from vitclinic.training.network import Learner
from vitclinic.training.passes import Passes


class Net(nn.Module):
    """Two layers with BatchNorm and dropout between them, and (`unused`) a parameter that no loss depends on."""

    def __init__(self, dropout: float = 0.0, norm: bool = True, unused: bool = True) -> None:
        super().__init__()
        # A bias before BatchNorm has a gradient of rounding only, which AdamW would blow up.
        self.first, self.second = nn.Linear(8, 6, bias=not norm), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        if unused:
            self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x_bchw: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(torch.tanh(self.norm(self.first(x_bchw.flatten(1))))))


def net(dtype: torch.dtype = torch.float64, **options) -> Net:
    torch.manual_seed(0)
    return Net(**options).to(dtype).train()


def batch(number: int = 0, size: int = 6, dtype: torch.dtype = torch.float64) -> Batch:
    draw = torch.Generator().manual_seed(100 + number)
    images = torch.rand(size, 1, 2, 4, generator=draw, dtype=torch.float64).to(dtype)
    targets = torch.randint(3, (size,), generator=draw)
    keys = torch.randint(-(2**62), 2**62, (size,), generator=draw)
    return Batch(images, targets, torch.arange(size), keys)


class Counted(Passes):
    """The loop's passes, each call noted."""

    def __init__(self, network: nn.Module, accumulate: int = 1, scale: float | None = None, ddp=None) -> None:
        task = network if isinstance(network, Learner) else Learner(network, Classification(), {})
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        parameters = [p for p in task.parameters() if p.requires_grad]
        super().__init__(task, parameters, scaler, ddp=ddp, compiled=False, precision="fp32", accumulate=accumulate)
        self.calls: list[tuple[int, bool, float]] = []
        self.seen: list[torch.Tensor] = []

    def __call__(self, batch, sync=True, weight=1.0):
        self.calls.append((len(batch), sync, weight))
        self.seen.append(batch.images.detach().clone())
        return super().__call__(batch, sync, weight)


def grads(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def weights(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def loss_and_gradient(network: nn.Module, part: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """By autograd.grad, apart from `.grad`; the dropout masks are the sample keys', as in the loop."""
    torch.manual_seed(int(part.keys[0]) & (2**63 - 1))
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    loss = nn.functional.cross_entropy(network(part.images), part.targets)
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return loss.detach(), {name: g for name, g in zip(named, found, strict=True) if g is not None}


def dense_ascent(gradient, values, rho, adaptive=False, eta=0.01):
    """eps as written in the papers, from one long vector."""
    g = torch.cat([v.flatten() for v in gradient.values()])
    w = torch.cat([values[name].detach().flatten() for name in gradient])
    t = w.abs() + eta if adaptive else torch.ones_like(w)
    eps = rho * t**2 * g / torch.sqrt(((t * g) ** 2).sum())
    parts = torch.split(eps, [v.numel() for v in gradient.values()])
    return {n: part.view_as(gradient[n]) for n, part in zip(gradient, parts, strict=True)}


def sam_gradient(network, part, rho, adaptive=False, eta=0.01, second=None):
    """Loss and gradient at w, and the gradient at w + eps, on a copy of the network."""
    import copy

    loss, first = loss_and_gradient(network, part)
    moved = copy.deepcopy(network)
    eps = dense_ascent(first, dict(network.named_parameters()), rho, adaptive, eta)
    with torch.no_grad():
        for name, p in moved.named_parameters():
            if name in eps:
                p += eps[name]
    return loss, first, loss_and_gradient(moved, second or part)[1]
