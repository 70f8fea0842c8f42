"""The numbers that a study wants of a run: from its results, its metrics, and exams that are stored with it."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from vitclinic._core.errors import RecipeError, VitclinicError, did_you_mean
from vitclinic._core.records import Measurement
from vitclinic.data import DataConfig
from vitclinic.exam import examine
from vitclinic.experiments.runner import Measured
from vitclinic.experiments.study.study import Measure
from vitclinic.training import Run

_WORDS = {"does_not_apply": "does not apply", "failed": "failed"}


class NoNumberError(Exception):
    """Why a run has no number of a measure."""


def measured_of(run: Run, data: DataConfig, measures: Mapping[str, Measure]) -> Measured:
    """Each measure's number, or why this run has none (it diverged, or a probe does not apply).

    `data` is the run's own, wherever that lies by now.
    """
    measurements = _examined(run, data, measures)
    numbers: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, measure in sorted(measures.items(), key=lambda item: item[1].difference is not None):
        try:
            numbers[name] = _scaled(_number(run, measure, measurements.get(name), numbers), measure)
        except NoNumberError as reason:
            numbers[name], missing[name] = math.nan, str(reason)
    return Measured({name: numbers[name] for name in measures}, missing)


def _number(run: Run, measure: Measure, measurement: Measurement | None, numbers: Mapping[str, float]) -> float:
    if measure.when_diverged is not None and run.status["status"] == "diverged":
        return 1 / len(run.data_facts["classes"]) if measure.when_diverged == "chance" else measure.when_diverged
    if measure.difference is not None:
        for other in measure.difference:
            if math.isnan(numbers[other]):
                raise NoNumberError(f"there is no {other}")
        return numbers[measure.difference[0]] - numbers[measure.difference[1]]
    if measure.result is not None:
        return of_result(run, measure.result)
    if measurement is None:
        raise NoNumberError(f"it diverged before its checkpoint '{measure.checkpoint}'")
    return of_measurement(measurement, measure)


def _examined(run: Run, data: DataConfig, measures: Mapping[str, Measure]) -> dict[str, Measurement]:
    """The measurement that each measure reads. Probes on the same weights and images share an exam, and its pass."""
    exams: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    asked: dict[str, tuple[tuple[str, int, str], str]] = {}
    for name, measure in measures.items():
        if measure.probe is None:
            continue
        exam = (measure.checkpoint, measure.limit, "")
        if exams[exam].get(measure.probe, measure.options) != measure.options:
            exam = (measure.checkpoint, measure.limit, json.dumps(measure.options, sort_keys=True))
        exams[exam][measure.probe] = measure.options
        asked[name] = exam, measure.probe
    done = {exam: _exam(run, data, exam[0], exam[1], probes) for exam, probes in exams.items()}
    return {name: done[exam][probe] for name, (exam, probe) in asked.items() if probe in done[exam]}


def _exam(
    run: Run, data: DataConfig, checkpoint: str, limit: int, probes: Mapping[str, Any]
) -> Mapping[str, Measurement]:
    if checkpoint in ("last", "best") and run.status["status"] == "diverged":
        return {}  # what it saved before it crashed is not what it was trained to
    if checkpoint == "early":
        checkpoint = f"epoch-{early_epoch(run)}"
    entries = [{name: probes[name]} for name in probes]
    try:
        return examine(f"{run.path}@{checkpoint}", data, probes=entries, limit=limit)
    except VitclinicError:
        if run.status["status"] == "diverged":
            return {}  # before the checkpoint that was to be measured
        raise


def early_epoch(run: Run) -> int:
    """The first epoch whose weights the run keeps after its start: the end of warm-up, in the catalogue."""
    kept = [epoch for epoch in run.recipe.checkpoint.keep_epochs if epoch > 0]
    if not kept:
        raise RecipeError(f"'{run.path}' keeps no early weights: set checkpoint.keep_epochs, as in [0, 3].")
    return min(kept)


def _scaled(number: float, measure: Measure) -> float:
    if not math.isfinite(number):
        raise NoNumberError(f"its number is {number}")
    if measure.magnitude:
        number = abs(number)
    if not measure.log:
        return number
    if number <= 0:
        raise NoNumberError(f"{number:.3g} has no logarithm")
    return math.log10(number)


def of_result(run: Run, path: str) -> float:
    """`diverged` is 1 or 0; `test.accuracy` the final result; `val.accuracy@5` of the first row at epoch 5 or later."""
    if path == "diverged":
        return float(run.status["status"] == "diverged")
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


def of_measurement(measurement: Measurement, measure: Measure) -> float:
    """A scalar, or one number of all units of a kind."""
    if measurement.status not in ("ok", "not_converged"):
        raise NoNumberError(f"{measurement.probe} {_WORDS[measurement.status]}: {measurement.reason}")
    if measure.scalar is not None:
        if measure.scalar not in measurement.scalars:
            hint = did_you_mean(measure.scalar, measurement.scalars)
            raise NoNumberError(f"{measurement.probe} has no scalar '{measure.scalar}' of this network.{hint}")
        return measurement.scalars[measure.scalar].value
    value = str(measure.value)
    rows = [row for row in measurement.units if measure.units in (None, row.kind) and value in row.values]
    if not rows:
        where = "any unit" if measure.units is None else f"a unit of kind {measure.units}"
        raise NoNumberError(f"{measurement.probe} has no '{value}' of {where}")
    rows.sort(key=lambda row: row.depth)
    numbers = [row.values[value].value for row in rows]
    if measure.magnitude:
        numbers = [abs(number) for number in numbers]
    if measure.over_units in ("stage_rise", "stage_step"):
        return over_stages(numbers, [row.stage for row in rows], measure.over_units)
    return over_units(numbers, measure.over_units)


def over_units(numbers: list[float], how: str) -> float:
    """One number of those of units in the order of their depth.

    Example:
        >>> over_units([0.1, 0.3, 0.2], "last"), over_units([0.1, 0.2, 0.4], "trend")
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


def over_stages(numbers: Sequence[float], stages: Sequence[int | None], how: str) -> float:
    """`stage_rise`: a stage's last number less its first; `stage_step`: its first less the last of the stage before.

    The mean over all stages that have one; NaN if none has.

    Example:
        >>> over_stages([1.0, 2.0, 4.0, 3.0, 4.0], [0, 0, 0, 1, 1], "stage_rise")
        2.0
        >>> over_stages([1.0, 2.0, 4.0, 3.0, 4.0], [0, 0, 0, 1, 1], "stage_step")
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


def training_seconds(run: Run) -> float:
    """What the steps of a run took, by its own record, however often it was interrupted."""
    size = run.recipe.batch_size
    rates = [row["timing"].get("images_per_second") for row in run.metrics if row["kind"] == "train"]
    return math.fsum(size / rate for rate in rates if rate)
