"""The verb `examine`: probes on one or several networks, every result stored as soon as it is there."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from numbers import Integral
from pathlib import Path
from typing import Any, overload

from torch import nn

from vitclinic.clinic.pictures import draw
from vitclinic.clinic.store import REUSED, Store
from vitclinic.clinic.targets import Target, resolve
from vitclinic.data import DataConfig, Dataset, open_data
from vitclinic.data.decoding import Size
from vitclinic.errors import RecipeError, did_you_mean
from vitclinic.measurement import Measurement
from vitclinic.probes import Probe, Subject, estimated_seconds, measure, parse_probes
from vitclinic.probes.processes import ALONE, Processes
from vitclinic.training import Run
from vitclinic.training.distributed import pick_device

What = str | Path | Run | nn.Module
Data = str | DataConfig | Dataset


@dataclass(frozen=True)
class Exam(Mapping[str, Measurement]):
    """The measurements of one subject, by probe: `exam["norms"].scalars["weight_norm"].value`."""

    name: str
    subject: str
    """Digest of the network."""
    folder: Path
    """Where the measurements are stored."""
    measurements: dict[str, Measurement]
    files: dict[str, Path] = field(default_factory=dict)
    reused: frozenset[str] = frozenset()
    """The probes whose measurements had been made before."""
    pictures: dict[str, Path] = field(default_factory=dict)
    """The folders with pictures, of the probes that draw some."""

    def __getitem__(self, probe: str) -> Measurement:
        if probe not in self.measurements:
            raise KeyError(f"'{probe}' was not measured.{did_you_mean(probe, self.measurements)}")
        return self.measurements[probe]

    def __iter__(self) -> Iterator[str]:
        return iter(self.measurements)

    def __len__(self) -> int:
        return len(self.measurements)

    def __repr__(self) -> str:
        found = ", ".join(f"{name}: {measurement.status}" for name, measurement in self.measurements.items())
        return f"Exam({self.name}; {found})"


class Watcher:
    """Told what goes on; the command line's display is one."""

    def on_reading(self, what: str, done: int, total: int) -> None:
        """Images are being decoded."""

    def on_subject(self, subject: Subject, to_do: Sequence[Probe], seconds: float) -> None:
        """A subject's turn: these probes are not stored yet, and will take about so long."""

    def on_progress(self, what: str, done: int, total: int) -> None:
        """Images have passed through the network."""

    def on_measurement(self, subject: Subject, measurement: Measurement) -> None:
        """A measurement is made and stored."""


@overload
def examine(targets: What, data: Data | None = None, **options: Any) -> Exam: ...
@overload
def examine(targets: Sequence[What], data: Data | None = None, **options: Any) -> list[Exam]: ...
def examine(targets: What | Sequence[What], data: Data | None = None, **options: Any) -> Exam | list[Exam]:
    """Measure one network (an `Exam`) or several (a list of them) on some data.

    Example:
        >>> exam = examine(network, data="photos/", probes=["norms"])  # doctest: +SKIP
        >>> exam["norms"].scalars["weight_norm"].value  # doctest: +SKIP

    `targets` are networks that take pixels in [0, 1], or TARGETs (see `vitclinic.clinic.targets`); `data` is what
    `open_data` takes or returns, for a run by default its own. Options are those of `Examination`.
    """
    examination = Examination(data, **options)
    if isinstance(targets, str | Path | Run | nn.Module):
        return examination.of(targets)
    if not targets:
        raise RecipeError("There is nothing to examine: name a target.")
    return [examination.of(target) for target in targets]


class Examination:
    """What is measured, on what and where it is stored: the same for all targets.

    `probes` are names or {name: {option: value}}, by default those that take seconds; `split` and `limit` (at most so
    many images) say what of the data is used (curvature probes have their own say in that), `size` at how many pixels a
    side if the network leaves that open; `out` is where results go instead of `exams/`; with `fresh` stored results are
    not reused; `random_weights` is for library targets. With `together` all processes of torch.distributed's group,
    each of which does this, measure together, and the leading one stores; else a process measures by itself.
    """

    def __init__(
        self,
        data: Data | None = None,
        *,
        probes: Sequence[Any] | None = None,
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
        self.probes = parse_probes([probes] if isinstance(probes, str) else probes)
        self.split, self.limit, self.size = split, limit, size
        self.batch_size, self.seed, self.fresh = batch_size, seed, fresh
        self.device = pick_device(device)
        self.random_weights = random_weights
        self.out = None if out is None else Path(out)
        self.watcher = watcher or Watcher()
        self.processes = Processes.joined() if together else ALONE
        self._opened = cache(self._open)

    def of(self, what: What) -> Exam:
        """The exam of one target."""
        target = resolve(what, self.device, self.random_weights)
        subject = self.subject(target)
        store = Store.of(subject, target.run, self.out)
        files = {probe.name: store.path(probe, subject) for probe in self.probes}
        subject.scratch.update({name: path.with_suffix(".partial") for name, path in files.items()})
        found = self.processes.leading(lambda: self._found(store, subject))
        to_do = [probe for probe in self.probes if probe.name not in found]
        made = self._measured(subject, to_do, files) if to_do else {}
        measurements = {probe.name: (found | made)[probe.name] for probe in self.probes}
        pictures = self.processes.leading(lambda: self._drawn(measurements, files, made))
        return Exam(subject.name, subject.digest, store.folder, measurements, files, frozenset(found), pictures)

    def _drawn(
        self, measurements: Mapping[str, Measurement], files: Mapping[str, Path], made: Container[str]
    ) -> dict[str, Path]:
        """The folders of the probes that draw pictures, by probe."""
        folders = {
            probe.name: draw(probe, measurements[probe.name], files[probe.name], anew=probe.name in made)
            for probe in self.probes
        }
        return {name: folder for name, folder in folders.items() if folder is not None}

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
            processes=self.processes,
        )

    def _found(self, store: Store, subject: Subject) -> dict[str, Measurement]:
        """What is stored and may be reused: if nothing may, unfinished work goes, too."""
        if self.fresh:
            _remove(subject.scratch.values())
            return {}
        stored = {probe.name: store.find(probe, subject) for probe in self.probes}
        return {name: measurement for name, measurement in stored.items() if measurement is not None}

    def _measured(self, subject: Subject, probes: list[Probe], files: dict[str, Path]) -> dict[str, Measurement]:
        def keep(measurement: Measurement) -> None:
            self.processes.leading(partial(store, measurement))
            self.watcher.on_measurement(subject, measurement)

        def store(measurement: Measurement) -> None:
            measurement.write(files[measurement.probe])
            if measurement.status in REUSED:  # after a failure, the next attempt goes on from there
                _remove([subject.scratch[measurement.probe]])

        subject.outputs  # noqa: B018 (a network that does not take these images is an error before all else)
        self.watcher.on_subject(subject, probes, estimated_seconds(subject, probes))
        return {measurement.probe: measurement for measurement in measure(subject, probes, keep)}

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
        mine: list[Dataset] = []
        self.processes.leading(lambda: mine.append(opened()))  # the others then find it decoded
        return mine[0] if mine else opened()


def _remove(files: Iterable[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)


def _check_count(name: str, count: Any) -> None:
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, Integral):
        raise RecipeError(f"'{name}' must be a whole number (got {count!r}).")
    if int(count) < 1:
        raise RecipeError(f"'{name}' must be at least 1 (got {count}).")


def _same_place(one: str, other: str) -> bool:
    return one == other or Path(one).expanduser().resolve() == Path(other).expanduser().resolve()
