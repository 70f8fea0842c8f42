"""The numbers that a study reads from a run: its results, its metrics, and exams that are stored with it."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitclinic._core.errors import RecipeError, VitclinicError, did_you_mean
from vitclinic._core.records import Measurement
from vitclinic.data import DataConfig
from vitclinic.exam import examine
from vitclinic.experiments.runner import Measured
from vitclinic.experiments.study.expectations import ENDS, Measure
from vitclinic.probes import Probe
from vitclinic.training import Run

_STATUS_WORDS = {"does_not_apply": "does not apply", "failed": "failed"}


Read = Callable[[Measure, Measurement | None, Mapping[str, float]], float]
"""A function that reads a measure's number from its measurement, or from the numbers that it is a difference of."""


class NoNumberError(Exception):
    """The reason why a run has no number for a measure."""


def measure_run(run: Run, data: DataConfig, measures: Mapping[str, Measure]) -> Measured:
    """Return the number of each measure, or why this run has none (it diverged, or a probe does not apply).

    Args:
        run: A run that has ended.
        data: The run's data, which may have moved since it was trained.
        measures: What to measure, by name.
    """
    measurements = _examine(measures, partial(_examine_checkpoint, run, data))
    return _read_numbers(measures, measurements, partial(_read_number, run))


def measure_target(target: str, data: DataConfig, measures: Mapping[str, Measure], out: Path) -> Measured:
    """Return the number of each measure of a network that was not trained here, such as `timm:NAME`.

    It has the weights that it has: measures of a run's results, or of its earlier epochs, are missing.
    """

    def examine_once(key: _ExamKey, probes: Sequence[Probe]) -> Mapping[str, Measurement]:
        if key.checkpoint not in ("last", "best"):
            return {}
        return examine(target, data, probes=probes, limit=key.limit, out=out)

    def read(measure: Measure, measurement: Measurement | None, numbers: Mapping[str, float]) -> float:
        if measure.difference is not None:
            return _subtract(measure.difference, numbers)
        if measurement is None:
            raise NoNumberError("a network that was not trained here has neither results nor earlier weights")
        return read_measurement(measurement, measure)

    return _read_numbers(measures, _examine(measures, examine_once), read)


def _read_numbers(measures: Mapping[str, Measure], measurements: Mapping[str, Measurement], read: Read) -> Measured:
    """Return the number of each measure, differences last."""
    numbers: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, measure in sorted(measures.items(), key=lambda item: item[1].difference is not None):
        try:
            numbers[name] = _rescale(read(measure, measurements.get(name), numbers), measure)
        except NoNumberError as reason:
            numbers[name], missing[name] = math.nan, str(reason)
    return Measured({name: numbers[name] for name in measures}, missing)


def measure_matched(
    run: Run, data: DataConfig, measures: Mapping[str, Measure], by: str, goal: float
) -> tuple[Measured, int | None]:
    """Return the numbers of a run at the kept epoch where the measure `by` is nearest to `goal`, and that epoch.

    Nearest is by ratio. Measures of the last weights are those of that epoch; the run's results are not of it, and
    missing. There is no epoch if the run keeps none, or if there is no goal.
    """
    there = run.checkpoints.names()
    kept = [epoch for epoch in sorted(run.recipe.checkpoint.keep_epochs) if epoch > 0 and f"epoch-{epoch}" in there]
    distances = {}
    for epoch in kept if goal > 0 else ():
        found = measure_run(run, data, {by: _at_epoch(measures[by], epoch)}).numbers[by]
        if found > 0:
            distances[epoch] = abs(math.log(found / goal))
    if not distances:
        reason = "it keeps no epoch with a number to match, or there is nothing to match"
        return Measured(dict.fromkeys(measures, math.nan), dict.fromkeys(measures, reason)), None
    nearest = min(distances, key=distances.__getitem__)
    measured = measure_run(run, data, {name: _at_epoch(measure, nearest) for name, measure in measures.items()})
    for name, measure in measures.items():
        parts = [measure, *(measures[other] for other in measure.difference or ())]
        if any(part.result is not None for part in parts):
            measured.numbers[name], measured.missing[name] = math.nan, "it is a result of the whole run"
    return measured, nearest


def _at_epoch(measure: Measure, epoch: int) -> Measure:
    """Return the measure with the weights of an epoch in place of the last ones."""
    if measure.probe is None or measure.checkpoint != "last":
        return measure
    return measure.model_copy(update={"checkpoint": f"epoch-{epoch}"})


