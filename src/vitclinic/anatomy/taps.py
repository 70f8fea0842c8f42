"""Reading activations without editing a network.

`stream` hands each activation to a consumer and keeps nothing; `taps` keeps the last one of each.
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

    Without `grad` activations come detached. A consumer that keeps a tensor of a site marked `overwritten`
    must copy it. The network computes what it always computes; compiled modules run eagerly, since their
    graphs do not see hooks. What activation checkpointing recomputes in a backward pass is not seen again. A site
    that nothing passed is an error when the context ends.
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
            f"nothing passed the taps {', '.join(map(repr, silent))}: call the network inside the context, "
            "and make its anatomy anew if its modules have been replaced since."
        )


def version_of(tensor: Tensor) -> int | None:
    """How often `tensor` was written into; None under inference mode, in which torch does not count."""
    return None if tensor.is_inference() else tensor._version


class Activations(Mapping[Key, Tensor]):
    """What the taps saw last; reading what the network has since overwritten in place is an error."""

    def __init__(self) -> None:
        self._seen: dict[Key, tuple[Tensor, int | None]] = {}

    def keep(self, key: Key, activation: Tensor) -> None:
        """Remember `activation` and which state of it was seen."""
        self._seen[key] = (activation, version_of(activation))

    def __getitem__(self, key: Key) -> Tensor:
        activation, version = self._seen[key]
        if version_of(activation) != version:
            raise AnatomyError(f"the network wrote into the activation {key!r} in place; mark its site `overwritten`.")
        return activation

    def __iter__(self) -> Iterator[Key]:
        return iter(self._seen)

    def __len__(self) -> int:
        return len(self._seen)


@contextmanager
def taps(sites: Mapping[Key, Site], *, grad: bool = False) -> Iterator[Activations[Key]]:
    """Keep the last activation at each of `sites`, as `stream` would hand it out.

    with taps({"last": anatomy.units[-2].output}, grad=True) as seen:
        logits = network(images)
    seen["last"].shape
    """
    seen: Activations[Key] = Activations()

    def keep(key: Key, activation: Tensor) -> None:
        seen.keep(key, activation.clone() if sites[key].overwritten else activation)

    with stream(sites, keep, grad=grad):
        yield seen
