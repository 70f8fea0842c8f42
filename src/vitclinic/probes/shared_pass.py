"""One forward pass over the data, shared by any number of streaming probes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from vitclinic._core.distributed import Distributed, portable
from vitclinic._core.errors import ModelError
from vitclinic._core.memory import is_out_of_memory
from vitclinic.anatomy import AttentionMap, Site, Unit, record_attention, stream
from vitclinic.data import Batch
from vitclinic.probes.probe import Result, StreamingProbe, Sum, Tally
from vitclinic.probes.subject import Subject

Outcome = Result | Exception


def run_shared_pass(subject: Subject, probes: Mapping[str, StreamingProbe]) -> dict[str, Outcome]:
    """Run all images through the network once, and return the result of each probe, or its error.

    A site is hooked once, however many probes read it. A probe that fails is dropped and does not stop the others;
    running out of memory, or an error of the network itself, does. Processes that measure together divide the images
    among them if every tally has sums that can be merged.
    """
    desk = Desk()
    for name, probe in probes.items():
        desk.attempt(name, desk.admit, name, probe, subject)
    with ExitStack() as stack, torch.no_grad():
        if desk.readers:
            stack.enter_context(stream({site: site for site in desk.readers}, desk.read))
        if desk.viewers:
            stack.enter_context(record_attention(desk.viewers, desk.view))
        divided = desk.divisible and 1 < subject.distributed.size <= len(subject)
        for batch in subject.own_batches() if divided else subject.batches():
            desk.begin_batch(batch)
            desk.end_batch(batch, subject.logits(batch.images))
            subject.progress(subject.name, int(batch.indices[-1]) + 1, len(subject))
    if divided:
        return _put_together(subject.distributed, desk, list(probes))
    return {name: desk.outcome(name) for name in probes}


def _put_together(distributed: Distributed, desk: Desk, names: list[str]) -> dict[str, Outcome]:
    """Merge the sums of all processes in the leading one, and return its outcomes; a failure of one is that of all."""
    shares = distributed.gather(lambda: (desk.sums(), {name: portable(error) for name, error in desk.failures.items()}))

    def outcome(name: str) -> Outcome:
        found = desk.outcome(name)
        return portable(found) if isinstance(found, Exception) else found

    def put_together() -> dict[str, Outcome]:
        for sums, failures in shares[1:]:
            desk.merge(sums, failures)
        return {name: outcome(name) for name in names}

    return distributed.leader_only(put_together)


class Desk:
    """Dispatcher of activations and attention maps to the tallies that asked for them."""

    def __init__(self) -> None:
        self.tallies: dict[str, Tally] = {}
        self.failures: dict[str, Exception] = {}
        self.readers: dict[Site, list[tuple[str, Any]]] = defaultdict(list)
        self.viewers: dict[Unit, list[str]] = defaultdict(list)
        self._images = 0
        self._read: set[Site | Unit] = set()
        """What has been read of the current batch."""

    def admit(self, name: str, probe: StreamingProbe, subject: Subject) -> None:
        tally = probe.begin(subject)
        taps, units = dict(tally.taps()), list(tally.attention())
        for wanted, kind in ((taps.values(), Site), (units, Unit)):
            if odd := [type(item).__name__ for item in wanted if not isinstance(item, kind)]:
                raise TypeError(f"{name} asks to read a {odd[0]}; expected a {kind.__name__}")
        self.tallies[name] = tally
        for key, site in taps.items():
            self.readers[site].append((name, key))
        for unit in units:
            self.viewers[unit].append(name)

    def read(self, site: Site, activation: Tensor) -> None:
        for name, key in self.readers[site]:
            self.attempt(name, self._check_once, site, len(activation))
            self.attempt(name, self.tallies[name].update, key, activation)
        self._read.add(site)

    def view(self, seen: AttentionMap) -> None:
        for name in self.viewers[seen.unit]:
            self.attempt(name, self._check_once, seen.unit, len(seen.by_image()))
            self.attempt(name, self.tallies[name].update_attention, seen)
        self._read.add(seen.unit)

    def _check_once(self, place: Site | Unit, images: int) -> None:
        """Raise a ModelError if a place is passed twice, or not by one activation per image: each would count."""
        where = place.name if isinstance(place, Unit) else f"its {type(place.module).__name__}"
        advice = "Measure the network inside this one, which sees each image once."
        if place in self._read:
            raise ModelError(f"the network runs {where} several times for the same images. {advice}")
        if images != self._images:
            raise ModelError(
                f"the network passes {images} images through {where} for a batch of {self._images}. {advice}"
            )

    @property
    def divisible(self) -> bool:
        """True if all tallies have sums, so that processes can divide the images among them."""
        return all(tally.sums() is not None for tally in self.tallies.values())

    def sums(self) -> dict[str, dict[str, Sum]]:
        """Return the sums of all tallies, by probe."""
        return {name: dict(tally.sums() or {}) for name, tally in self.tallies.items() if name not in self.failures}

    def merge(self, sums: Mapping[str, Mapping[str, Sum]], failures: Mapping[str, Exception]) -> None:
        """Add the sums of another process, and its failures."""
        self.failures = {**failures, **self.failures}
        for name, theirs in sums.items():
            if name not in self.failures:
                ours = self.tallies[name].sums() or {}
                for part, value in theirs.items():
                    ours[part].merge(value)

    def begin_batch(self, batch: Batch) -> None:
        self._images = len(batch)
        self._read.clear()
        for name, tally in self.tallies.items():
            self.attempt(name, tally.begin_batch, batch)

    def end_batch(self, batch: Batch, logits: Tensor) -> None:
        for name, tally in self.tallies.items():
            self.attempt(name, tally.end_batch, batch, logits)

    def outcome(self, name: str) -> Outcome:
        result: Result = self.attempt(name, lambda: self.tallies[name].finish())
        return self.failures.get(name, result)

    def attempt(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a tally, unless its probe has failed before; keep its error, but raise if memory runs out."""
        if name in self.failures:
            return None
        try:
            return call(*arguments)
        except Exception as error:  # one broken probe must not stop the others
            if is_out_of_memory(error):
                raise
            self.failures[name] = error
            return None
