"""Observation of a network: one forward pass, and the units that it shows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from vitclinic._core.errors import AnatomyError, UnknownStructureError, first_line
from vitclinic.anatomy.observation.naming import finish
from vitclinic.anatomy.observation.observer import Observer
from vitclinic.anatomy.observation.trace import trace
from vitclinic.anatomy.units import Unit


@dataclass(frozen=True)
class Observation:
    """The units that one forward pass shows, and sentences on what it does not."""

    units: list[Unit]
    notes: tuple[str, ...]


def observe(network: nn.Module, entrance: nn.Module, images: Tensor) -> Observation:
    """Find the units of a network, in the order of its forward pass, from one pass of two images.

    Args:
        network: The network.
        entrance: The module to call with the images: the network, or a wrapper of it.
        images: Two images.

    Raises:
        UnknownStructureError: The pass shows no units.
    """
    try:
        record = trace(network, entrance, images)
    except Exception as error:  # the user's own code may raise anything
        shape = " x ".join(str(side) for side in images.shape[1:])
        raise AnatomyError(f"{type(network).__name__} cannot take {shape} images: {first_line(error)}.") from error
    observer = Observer(record, entrance)
    units = finish(observer.drafts(), record)
    if len(units) < 3:
        raise UnknownStructureError(
            f"one forward pass of {type(network).__name__} shows no units: neither residual additions nor a chain of "
            "convolutions on the way from the image to the output."
        )
    return Observation(units, tuple(observer.notes(units)))
