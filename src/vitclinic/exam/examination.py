"""An examination: what is measured and stored of each target, by one plan for all of them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from vitclinic._core.callback import Callback, CallbackList
from vitclinic._core.distributed import ALONE, Distributed, pick_device
from vitclinic._core.errors import VitclinicError
from vitclinic._core.memory import format_bytes
from vitclinic._core.records import Measurement
from vitclinic._core.time import format_duration
from vitclinic.exam.commands import Origin
from vitclinic.exam.exam import Exam, Exams
from vitclinic.exam.origins import keep_origin
from vitclinic.exam.planner import Entry, Plan, Planner
from vitclinic.exam.request import check_count, parse_request
from vitclinic.exam.store import ExamRecord, Store, draw
from vitclinic.exam.targets import ExamData, Target, name_target, open_subject
from vitclinic.exam.timing import Schedule, Step, TimeBudget
from vitclinic.probes import Probe, StreamingProbe, Subject, find_normalization, measure
from vitclinic.probes.curvature.hessian import free_memory
from vitclinic.probes.loading import Data
from vitclinic.probes.memory import fit_batch
from vitclinic.probes.output import OutputFunction
from vitclinic.probes.running import find_obstacle

log = logging.getLogger(__name__)


class Examination:
    """Probes, data and place of results: the same for all targets. Options are those of `examine`."""

    def __init__(
        self,
        data: Data | None = None,
        *,
        probes: Sequence[str | Mapping[str, Any] | Probe] | str | None = None,
        budget: str | float | None = None,
        quick: bool = False,
        full: bool = False,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        split: str = "test",
        limit: int | None = None,
        size: int | None = None,
        batch_size: int = 64,
        seed: int = 0,
        device: str = "auto",
        random_weights: bool = False,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        normalized: bool | None = None,
        output: OutputFunction | None = None,
        out: str | Path | None = None,
        fresh: bool = False,
        together: bool = False,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        for name, count in (("limit", limit), ("size", size), ("batch_size", batch_size)):
            check_count(name, count)
        self.probes, self.budget = parse_request(
            [probes] if isinstance(probes, str) else probes, budget, quick, full, settings or {}
        )
        self.is_timed = full or self.budget is not None
        self.split, self.limit, self.size = split, limit, size
        self.batch_size, self.seed, self.fresh = batch_size, seed, fresh
        self.device = pick_device(device)
        self.random_weights = random_weights
        self.mean, self.std, self.normalized, self.output = mean, std, normalized, output
        self.out = None if out is None else Path(out)
        self.callback = CallbackList(callbacks)
        self.distributed = Distributed.current() if together else ALONE
        self._origins: dict[int, Origin] = {}
        self.images = ExamData(
            data, size=size, limit=limit, normalized=normalized, distributed=self.distributed, callback=self.callback
        )

    def open(self, target: Target) -> Subject:
        """Return the subject that a target names: its network, with the images that it will be measured on."""
        normalization = None
        if isinstance(target, nn.Module):
            normalization = find_normalization(target, self.mean, self.std, self.normalized)
        subject = open_subject(
            target,
            partial(self.images.open, normalization=normalization),
            device=self.device,
            random_weights=self.random_weights,
            normalization=normalization,
            split=self.split,
            limit=self.limit,
            batch_size=self.batch_size,
            seed=self.seed,
            progress=self.callback.on_progress,
            distributed=self.distributed,
            output=self.output,
        )
        self._origins[id(subject)] = self._origin(target, subject)
        store = Store(subject, self.out)
        if self.is_timed or self.fresh or not all(store.has(probe) for probe in self.probes):
            subject.outputs  # noqa: B018 (a network that does not take these images is an error before all else)
        return subject

    def _origin(self, target: Target, subject: Subject) -> Origin:
        """Return what is examined, as it was named."""
        data = self.images.data
        chosen: dict[str, Any] = {"split": self.split, "limit": self.limit, "size": self.size}
        chosen |= {name: None if each is None else [float(x) for x in each] for name, each in self._normalization}
        chosen |= {"normalized": self.normalized, "random_weights": self.random_weights}
        usual = {"split": "test", "random_weights": False}
        return Origin(
            target=None if isinstance(target, nn.Module) else subject.name,
            data=data if isinstance(data, str) else None,
            named=data is None or isinstance(data, str),
            run=subject.run,
            options={name: value for name, value in chosen.items() if value != usual.get(name)},
            objects=() if self.output is None else ("output",),
        )

    @property
    def _normalization(self) -> tuple[tuple[str, Sequence[float] | None], ...]:
        return ("mean", self.mean), ("std", self.std)

    def run_all(self, targets: Iterable[Target]) -> Exams:
        """Examine all targets that can be; the mistakes of the others are `Exams.failures`, or raised if all have."""
        subjects: list[Subject] = []
        failures: dict[str, VitclinicError] = {}
        for target in targets:
            try:
                subjects.append(self.open(target))
            except VitclinicError as error:  # one target's mistake does not hide the others' results
                failures[name_target(target)] = error
                log.warning("%s was not examined: %s", name_target(target), error)
        if not subjects:
            raise next(iter(failures.values()))
        exams = self.run(subjects)
        exams.failures = failures
        return exams

    def run(self, subjects: Sequence[Subject]) -> Exams:
        """Examine all subjects by one plan; the first is what the others are compared with."""
        records = [ExamRecord(subject, self.out) for subject in subjects]
        plan, probes, repeated = self._plan(records)
        for record in records:
            record.expect(probes, {entry.probe: entry.limit for entry in plan.entries})
            record.found = self.distributed.leader_only(partial(record.read, self.fresh, repeated))
        schedule = self._schedule(records, plan)
        self.callback.on_schedule(schedule)
        self._follow(schedule, records)
        self.distributed.leader_only(lambda: self._keep_origins(records))
        return Exams.of([self._exam(place, record, schedule) for place, record in enumerate(records)])

    def _keep_origins(self, records: Sequence[ExamRecord]) -> None:
        for record in records:
            if (origin := self._origins.get(id(record.subject))) is not None:
                keep_origin(record.store.folder, record.subject.data_digest, origin)

    def _plan(self, records: Sequence[ExamRecord]) -> tuple[Plan, list[Probe], bool]:
        """Return the plan, its probes, and whether the same was planned before; named probes need no plan."""
        if not self.is_timed:
            unknown = [math.nan] * len(records)
            return (
                Plan(entries=[Entry(probe=p.name, options={}, seconds=unknown) for p in self.probes]),
                self.probes,
                False,
            )
        planner = Planner(
            [record.store for record in records], self.probes, fresh=self.fresh, limited=self.limit is not None
        )
        if self.budget is None:
            return self.distributed.leader_only(planner.plan_all), self.probes, False
        plan, repeated = self.distributed.leader_only(partial(planner.plan_within, self.budget))
        return plan, [planner.restore(entry) for entry in plan.entries], repeated

    def _schedule(self, records: Sequence[ExamRecord], plan: Plan) -> Schedule:
        """List the passes of all subjects, then the other probes from cheap to dear, each for all subjects."""
        steps = []
        for limit in dict.fromkeys(entry.limit for entry in plan.entries):
            for place, record in enumerate(records):
                shared = [p for p in record.missing if isinstance(p, StreamingProbe) and record.limits[p.name] == limit]
                if shared:
                    seconds = plan.seconds_of_pass(limit, place)
                    steps.append(Step(place, record.store.view(shared[0], limit), shared, seconds, limit))
        owning = [
            Step(place, record.subject, [probe], entry.seconds[place])
            for entry in sorted(plan.entries, key=lambda entry: _total(entry.seconds))
            for place, record in enumerate(records)
            for probe in record.missing
            if probe.name == entry.probe and not isinstance(probe, StreamingProbe)
        ]
        stored = [list(record.found) for record in records]
        all_steps = [self._with_memory(step) for step in (*steps, *owning)]
        return Schedule([record.subject for record in records], all_steps, stored, self.budget, plan.left_out)

    def _with_memory(self, step: Step) -> Step:
        """Return the step with what it will hold, and fewer images at a time if that is more than there is."""
        subject, probes = step.subject, [p for p in step.probes if find_obstacle(p, step.subject) is None]
        if not probes:
            return step
        room = free_memory(subject.device) // self.distributed.size
        size, needed = self.distributed.leader_only(lambda: fit_batch(subject, probes, room))
        said = log.warning if self.distributed.is_leader else log.debug
        if needed is not None and needed > room:
            said(
                "%s, %s: needs about %s of memory even at the smallest batch size; only %s are free.",
                *(subject.name, step.label, format_bytes(needed), format_bytes(room)),
            )
        if size == subject.batch_size:
            return replace(step, memory=needed)
        said(
            "%s, %s: with %d images at a time it would need more than the %s that are free; measuring with %d.",
            *(subject.name, step.label, subject.batch_size, format_bytes(room), size),
        )
        return replace(step, memory=needed, batch_size=size)

    def _follow(self, schedule: Schedule, records: Sequence[ExamRecord]) -> None:
        """Take the steps of a schedule; what was cut for want of time goes on last."""
        clock = TimeBudget(self.budget)
        cut: list[Step] = []
        for number, step in enumerate(schedule.steps):
            rest = schedule.steps[number + 1 :]
            over, allowed = self.distributed.leader_only(lambda: (clock.is_over, clock.allow(step, rest)))  # noqa: B023
            if number and over:
                self._skip(records[step.place], step)
            elif not self._take(records[step.place], step, allowed, clock):
                cut.append(step)
        for number, step in enumerate(cut):
            left = self.distributed.leader_only(lambda: clock.resume(step, cut[number + 1 :]))  # noqa: B023
            if left >= clock.LEAST:
                self._take(records[step.place], step, left, clock)

    def _take(self, record: ExamRecord, step: Step, allowed: float | None, clock: TimeBudget) -> bool:
        """Measure, store and tell. Returns whether the step came to its end."""
        taken = step if allowed is None else step.cut_to(allowed)

        def keep(measurement: Measurement) -> None:
            self.distributed.leader_only(partial(record.write, measurement))
            self.callback.on_measurement(step, measurement)

        self.callback.on_exam_step(step)
        started = time.monotonic()
        given = taken.subject.batch_size
        taken.subject.batch_size = taken.batch_size or given
        try:
            made = {found.probe: found for found in measure(taken.subject, taken.probes, keep)}
        finally:
            taken.subject.batch_size = given
        record.made |= made
        ended = allowed is None or all(found.status != "not_converged" for found in made.values())
        if ended:
            clock.note(step, time.monotonic() - started)
        return ended

    def _skip(self, record: ExamRecord, step: Step) -> None:
        reason = f"the time budget ({format_duration(self.budget or 0)}) ran out; run the same exam again to continue."
        record.skipped |= {probe.name: reason for probe in step.probes}
        self.callback.on_skip(step, reason)

    def _exam(self, place: int, record: ExamRecord, schedule: Schedule) -> Exam:
        subject, files = record.subject, record.files
        measurements = record.found | record.made
        probes = [probe for probe in record.probes if probe.name in measurements]
        pictures = self.distributed.leader_only(
            lambda: {
                probe.name: folder
                for probe in probes
                if (folder := draw(probe, measurements[probe.name], files[probe.name], probe.name in record.made))
            }
        )
        return Exam(
            name=subject.name,
            subject=subject.digest,
            folder=record.store.folder,
            measurements={probe.name: measurements[probe.name].with_name(subject.name) for probe in probes},
            files={probe.name: files[probe.name] for probe in probes},
            reused=frozenset(record.found),
            pictures=pictures,
            run=subject.run,
            origin=self._origins.get(id(subject)),
            memory={
                probe.name: step.memory
                for step in schedule.steps
                for probe in step.probes
                if step.place == place and step.memory is not None
            },
            left_out=record.skipped | {name: _explain_no_time(seconds) for name, seconds in schedule.left_out.items()},
        )


def _total(seconds: Sequence[float]) -> float:
    return sum(each for each in seconds if math.isfinite(each))


def _explain_no_time(seconds: float) -> str:
    return f"there was no time for it: at least {format_duration(max(1, seconds))}."
