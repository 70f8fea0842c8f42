"""Taps: reading activations without editing a network.

`stream` passes each activation to a consumer and keeps nothing; `taps` keeps the last one at each site.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from torch import Tensor

from vitclinic._core.errors import AnatomyError
from vitclinic.anatomy.eager import eager, is_recomputing
from vitclinic.anatomy.sites import Site, watch

Key = TypeVar("Key", bound=Hashable)


@contextmanager
def stream(sites: Mapping[Key, Site], consumer: Callable[[Key, Tensor], None], *, grad: bool = False) -> Iterator[None]:
    """Call `consumer(key, activation)` for every activation that passes one of `sites` inside the context.

    The network's results do not change. Compiled modules run eagerly, since their graphs do not see hooks. Activations
    that checkpointing recomputes in a backward pass are not reported again.

    Args:
        sites: The sites to read, by key.
        consumer: Called with the key and the activation. To keep a tensor of a site marked `overwritten`, copy it.
        grad: Keep activations attached to the autograd graph; by default they are detached.

    Raises:
        AnatomyError: A site was not reached before the context ended.
    """
    silent = dict(sites)

    def reader(key: Key) -> Callable[[Tensor], None]:
        def read(activation: Tensor) -> None:
            if is_recomputing():
                return
            silent.pop(key, None)
            consumer(key, activation if grad else activation.detach())

        return read

    with ExitStack() as hooks, eager():
        for key, site in sites.items():
            for handle in watch(site, reader(key)):
                hooks.callback(handle.remove)
        yield
    if silent:
        raise AnatomyError(
            f"the taps {', '.join(map(repr, silent))} were never reached: call the network inside the context, "
            "and create a new anatomy if its modules were replaced."
        )


def version_of(tensor: Tensor) -> int | None:
    """Return how often `tensor` was written to; None in inference mode, where torch does not count."""
    return None if tensor.is_inference() else tensor._version


class Activations(Mapping[Key, Tensor]):
    """The last activation at each tap; reading one that the network has since overwritten in place is an error."""

    def __init__(self) -> None:
        self._seen: dict[Key, tuple[Tensor, int | None]] = {}

    def keep(self, key: Key, activation: Tensor) -> None:
        """Store `activation` together with its version."""
        self._seen[key] = (activation, version_of(activation))

    def __getitem__(self, key: Key) -> Tensor:
        activation, version = self._seen[key]
        if version_of(activation) != version:
            raise AnatomyError(f"the network changed the activation {key!r} in place; mark its site `overwritten`.")
        return activation

    def __iter__(self) -> Iterator[Key]:
        return iter(self._seen)

    def __len__(self) -> int:
        return len(self._seen)


@contextmanager
def taps(sites: Mapping[Key, Site], *, grad: bool = False) -> Iterator[Activations[Key]]:
    """Keep the last activation at each of `sites`.

    Args:
        sites: The sites to read, by key.
        grad: Keep activations attached to the autograd graph; by default they are detached.

    Yields:
        The activations by key, filled as the network runs.

    Raises:
        AnatomyError: A site was not reached before the context ended.

    Example:
        >>> import timm, torch
        >>> from vitclinic.anatomy import Anatomy
        >>> network = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32)
        >>> anatomy = Anatomy.of(network)
        >>> with taps({"last": anatomy.units[-2].output}) as seen:
        ...     logits = network(torch.rand(1, 3, 32, 32))
        >>> seen["last"].shape
        torch.Size([1, 5, 192])
    """
    seen: Activations[Key] = Activations()

    def keep(key: Key, activation: Tensor) -> None:
        seen.keep(key, activation.clone() if sites[key].overwritten else activation)

    with stream(sites, keep, grad=grad):
        yield seen
