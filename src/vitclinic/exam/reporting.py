"""Reports from what is stored: a run's `exams/` and metrics, or a folder `exams/NAME-DIGEST`, as a page shows them.

A folder may hold several measurements of one probe. Taken are those of the network that was asked for (a run's best
checkpoint unless another is named): usable ones before those that failed; then those on the images that most probes of
all targets were measured on, so that networks are compared on the same; then the newest.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vitclinic._core.errors import RecipeError, RunError, VitclinicError
from vitclinic._core.io import expand_path
from vitclinic._core.records import Measurement
from vitclinic.exam.commands import Origin, add_commands
from vitclinic.exam.origins import find_origin
from vitclinic.exam.request import nothing_stored
from vitclinic.exam.store import REUSED, read_measurement
from vitclinic.exam.targets import resolve
from vitclinic.probes.digest import network_digest
from vitclinic.reports.figure import ExamView
from vitclinic.tasks import headlines
from vitclinic.training import Run
from vitclinic.training.rows import read_rows
from vitclinic.training.run import find_run

log = logging.getLogger(__name__)

PAGE = "report.html"
CURVES = "curves.jsonl"
"""In the folder of an exam: the rows of a training by another library."""


def report(
    targets: str | Path | Run | Sequence[str | Path | Run],
    out: str | Path | None = None,
    *,
    title: str | None = None,
    images: bool = True,
) -> Path:
    """Write one page from what is stored of one or several networks; the others are compared with the first.

    Args:
        targets: A run directory, perhaps `@CHECKPOINT`, a `Run`, a folder `exams/NAME-DIGEST` of another network, or
            several of them.
        out: The page. By default that of one run is its `report.html`, any other `report.html` of the current
            directory.
        title: Unless given, the networks' names.
        images: Show pictures of the data.

    Returns:
        The page's path.

    Example:
        >>> report(["runs/plain", "runs/treated"], "report.html")  # doctest: +SKIP
    """
    from vitclinic.reports.page import write_report

    listed = [targets] if isinstance(targets, str | Path | Run) else list(targets)
    found = [_open_stored(str(target.path if isinstance(target, Run) else target)) for target in listed]
    networks: list[ExamView] = []
    for one, measurements in zip(found, choose_measurements([one.measurements for one in found]), strict=True):
        reference = networks[0].measurements if networks else None
        digests = {measurement.data for measurement in measurements.values()}
        origin = find_origin(one.exams, digests, one.name, one.run)
        networks.append(view_exam(one.name, measurements, one.run, reference, one.folder, origin))
    beside = found[0].run.path if len(found) == 1 and found[0].run is not None else Path()
    return write_report(out if out is not None else beside / PAGE, networks, title=title, images=images)


def read_stored(target: str | Path | Run) -> dict[str, Measurement]:
    """Return what is stored of a target's network, by probe, as its report shows it."""
    found = _open_stored(str(target.path if isinstance(target, Run) else target))
    return choose_measurements([found.measurements])[0]


def view_exam(
    name: str,
    measurements: Mapping[str, Measurement],
    run: Run | None = None,
    reference: Mapping[str, Measurement] | None = None,
    folder: Path | None = None,
    origin: Origin | None = None,
) -> ExamView:
    """Return a network as a report shows it: its measurements, what they mean, how it was trained and what it is."""
    from vitclinic.exam.findings import find

    training = read_rows(folder / CURVES) if run is None and folder is not None else []
    training = training if run is None else run.metrics
    facts = (_facts_of(run) if run is not None else {}) | _facts_in(measurements)
    findings = find(measurements, training, reference)
    if origin is not None:
        findings = add_commands(findings, origin)
    return ExamView(name, measurements, findings, training, facts)


@dataclass(frozen=True)
class _Stored:
    """Measurements of one network, of each probe perhaps more than one."""

    name: str
    measurements: Sequence[Measurement]
    run: Run | None = None
    folder: Path | None = None

    @property
    def exams(self) -> Path:
        """The folder of the measurements."""
        return (self.folder or Path()) if self.run is None else Path(self.run.path) / "exams"


