"""Muon: the momentum of every weight matrix is orthogonalized before the step; AdamW trains all other parameters.

For a matrix W of `out` rows and `in` columns with gradient G [Jordan et al. 2024], momentum mu and learning rate lr:

    M <- mu M + G
    O  = orthogonalize(G + mu M)                               near U V^T, where G + mu M = U S V^T
    W <- W - lr weight_decay W - 0.2 sqrt(max(out, in)) lr O

An orthogonal matrix has entries of root mean square 1 / sqrt(max(out, in)), so the last factor makes that of the update
0.2 lr, which is about what AdamW's has: one learning rate and weight decay serve both [Liu et al. 2025].

It is written here because torch.optim and timm.optim orthogonalize in bfloat16, which rounds to one part in 256: a
difference in the last bit of a gradient becomes one that shows, and two processes would not train the network of one.
On a processor float32 takes no longer. torch's also refuses kernels, and has no AdamW beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitclinic._core.sharded import divide_like, gather_whole
from vitclinic.models import Normalized

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
_SMALLEST = 1e-7
"""A matrix with a smaller norm is not scaled up to 1, since it is rounding error."""

Group = dict[str, Any]


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return nearly U V^T for a matrix U S V^T, in the matrix's own precision [Jordan et al. 2024].

    Five Newton-Schulz iterations X <- a X + b (X X^T) X + c (X X^T)^2 X from X = matrix / |matrix|, the Frobenius norm,
    with coefficients chosen for speed: singular values from 1/500 of the norm on end between 0.68 and 1.21, not at 1.

    Args:
        matrix: The matrix, of any shape.

    Returns:
        A matrix of the same shape.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> values = torch.linalg.svdvals(orthogonalize(torch.randn(20, 50)))
        >>> bool(values.min() > 0.68), bool(values.max() < 1.21)
        (True, True)
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=_SMALLEST)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for matrices and AdamW for other parameters, as one optimizer with one state.

    Args:
        matrices: Parameter groups whose parameters are matrices, or kernels, which count as [out, in x height x width].
        others: Parameter groups for AdamW.
        lr: Learning rate of both.
        betas: AdamW's.
        momentum: Muon's; always in Nesterov's form.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> layer = nn.Linear(3, 3)
        >>> optimizer = Muon([{"params": [layer.weight]}], [{"params": [layer.bias]}], lr=0.01)
        >>> before = layer.weight.detach().clone()
        >>> layer(torch.randn(8, 3)).square().sum().backward()
        >>> optimizer.step()
        >>> values = torch.linalg.svdvals(layer.weight.detach() - before) / (0.01 * 0.2 * 3**0.5)
        >>> bool(values.min() > 0.68), bool(values.max() < 1.21)
        (True, True)
    """

    def __init__(
        self,
        matrices: Sequence[Group],
        others: Sequence[Group],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        momentum: float = MOMENTUM,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": 0.0, "momentum": momentum}
        super().__init__([{**group, "muon": True} for group in matrices], defaults)
        rest = [{**group, "muon": False} for group in others]
        self.adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, weight_decay=0.0)
        self.param_groups = [*self.param_groups, *self.adamw.param_groups]
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step with the gradients found in `.grad`; a closure, if given, makes them first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["muon"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_matrix(parameter, group)
        self.adamw.step()
        return loss

    def _step_matrix(self, parameter: Tensor, group: Group) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gathered = state["momentum_buffer"].mul_(group["momentum"]).add_(parameter.grad)
        # Of a matrix that is divided among processes (FSDP), each orthogonalizes the whole and keeps its own part.
        matrix = gather_whole(parameter.grad.add(gathered, alpha=group["momentum"]))
        update = orthogonalize(matrix.flatten(1))
        rate = 0.2 * math.sqrt(max(update.shape)) * group["lr"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(divide_like(update.reshape(parameter.shape), parameter), alpha=-rate)

    def _share(self) -> None:
        """Let AdamW work on its own groups of all, and on the common state."""
        self.adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
        self.adamw.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle."""
        return {**super().__getstate__(), "adamw": self.adamw}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a copy's attributes, or the groups and states of a checkpoint."""
        super().__setstate__(state)
        self._share()


def hidden_matrices(network: Normalized, decayed: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that Muon trains: the matrices and kernels between the first layer and the head.

    These are the two-dimensional parameters and the kernels of ungrouped convolutions that weight decay acts on, except

    - those that read the images: convolutions of as many channels as the images have or, if there is none, the first
      matrix;
    - the head: what timm's `get_classifier` returns or, without it, the last matrix;
    - tables that are looked up (`nn.Embedding`), and matrices of one row or column, which are vectors.

    Args:
        network: The network; its images have as many channels as its mean.
        decayed: The parameters that weight decay acts on, which are neither biases, norms, tokens nor positions.
    """
    channels = network.mean.numel()
    candidates = {id(parameter) for parameter in decayed}
    found: dict[int, nn.Parameter] = {}
    reading: set[int] = set()
    for module in network.backbone.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in candidates and _is_matrix(module, parameter):
                found[id(parameter)] = parameter
                if getattr(module, "in_channels", None) == channels:
                    reading.add(id(parameter))
    order = list(found)
    left_out = (reading or set(order[:1])) | (_find_head(network.backbone) or set(order[-1:]))
    return [parameter for key, parameter in found.items() if key not in left_out]


def _is_matrix(module: nn.Module, parameter: nn.Parameter) -> bool:
    if parameter.ndim > 2:
        kernel = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        if not kernel or module.groups != 1:
            return False
    table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    return parameter.ndim > 1 and not table and 1 < len(parameter) < parameter.numel()


def _find_head(backbone: nn.Module) -> set[int]:
    """Return the ids of the parameters of timm's classifier; some networks have several."""
    get_classifier = getattr(backbone, "get_classifier", None)
    return {id(parameter) for parameter in _walk(get_classifier())} if callable(get_classifier) else set()


def _walk(head: Any) -> Iterator[nn.Parameter]:
    if isinstance(head, nn.Module):
        yield from head.parameters()
    elif isinstance(head, list | tuple):
        for part in head:
            yield from _walk(part)