def _read_number(run: Run, measure: Measure, measurement: Measurement | None, numbers: Mapping[str, float]) -> float:
    if measure.when_diverged is not None and run.status["status"] == "diverged":
        return 1 / len(run.data_facts["classes"]) if measure.when_diverged == "chance" else measure.when_diverged
    if measure.difference is not None:
        return _subtract(measure.difference, numbers)
    if measure.result is not None:
        return read_result(run, measure.result)
    if measurement is None:
        raise NoNumberError(f"it diverged before its checkpoint '{measure.checkpoint}'")
    return read_measurement(measurement, measure)


def _subtract(names: Sequence[str], numbers: Mapping[str, float]) -> float:
    """Return the first measure less the second."""
    for name in names:
        if math.isnan(numbers[name]):
            raise NoNumberError(f"there is no {name}")
    return numbers[names[0]] - numbers[names[1]]


class _ExamKey(NamedTuple):
    """The weights and images that the probes of one exam share."""

    checkpoint: str
    limit: int | None
    options: str = ""
    """The options of the only probe, if another exam of these weights and images has it with other options."""


def _examine(
    measures: Mapping[str, Measure], exam_of: Callable[[_ExamKey, Sequence[Probe]], Mapping[str, Measurement]]
) -> dict[str, Measurement]:
    """Return the measurement that each measure reads. Probes on the same weights and images share an exam."""
    exams: dict[_ExamKey, dict[str, Measure]] = defaultdict(dict)
    keys: dict[str, _ExamKey] = {}
    for name, measure in measures.items():
        if measure.probe is None:
            continue
        key = _ExamKey(measure.checkpoint, measure.limit)
        if exams[key].get(measure.probe, measure).options != measure.options:
            key = key._replace(options=json.dumps(measure.options, sort_keys=True))
        exams[key][measure.probe] = measure
        keys[name] = key
    done = {
        key: exam_of(key, [measure.parse_probe() for measure in by_probe.values()]) for key, by_probe in exams.items()
    }
    found = {name: done[key].get(str(measures[name].probe)) for name, key in keys.items()}
    return {name: measurement for name, measurement in found.items() if measurement is not None}


def _examine_checkpoint(
    run: Run, data: DataConfig, key: _ExamKey, probes: Sequence[Probe]
) -> Mapping[str, Measurement]:
    """Return the measurements of one exam; none of a run that diverged before that checkpoint."""
    diverged = run.status["status"] == "diverged"
    if key.checkpoint in ("last", "best") and diverged:
        return {}  # what it saved before it crashed is not what it was trained to
    checkpoint = f"epoch-{first_kept_epoch(run)}" if key.checkpoint == "early" else key.checkpoint
    try:
        return examine(run.at(checkpoint), data, probes=probes, limit=key.limit)
    except VitclinicError:
        if diverged:
            return {}
        raise


def first_kept_epoch(run: Run) -> int:
    """Return the first epoch after the start whose weights the run keeps: in the catalogue, the end of warm-up."""
    kept = [epoch for epoch in run.recipe.checkpoint.keep_epochs if epoch > 0]
    if not kept:
        raise RecipeError(f"'{run.path}' keeps no early weights: set checkpoint.keep_epochs, as in [0, 3].")
    return min(kept)


def _rescale(number: float, measure: Measure) -> float:
    """Apply the measure's `magnitude` and `log`."""
    if not math.isfinite(number):
        raise NoNumberError(f"its number is {number}")
    if measure.magnitude and measure.value is None:  # of units it was dropped before they became one number
        number = abs(number)
    if not measure.log:
        return number
    if number <= 0:
        raise NoNumberError(f"{number:.3g} has no logarithm")
    return math.log10(number)


def read_result(run: Run, path: str) -> float:
    """Return a number from a run's results or metrics.

    Args:
        run: A run that has ended.
        path: `diverged`, `stalled` or `learns` (1 or 0); `test.accuracy`, a final result, of the best checkpoint;
            `val.accuracy@5`, that of the first row at epoch 5 or later; or `train.images_per_second`, of a step.
    """
    if path in ENDS:
        return float(describe_end(run) == path)
    if path == "train.images_per_second":
        return read_speed(run)
    key, _, epoch = path.partition("@")
    kind, _, field = key.partition(".")
    if epoch:
        rows = [row for row in run.metrics if row["kind"] == kind and row["epoch"] >= float(epoch)]
        row = rows[0] if rows else {}
    else:
        row = run.results.get(kind, {})
    if row.get(field) is None:
        why = "it diverged" if run.status["status"] == "diverged" else "its rows have none"
        raise NoNumberError(f"there is no {path}: {why}")
    return float(row[field])


STALLED = 0.98
"""The share of its first tenth above which the last tenth of a run's training loss has not fallen."""