def _open_stored(text: str) -> _Stored:
    found = find_run(text)
    if found is not None:
        run = Run.open(found[0])
        return _Stored(text.rstrip("/"), _of_network(text, _read(run.path / "exams"), bool(found[1])), run)
    elsewhere = expand_path(text, RecipeError)
    if not (measurements := _read(elsewhere)):
        raise nothing_stored(text)
    return _Stored(re.sub(r"-[0-9a-f]{8}$", "", elsewhere.resolve().name), measurements, folder=elsewhere)


def _read(folder: Path) -> list[Measurement]:
    """Read all measurements in `folder`, oldest first; a damaged file is left out with a warning."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(read_measurement(path))
        except RunError as error:
            log.warning("%s It is left out.", error)
    return sorted(found, key=lambda measurement: measurement.provenance.date)


def _of_network(target: str, measurements: list[Measurement], named: bool) -> list[Measurement]:
    """Return the measurements of the target's weights; if a run has none or other weights by now, the latest ones."""
    try:
        digest = network_digest(resolve(target, torch.device("cpu")).network)
    except VitclinicError as error:
        if named:
            raise
        if not measurements:  # such as one that diverged at once: how that went is there to show
            log.warning("%s The report is on its training only.", error)
            return []
        log.warning("%s The report is on the network that was measured last.", error)
        digest = measurements[-1].subject
    mine = [measurement for measurement in measurements if measurement.subject == digest]
    if mine or (not named and not measurements):  # a run that was only trained has its curves to show
        return mine
    if named:
        raise RunError(f"Nothing is stored for '{target}'; measure it first: vitclinic examine {target}.")
    log.warning(
        "Stored results of '%s' are for other weights than it has now; run `vitclinic examine` again to measure these.",
        target,
    )
    return [measurement for measurement in measurements if measurement.subject == measurements[-1].subject]


def choose_measurements(stored: Sequence[Sequence[Measurement]]) -> list[dict[str, Measurement]]:
    """Choose one measurement of each probe for each network, as the top of this file says."""
    seen = Counter(
        data for network in stored for _, data in {(one.probe, one.data) for one in network if one.status in REUSED}
    )

    def rank(measurement: Measurement) -> tuple[bool, int, str]:
        return (measurement.status in REUSED, seen[measurement.data], measurement.provenance.date)

    return [{one.probe: one for one in sorted(network, key=rank)} for network in stored]  # the last of a probe stays


def _facts_of(run: Run) -> dict[str, str]:
    """Summarize a run by what its files say."""
    recipe, data, status = run.recipe, run.data_facts, run.status
    height, width = data["size"]
    counts = ", ".join(f"{count:,} {split}" for split, count in data["counts"].items())
    length = f"{recipe.epochs:g} epochs" if recipe.epochs else f"{status.get('total_steps', status['step']):,} steps"
    facts = {
        "Network": recipe.model.name,
        "Treatments": ", ".join(treatment.name for treatment in recipe.treatments) or "none",
        "Data": f"{data['name']}, {len(data['classes'])} class{'es' * (len(data['classes']) != 1)}, {height} x {width}",
        "Images": counts,
        "Training": f"{length}, {recipe.optimizer.name}, lr {recipe.optimizer.lr:g}, batch {recipe.batch_size}",
    }
    if status["status"] != "finished":
        facts["Status"] = str(status["status"])
    if test := run.results.get("test"):
        metric = headlines(recipe.task)[0]
        interval = f" ({metric.show_interval(test)})" if metric.interval else ""
        facts[f"Test {metric.name}"] = metric.show(test[metric.name]) + interval
    return facts


def _facts_in(measurements: Mapping[str, Measurement]) -> dict[str, str]:
    cost = measurements.get("cost")
    if cost is None or "parameters" not in cost.scalars:
        return {}
    return {"Parameters": f"{cost.scalars['parameters'].value:,.0f}"}
