"""Peak memory of probes, estimated before they run.

A probe states what it keeps beside passes of the network (`OwningProbe.peak_memory`), which are traced (`Footprint`).
The tallies of a shared pass compute with numbers, so they are run on a few images, and what they hold is extrapolated
to a batch.

All numbers are bytes of tensors and arrays on top of the network and its data; scratch space inside kernels and what an
allocator keeps in reserve come on top.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial

from vitclinic._core.distributed import ALONE
from vitclinic.models.cost import peak_bytes
from vitclinic.probes.guards import preserve_attributes, preserve_state
from vitclinic.probes.probe import OwningProbe, Probe, StreamingProbe
from vitclinic.probes.shared_pass import run_shared_pass
from vitclinic.probes.subject import Subject

log = logging.getLogger(__name__)

_FEW, _SOME = 4, 8
"""Images of the two trials of a shared pass."""


def estimate_memory(subject: Subject, probes: Sequence[Probe]) -> int | None:
    """Return the bytes that measuring will hold at its peak: streaming probes share a pass, the others come in turn.

    Args:
        subject: The network and its images; the estimate is for its `batch_size`.
        probes: Probes that apply to it.

    Returns:
        The estimate beside the network and its data, a copy of the weights included; None if it is not known, for a
        network whose course depends on numbers cannot be traced.

    Example:
        >>> import timm, torch
        >>> from vitclinic.probes import Norms, load_subject
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        >>> subject = load_subject(model, [(torch.rand(8, 3, 32, 32), torch.arange(8))])
        >>> estimate_memory(subject, [Norms()]) > sum(p.nbytes for p in model.parameters())
        True
    """
    streaming = {probe.name: probe for probe in probes if isinstance(probe, StreamingProbe)}
    owning = [probe for probe in probes if isinstance(probe, OwningProbe)]
    try:
        with preserve_attributes(subject.network):  # a trial leaves no trace, such as a cache or a counter
            held = [_try_pass(subject, streaming)] if streaming else []
            for probe in owning:
                view = probe.view(subject)
                view.batch_size = subject.batch_size
                held.append(probe.peak_memory(view))
    except Exception as error:  # whatever a network or a probe raises, there is no estimate, and measuring will tell
        log.info("the memory of %s is not known", " and ".join(probe.name for probe in probes), exc_info=error)
        return None
    return subject.footprint.state + math.ceil(max(held, default=0))


def fit_batch(subject: Subject, probes: Sequence[Probe], room: int) -> tuple[int, int | None]:
    """Return the images at a time with which measuring fits into so many bytes, and what it will then hold.

    The subject's `batch_size` is halved as often as needed; it stays if there is no estimate, or if that helps nothing.
    """
    given = subject.batch_size
    first = estimate = estimate_memory(subject, probes)
    try:
        while estimate is not None and estimate > room and subject.batch_size > 1:
            subject.batch_size //= 2
            estimate = estimate_memory(subject, probes)
        fits = estimate is not None and estimate <= room
        return (subject.batch_size, estimate) if fits else (given, first)
    finally:
        subject.batch_size = given


def _try_pass(subject: Subject, probes: dict[str, StreamingProbe]) -> float:
    """Return the peak of a pass at the subject's batch size, from passes of a few images."""
    size = min(subject.batch_size, len(subject))
    _count_pass(subject, probes, min(_FEW, size))  # what is made once, such as the anatomy
    if size <= _SOME:
        return _count_pass(subject, probes, size)
    few, some = (_count_pass(subject, probes, images) for images in (_FEW, _SOME))
    return few + (some - few) * (size - _FEW) / (_SOME - _FEW)


def _count_pass(subject: Subject, probes: dict[str, StreamingProbe], images: int) -> int:
    view = subject.on(subject.split, images)
    size, distributed, progress = view.batch_size, view.distributed, view.progress
    view.batch_size, view.distributed, view.progress = images, ALONE, lambda what, done, total: None
    try:
        with preserve_state(view.network, view.seed):
            return peak_bytes(partial(run_shared_pass, view, probes), subject.device)
    finally:
        view.batch_size, view.distributed, view.progress = size, distributed, progress
