"""Made exams: measurements with the numbers that a test wants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vitclinic._core.records import Measurement, Provenance, Scalar, UnitRow

Ends = tuple[float, float] | float
"""An interval, its middle being the value; or a number without one."""


def number(ends: Ends) -> Scalar:
    if not isinstance(ends, tuple):
        return Scalar(value=float(ends))
    return Scalar(value=float(sum(ends) / 2), low=float(ends[0]), high=float(ends[1]), n=100)


def measured(probe: str, scalars: Mapping[str, Ends], units: Mapping[str, Any] = {}, **fields: Any) -> Measurement:
    """`units` is {name: (kind, {value: ends})}."""
    rows = [
        UnitRow(name=name, kind=kind, stage=0, depth=depth, values={key: number(ends) for key, ends in values.items()})
        for depth, (name, (kind, values)) in enumerate(units.items())
    ]
    provenance = Provenance(
        seed=0, mode="eval", device="cpu", batch_size=8, duration=1.0, date="2026-11-16", versions={}, images=100
    )
    return Measurement(
        **{
            "probe": probe,
            "config": {},
            "subject": "a" * 64,
            "data": "b" * 64,
            "scalars": {name: number(ends) for name, ends in scalars.items()},
            "units": rows,
            "provenance": provenance,
            **fields,
        }
    )


def exam(**probes: Mapping[str, Ends]) -> dict[str, Measurement]:
    """`exam(sharpness={"lambda_max": (800, 810)})`; a probe's units are under `units`."""
    made = {}
    for probe, values in probes.items():
        scalars = {name: ends for name, ends in values.items() if name != "units"}
        made[probe] = measured(probe, scalars, values.get("units", {}))  # type: ignore[arg-type]
    return made


def without_numbers(measurements: Mapping[str, Measurement]) -> dict[str, Measurement]:
    """The same with NaN in the place of every number."""
    nan = Scalar(value=math.nan, low=math.nan, high=math.nan)
    return {
        name: measurement.model_copy(
            update={
                "scalars": dict.fromkeys(measurement.scalars, nan),
                "units": [
                    row.model_copy(update={"values": dict.fromkeys(row.values, nan)}) for row in measurement.units
                ],
            }
        )
        for name, measurement in measurements.items()
    }


def changed(measurements: Mapping[str, Measurement], **fields: Any) -> dict[str, Measurement]:
    """The same with other fields, such as `status`."""
    return {name: measurement.model_copy(update=fields) for name, measurement in measurements.items()}


def transformer(similarity: Ends, rise: Ends, kind: str = "msa") -> dict[str, Any]:
    units = {f"blocks.{i}": (kind if i % 2 == 0 else "mlp", {"absolute_cosine": similarity}) for i in range(4)}
    return {"absolute_cosine_last": similarity, "absolute_cosine_rise": rise, "units": units}


def layers(kind: str, value: str, *ends: Ends) -> dict[str, Any]:
    units = {f"blocks.{i}.{kind}": (kind, {value: layer}) for i, layer in enumerate(ends)}
    return {value: ends[0], "units": units}


def steps(losses: list[float | None], lr: float = 0.01) -> list[dict[str, Any]]:
    """The rows of a training."""
    return [
        {"kind": "train", "step": i + 1, "epoch": 0, "loss": loss, "losses": {}, "lr": lr, "grad_norm": 1.0}
        for i, loss in enumerate(losses)
    ]


def validations(losses: list[float | None]) -> list[dict[str, Any]]:
    return [{"kind": "val", "step": i, "epoch": i, "loss": nll, "nll": nll, "lr": 0.0} for i, nll in enumerate(losses)]
