"""Pictures of measurements as PNG files, in a folder beside the measurement: `PROBE-KEY/NAME.png`."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from numbers import Integral
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from torch import nn

from vitclinic._core.config import validate
from vitclinic._core.distributed import ALONE, Distributed, pick_device
from vitclinic._core.errors import RecipeError
from vitclinic._core.images import png
from vitclinic._core.io import write_bytes, write_errors
from vitclinic._core.records import Measurement
from vitclinic._core.time import spoken
from vitclinic.data import DataConfig, Dataset, open_data
from vitclinic.data.decoding import Size
from vitclinic.exam.exam import Exam, Exams, Measured
from vitclinic.exam.planner import Patient, Plan, Planner, candidates
from vitclinic.exam.schedule import Schedule, Step, Watcher
from vitclinic.exam.store import Store, is_final
from vitclinic.exam.targets import Target, resolve
from vitclinic.probes import OwningProbe, Probe, StreamingProbe, Subject, measure
from vitclinic.training import Run

log = logging.getLogger(__name__)


def draw(probe: Probe, measurement: Measurement, file: Path, anew: bool) -> Path | None:
    """Write the pictures of a measurement that is stored as `file`; returns their folder, None if there are none.

    Unless they are to be drawn `anew`, pictures that are there already are left. A probe that cannot draw is a message:
    its numbers are stored.
    """
    if measurement.status not in ("ok", "not_converged"):
        return None
    try:
        pictures = dict(probe.pictures(measurement))
    except Exception as error:  # a probe may raise anything
        log.info("%s cannot draw", probe.name, exc_info=error)
        log.warning("There are no pictures of %s: %s: %s", probe.name, type(error).__name__, error)
        return None
    if not pictures:
        return None
    folder = file.with_suffix("")
    write_pictures(folder, pictures, anew)
    return folder


def write_pictures(folder: Path, pictures: Mapping[str, NDArray[np.uint8]], anew: bool = True) -> list[Path]:
    """Each picture [H, W, 3] as a PNG named after it; characters that are not for file names become hyphens."""
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, picture in pictures.items():
        files.append(folder / f"{_file_name(name)}.png")
        if anew or not files[-1].exists():
            write_bytes(files[-1], png(picture))
    return files


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "picture"


class Case:
    """`found` is what was stored before, `made` what is measured now, `skipped` why something is not: by probe."""

    def __init__(self, patient: Patient, probes: Sequence[Probe], limit: int | None) -> None:
        self.patient, self.probes, self.limit = patient, probes, limit
        self.files: dict[str, Path] = {probe.name: patient.path(probe, limit) for probe in probes}
        self.found: dict[str, Measurement] = {}
        self.made: dict[str, Measurement] = {}
        self.skipped: dict[str, str] = {}
        patient.subject.scratch.update({name: path.with_suffix(".partial") for name, path in self.files.items()})

    def stored(self, fresh: bool) -> dict[str, Measurement]:
        """What is stored and may be reused: if nothing may, unfinished work goes, too."""
        if fresh:
            for path in self.patient.subject.scratch.values():
                path.unlink(missing_ok=True)
            return {}
        store, limit = self.patient.store, self.limit
        stored = {probe.name: store.find(probe, self.patient.seen(probe, limit)) for probe in self.probes}
        return {name: measurement for name, measurement in stored.items() if measurement is not None}

    def to_do(self, kind: type[Probe]) -> list[Probe]:
        """The probes of that kind whose measurements are missing."""
        return [probe for probe in self.probes if isinstance(probe, kind) and probe.name not in self.found]

    def store(self, measurement: Measurement) -> None:
        """Write a measurement. Unfinished work stays where it helps: after a failure, or if time had run out."""
        measurement.write(self.files[measurement.probe])
        if is_final(measurement):
            self.patient.subject.scratch[measurement.probe].unlink(missing_ok=True)


What = str | Path | Run | nn.Module
Data = str | DataConfig | Dataset


@overload
def examine(targets: What, data: Data | None = None, **options: Any) -> Exam: ...
@overload
def examine(targets: Sequence[What], data: Data | None = None, **options: Any) -> Exams: ...
def examine(targets: What | Sequence[What], data: Data | None = None, **options: Any) -> Exam | Exams:
    """Measure one network (an `Exam`) or several (`Exams`, a list of them) on some data, within five minutes.

    Example:
        >>> exam = examine(network, data="photos/", budget="2m")  # doctest: +SKIP
        >>> exam["norms"].scalars["weight_norm"].value  # doctest: +SKIP
        >>> exam["fourier"].figure()  # doctest: +SKIP
        >>> exam.report("report.html")  # doctest: +SKIP

    `targets` are networks that take pixels in [0, 1], or TARGETs (see `vitclinic.exam.targets`); `data` is what
    `open_data` takes or returns, for a run by default its own. Options are those of `Examination`.
    """
    examination = Examination(data, **options)
    if isinstance(targets, str | Path | Run | nn.Module):
        return examination.of(targets)
    if not targets:
        raise RecipeError("There is nothing to examine: name a target.")
    return examination.of_all([examination.patient(target) for target in targets])


class Examination:
    """What is measured, on what and where it is stored: the same for all targets.

    Which probes: those that fit into `budget` (five minutes for all targets together, unless given), in forms that do;
    or the `quick` ones, which share one pass; or, in `full`, all; or `probes`, as names or {name: {option: value}}, and
    within a budget only if one is given. `settings` are options of some of them, {name: {option: value}}.

    `split` and `limit` (at most so many images) say what of the data is used (many probes have their own say in that),
    `size` at how many pixels a side if the network leaves that open; `out` is where results go instead of `exams/`;
    with `fresh` stored results are not reused; `random_weights` is for library targets. With `together` all processes
    of torch.distributed's group, each of which does this, measure together, and the leading one stores; else a process
    measures by itself.
    """

    def __init__(
        self,
        data: Data | None = None,
        *,
        probes: Sequence[Any] | None = None,
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
        out: str | Path | None = None,
        fresh: bool = False,
        together: bool = False,
        watcher: Watcher | None = None,
    ) -> None:
        for name, count in (("limit", limit), ("size", size), ("batch_size", batch_size)):
            _check_count(name, count)
        self.data = data
        named = [probes] if isinstance(probes, str) else probes
        self.probes, self.budget = candidates(named, budget, quick, full, settings or {})
        self.split, self.limit, self.size = split, limit, size
        self.batch_size, self.seed, self.fresh = batch_size, seed, fresh
        self.device = pick_device(device)
        self.random_weights = random_weights
        self.out = None if out is None else Path(out)
        self.watcher = watcher or Watcher()
        self.distributed = Distributed.current() if together else ALONE
        self._opened = cache(self._open)

    def of(self, what: What) -> Exam:
        """The exam of one target."""
        return self.of_all([self.patient(what)])[0]

    def patient(self, what: What) -> Patient:
        """A target with its images, ready to be examined."""
        target = resolve(what, self.device, self.random_weights)
        subject = self.subject(target)
        patient = Patient(target, subject, Store.of(subject, target.run, self.out))
        planned = self.budget is not None or self.fresh
        if planned or not all(patient.path(probe, None).is_file() for probe in self.probes):
            subject.outputs  # noqa: B018 (a network that does not take these images is an error before all else)
        return patient

    def of_all(self, patients: Sequence[Patient]) -> Exams:
        """The exams of all patients, for which there is one plan; the first is what the others are compared with."""
        planner = Planner(patients, self.probes, fresh=self.fresh, limited=self.limit is not None)
        plan = validate(Plan, self.distributed.leader_only(lambda: self._plan(planner).model_dump(mode="json")))
        probes = [planner.restored(entry) for entry in plan.entries]
        cases = [Case(patient, probes, plan.limit) for patient in patients]
        for case in cases:
            case.found = self.distributed.leader_only(partial(case.stored, self.fresh))
        schedule = self._schedule(cases, plan)
        self.watcher.on_schedule(schedule)
        ends = math.inf if self.budget is None else time.monotonic() + self.budget
        for number, step in enumerate(schedule.steps):
            if number and self.distributed.any(time.monotonic() >= ends):
                self._skip(cases[step.place], step)
            else:
                self._take(cases[step.place], step)
        return Exams.of([self._exam(case, schedule) for case in cases])

    def _plan(self, planner: Planner) -> Plan:
        return planner.fixed() if self.budget is None else planner.within(self.budget)

    def _schedule(self, cases: Sequence[Case], plan: Plan) -> Schedule:
        """What is to be done: the shared pass of each, then probe by probe, so that what is cut off is so in all."""
        steps = []
        for place, case in enumerate(cases):
            if shared := case.to_do(StreamingProbe):
                steps.append(Step(place, case.patient.seen(shared[0], plan.limit), shared, plan.shared[place]))
        for entry in plan.entries:
            for place, case in enumerate(cases):
                for probe in case.to_do(OwningProbe):
                    if probe.name == entry.probe:
                        steps.append(Step(place, case.patient.subject, [probe], entry.seconds[place]))
        stored = [list(case.found) for case in cases]
        return Schedule([case.patient.subject for case in cases], steps, stored, self.budget, plan.left_out)

    def _take(self, case: Case, step: Step) -> None:
        def keep(measurement: Measurement) -> None:
            self.distributed.leader_only(partial(case.store, measurement))
            self.watcher.on_measurement(step, measurement)

        self.watcher.on_step(step)
        case.made |= {found.probe: found for found in measure(step.subject, step.probes, keep)}

    def _skip(self, case: Case, step: Step) -> None:
        reason = f"the budget of {spoken(self.budget or 0)} had run out; the same again goes on."
        case.skipped |= {probe.name: reason for probe in step.probes}
        self.watcher.on_skipped(step, reason)

    def _exam(self, case: Case, schedule: Schedule) -> Exam:
        subject, files = case.patient.subject, case.files
        measurements = case.found | case.made
        probes = [probe for probe in case.probes if probe.name in measurements]
        pictures = self.distributed.leader_only(
            lambda: {
                probe.name: folder
                for probe in probes
                if (folder := draw(probe, measurements[probe.name], files[probe.name], probe.name in case.made))
            }
        )
        return Exam(
            name=subject.name,
            subject=subject.digest,
            folder=case.patient.store.folder,
            measurements={probe.name: Measured.of(measurements[probe.name], subject.name) for probe in probes},
            files={probe.name: files[probe.name] for probe in probes},
            reused=frozenset(case.found),
            pictures=pictures,
            run=case.patient.target.run,
            left_out=case.skipped | {name: _no_time(seconds) for name, seconds in schedule.left_out.items()},
        )

    def subject(self, target: Target) -> Subject:
        """The target's network with the images that it will be measured on."""
        return Subject(
            target.network,
            self._dataset(target),
            name=target.name,
            split=self.split,
            limit=self.limit,
            batch_size=self.batch_size,
            seed=self.seed,
            output_names=target.output_names,
            training=target.training,
            progress=self.watcher.on_progress,
            distributed=self.distributed,
        )

    def _dataset(self, target: Target) -> Dataset:
        data = self.data if self.data is not None else target.data
        if data is None:
            raise RecipeError(f"Say on which data to examine '{target.name}' (--data; a run has its own).")
        if isinstance(data, Dataset):
            return data
        if isinstance(data, str) and target.data is not None and _same_place(data, target.data.source):
            data = target.data  # with the run's own splits: its test images are then those it has not seen
        config = data if isinstance(data, DataConfig) else DataConfig(source=data)
        size = target.size if target.size is not None else self.size and (self.size, self.size)
        return self._opened(config.model_dump_json(), size or None, target.channels)

    def _open(self, config: str, size: Size | None, channels: int | None) -> Dataset:
        """Once for all targets that see the data alike."""
        opened = partial(
            open_data,
            DataConfig.model_validate_json(config),
            size=size,
            channels=channels,
            progress=self.watcher.on_reading,
        )
        return self.distributed.leader_first(opened)


def _no_time(seconds: float) -> str:
    return f"there was no time for it: at least {spoken(max(1, seconds))}."


def _check_count(name: str, count: Any) -> None:
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, Integral):
        raise RecipeError(f"'{name}' must be a whole number (got {count!r}).")
    if int(count) < 1:
        raise RecipeError(f"'{name}' must be at least 1 (got {count}).")


def _same_place(one: str, other: str) -> bool:
    return one == other or Path(one).expanduser().resolve() == Path(other).expanduser().resolve()
