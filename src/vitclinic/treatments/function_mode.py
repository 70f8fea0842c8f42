"""Running a module's forward under a torch function mode, which replaces what its functions compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

Mode = Callable[[nn.Module], TorchFunctionMode]


def run_under(mode: Mode, module: nn.Module) -> None:
    """Let every call of `module.forward` run inside `mode(module)`, also in copies of the network.

    The module keeps its class, its children and its weights' names. Modes entered around the call, such as those that
    record attention, see what this mode calls.

    Args:
        mode: Function from the module to a new mode; a class, not a closure, so that a copied network has its own.
        module: The module.
    """
    own = vars(module).get("forward")  # another mode's, or a user's
    module.forward = partial(_forward, mode, module, own)


def _forward(mode: Mode, module: nn.Module, own: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    with mode(module):
        return type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)
