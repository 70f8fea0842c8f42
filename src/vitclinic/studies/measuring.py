"""The numbers that a study wants of a run: from its results, its metrics, and exams that are stored with it."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from vitclinic.clinic import examine
from vitclinic.errors import RecipeError, VitclinicError
from vitclinic.measurement import Measurement
from vitclinic.studies.study import Measure
from vitclinic.training import Run


def numbers_of(run: Run, measures: Mapping[str, Measure]) -> dict[str, float]:
    """Each measure's number; NaN where this run has none (it diverged, or a probe does not apply)."""
    found: dict[str, float] = {}
    measurements = _examined(run, measures)
    for name, measure in measures.items():
        if measure.when_diverged is not None and run.status["status"] == "diverged":
            chance = 1 / len(run.data_facts["classes"])
            found[name] = chance if measure.when_diverged == "chance" else measure.when_diverged
        elif name in measurements:
            found[name] = _scaled(of_measurement(measurements[name], measure), measure)
        elif measure.result is not None:
            found[name] = _scaled(of_result(run, measure.result), measure)
    for name, measure in measures.items():
        if measure.difference is not None:
            first, second = measure.difference
            found[name] = _scaled(found.get(first, math.nan) - found.get(second, math.nan), measure)
    return {name: found.get(name, math.nan) for name in measures}


def _examined(run: Run, measures: Mapping[str, Measure]) -> dict[str, Measurement]:
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
    done = {exam: _exam(run, exam[0], exam[1], probes) for exam, probes in exams.items()}
    return {name: done[exam][probe] for name, (exam, probe) in asked.items() if probe in done[exam]}


def _exam(run: Run, checkpoint: str, limit: int, probes: Mapping[str, Any]) -> Mapping[str, Measurement]:
    if checkpoint == "early":
        checkpoint = f"epoch-{early_epoch(run)}"
    try:
        return examine(f"{run.path}@{checkpoint}", probes=[{name: probes[name]} for name in probes], limit=limit)
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
    if measure.magnitude:
        number = abs(number)
    if not measure.log:
        return number
    return math.log10(number) if number > 0 else math.nan


def of_result(run: Run, path: str) -> float:
    """`diverged` is 1 or 0; `test.accuracy` the final result; `val.accuracy@5` of the first row at epoch 5 or later."""
    if path == "diverged":
        return float(run.status["status"] == "diverged")
    key, _, epoch = path.partition("@")
    kind, dot, field = key.partition(".")
    if not dot:
        raise RecipeError(f"'{path}' is no result: write diverged, test.accuracy, or val.accuracy@5 for an epoch.")
    if not epoch:
        return float(run.results.get(kind, {}).get(field, math.nan))
    rows = [row for row in run.metrics if row["kind"] == kind and row["epoch"] >= float(epoch)]
    value = rows[0].get(field) if rows else None
    return math.nan if value is None else float(value)


def of_measurement(measurement: Measurement, measure: Measure) -> float:
    """A scalar, or one number of all units of a kind."""
    if measurement.status not in ("ok", "not_converged"):
        return math.nan
    if measure.scalar is not None:
        scalar = measurement.scalars.get(measure.scalar)
        return math.nan if scalar is None else scalar.value
    value = str(measure.value)
    rows = [row for row in measurement.units if measure.units in (None, row.kind) and value in row.values]
    rows.sort(key=lambda row: row.depth)
    numbers = [row.values[value].value for row in rows]
    if measure.magnitude:
        numbers = [abs(number) for number in numbers]
    if measure.over_units in ("stage_rise", "stage_step"):
        return over_stages(numbers, [row.stage for row in rows], measure.over_units)
    return over_units(numbers, measure.over_units)


def over_units(numbers: list[float], how: str) -> float:
    """One number of those of units in the order of their depth."""
    if not numbers or any(math.isnan(number) for number in numbers):
        return math.nan
    if how == "trend":
        if len(numbers) < 2:
            return math.nan
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