def describe_end(run: Run) -> str:
    """Return `diverged`, `stalled` or `learns`.

    Adam bounds its steps: at too high a rate a small ViT does not blow up, it stays at chance. A run has stalled if the
    mean training loss of the last tenth of its rows is above 0.98 of that of the first tenth.
    """
    if run.status["status"] == "diverged":
        return "diverged"
    losses = [row["loss"] for row in run.metrics if row["kind"] == "train" and row["loss"] is not None]
    tenth = max(1, len(losses) // 10)
    first, last = math.fsum(losses[:tenth]) / tenth, math.fsum(losses[-tenth:]) / tenth
    return "stalled" if last > STALLED * first else "learns"


def read_measurement(measurement: Measurement, measure: Measure) -> float:
    """Return one of a measurement's scalars, or one number for all its units of a kind."""
    if measurement.status not in ("ok", "not_converged"):
        raise NoNumberError(f"{measurement.probe} {_STATUS_WORDS[measurement.status]}: {measurement.reason}")
    if measure.scalar is not None:
        if measure.scalar not in measurement.scalars:
            hint = did_you_mean(measure.scalar, measurement.scalars)
            raise NoNumberError(f"{measurement.probe} has no scalar '{measure.scalar}' for this network.{hint}")
        return measurement.scalars[measure.scalar].value
    value = str(measure.value)
    rows = [row for row in measurement.units if measure.units in (None, row.kind) and value in row.values]
    if not rows:
        where = "any unit" if measure.units is None else f"a unit of kind {measure.units}"
        raise NoNumberError(f"{measurement.probe} has no '{value}' for {where}")
    rows.sort(key=lambda row: row.depth)
    if len(rows) <= measure.skip:
        raise NoNumberError(f"{measurement.probe} has '{value}' for {len(rows)} units, and the first are left out")
    rows = rows[measure.skip :]
    numbers = [row.values[value].value for row in rows]
    if measure.magnitude:
        numbers = [abs(number) for number in numbers]
    if measure.over_units in ("stage_rise", "stage_step"):
        return reduce_stages(numbers, [row.stage for row in rows], measure.over_units)
    return reduce_units(numbers, measure.over_units)


def reduce_units(numbers: list[float], how: str) -> float:
    """Return one number for all units, whose numbers are given in the order of their depth.

    Example:
        >>> reduce_units([0.1, 0.3, 0.2], "last"), reduce_units([0.1, 0.2, 0.4], "trend")
        (0.2, 1.0)
    """
    if any(math.isnan(number) for number in numbers):
        return math.nan
    if how == "trend":
        if len(numbers) < 2:
            raise NoNumberError("one unit has no trend")
        signs = np.sign(np.subtract.outer(numbers, numbers))  # [i, j]: number i less number j
        pairs: Any = np.tril(signs, -1)
        return float(pairs.sum() / (len(numbers) * (len(numbers) - 1) / 2))
    if how in ("lower", "upper"):
        half = (len(numbers) + 1) // 2  # of an odd number the middle one is in both
        numbers = numbers[:half] if how == "lower" else numbers[-half:]
        how = "mean"
    return {"first": numbers[0], "last": numbers[-1], "mean": math.fsum(numbers) / len(numbers)}[how]


def reduce_stages(numbers: Sequence[float], stages: Sequence[int | None], how: str) -> float:
    """Return the mean over stages of how a number changes within them, or from one to the next; NaN without any.

    Args:
        numbers: Of units, in the order of their depth.
        stages: The stage of each unit.
        how: `stage_rise`, a stage's last number minus its first; or `stage_step`, its first minus the last of the stage
            before.

    Example:
        >>> reduce_stages([1.0, 2.0, 4.0, 3.0, 4.0], [0, 0, 0, 1, 1], "stage_rise")
        2.0
        >>> reduce_stages([1.0, 2.0, 4.0, 3.0, 4.0], [0, 0, 0, 1, 1], "stage_step")
        -1.0
    """
    blocks: dict[int | None, list[float]] = {}
    for number, stage in zip(numbers, stages, strict=True):
        blocks.setdefault(stage, []).append(number)
    if how == "stage_rise":
        found = [block[-1] - block[0] for block in blocks.values() if len(block) > 1]
    else:
        found = [after[0] - before[-1] for before, after in pairwise(blocks.values())]
    return math.fsum(found) / len(found) if found else math.nan


def read_speed(run: Run) -> float:
    """Return the median number of images that a run trained in a second, over its steps."""
    rates = [row["timing"].get("images_per_second") for row in run.metrics if row["kind"] == "train"]
    known = [rate for rate in rates if rate]
    if not known:
        raise NoNumberError("there is no train.images_per_second: its rows have none")
    return float(np.median(known))


def training_seconds(run: Run) -> float:
    """Return how long the steps of a run took by its own record, however often it was interrupted."""
    size = run.recipe.batch_size
    rates = [row["timing"].get("images_per_second") for row in run.metrics if row["kind"] == "train"]
    return math.fsum(size / rate for rate in rates if rate)
