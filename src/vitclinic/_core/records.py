"""Records of measurements and their files: `NAME.json`, with its arrays in `NAME.npz`.

The JSON is strict and has a schema number; numbers that JSON does not know are written as the strings "nan",
"inf" and "-inf". The file of arrays is written first and the JSON contains its SHA-256, so that a pair that does not
belong together (an interrupted write) is detected. The JSON ends with a digest of itself: a number that was changed, by
a disk or by hand, is not shown as one that was measured. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from vitclinic._core.config import Config, validate
from vitclinic._core.errors import RecipeError, RunError
from vitclinic._core.io import is_unchanged, read_record, refuse_special, sign, write_bytes, write_errors, write_text
from vitclinic._core.registry import ProbeFacts

if TYPE_CHECKING:
    import plotly.graph_objects as go

SCHEMA = 1
SIGNED_SCHEMA = 2
"""Of files: as `SCHEMA`, with a `digest` of the record, without which such a file was changed."""

Status = Literal["ok", "not_converged", "does_not_apply", "failed"]


def _from_text(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else float(value) if type(value) is int else value


def _one_nan(value: float) -> float:
    """Return the same object for every NaN: containers compare by identity, so records of one result are then equal."""
    return math.nan if math.isnan(value) else value


def _to_text(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


Number = Annotated[
    float, BeforeValidator(_from_text), AfterValidator(_one_nan), PlainSerializer(_to_text, when_used="json")
]
"""A float that survives strict JSON, also where it is not finite."""


def plain_data(value: Any, where: str) -> Any:
    """Return `value` in terms of strict JSON, such that reading it back gives the same value.

    Tuples become lists, numpy numbers Python numbers, paths strings, and non-finite numbers strings. Other types raise
    a ValueError that names the place, `where`.

    Example:
        >>> plain_data({"a": (1, math.inf)}, "config")
        {'a': [1, 'inf']}
    """
    if isinstance(value, Mapping):
        return {str(key): plain_data(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item, f"{where}.{index}") for index, item in enumerate(value)]
    if isinstance(value, np.generic):
        return plain_data(value.item(), where)
    if isinstance(value, float):
        return _to_text(float(value))
    if isinstance(value, str | Path):  # also subclasses, such as torch's version
        return str(value)
    if value is None or isinstance(value, int):
        return value
    raise ValueError(f"'{where}' is of type {type(value).__name__}, which cannot be stored")


class Scalar(Config):
    """A number with, if it is an estimate, its interval (95% unless its probe says otherwise) and sample size."""

    value: Number
    low: Number | None = None
    high: Number | None = None
    n: int | None = None


class UnitRow(Config):
    """Values measured for one unit of the network's anatomy."""

    name: str
    kind: str
    stage: int
    depth: int
    values: dict[str, Scalar]
    note: str | None = None
    """A remark in a few words, such as how the unit was removed."""


class Provenance(Config):
    """Provenance of a measurement: what is needed to trust or to repeat it."""

    seed: int
    mode: str
    """`eval` or `train`: how the network's dropout and normalisation behaved."""
    device: str
    batch_size: int
    """The one actually used, after any halving when memory ran out."""
    duration: Number
    """Seconds; for a streaming probe, of the pass that it shared."""
    date: str
    versions: dict[str, str]
    images: int
    """The number of images available to measure on."""


class Measurement(Config):
    """Result of a probe for one subject on some data."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    probe: str
    revision: int = 1
    """Revision of the probe's definition: results of different revisions are not comparable."""
    config: dict[str, Any]
    subject: str
    """Digest of the network: its structure and its weights."""
    data: str
    """Digest of the images and labels it was measured on."""
    conditions: dict[str, Any] = Field(default_factory=dict)
    """Further conditions of the result: for timings, the machine."""
    status: Status = "ok"
    reason: str | None = None
    scalars: dict[str, Scalar] = Field(default_factory=dict)
    units: list[UnitRow] = Field(default_factory=list)
    arrays: dict[str, NDArray[Any]] = Field(default_factory=dict, exclude=True)
    provenance: Provenance
    facts: ProbeFacts | None = None
    """Facts about the probe, for reports; None if the measurement was stored by vitclinic 0.1."""
    _network: str = PrivateAttr("network")
    """Name of the network in figures; not stored."""

    @field_validator("config", "conditions", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        return plain_data(value, str(info.field_name))

    @field_validator("arrays")
    @classmethod
    def _storable(cls, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        if objects := [name for name, array in arrays.items() if array.dtype.hasobject]:
            raise ValueError(f"arrays of Python objects cannot be stored: {', '.join(objects)}")
        if odd := [name for name in arrays if "\0" in name]:
            raise ValueError(f"an array's name must not contain a zero byte: {odd[0]!r}")
        return arrays

    @model_validator(mode="after")
    def _says_why(self) -> Measurement:
        if self.status != "ok" and not self.reason:
            raise ValueError(f"a measurement that is {self.status} needs a reason")
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Measurement):
            return NotImplemented
        plain = [(name, getattr(self, name), getattr(other, name)) for name in Measurement.model_fields]
        return all(ours == theirs for name, ours, theirs in plain if name != "arrays") and _same_arrays(
            self.arrays, other.arrays
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def terms(self) -> tuple[Any, ...]:
        """Everything that a result depends on except the network: results with equal terms can be compared.

        The time limit of the probe (`budget`) is not included: a result that was cut off is marked as not converged.
        """
        options = {name: value for name, value in self.config.items() if name != "budget"}
        return self.probe, self.revision, options, self.data, self.conditions

    def with_name(self, network: str) -> Self:
        """Return the same measurement, whose figures name the network so."""
        named = self.model_copy()
        named._network = network
        return named

    def figure(self, name: str | None = None) -> go.Figure:
        """Return the figure that a report shows of the measurement.

        Args:
            name: Which one, if there are several; by default the first.

        Raises:
            RecipeError: If there is nothing to draw, or no figure of that name.
        """
        reports = import_module("vitclinic.reports")  # by its name, for reports are made of records
        shown = [reports.ExamView(self._network, {self.probe: self})]
        drawn: go.Figure = import_module("vitclinic.reports.figures").draw_figure(shown, self.probe, name)
        return drawn

    def plain(self) -> dict[str, Any]:
        """Return the record as strict JSON data, without the arrays."""
        return {"schema": SCHEMA, **self.model_dump(mode="json")}

    def write(self, path: Path) -> None:
        """Write the record to `path` (which ends in .json) and its arrays, if any, to the .npz beside it."""
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        record = self.plain()
        if self.arrays:
            content = _pack(self.arrays)
            write_bytes(path.with_suffix(".npz"), content)
            record["arrays"] = {"names": sorted(self.arrays), "sha256": hashlib.sha256(content).hexdigest()}
        record["schema"] = SIGNED_SCHEMA
        write_text(path, json.dumps(sign(record), indent=2, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> Measurement:
        """Read the measurement stored at `path`."""
        record = read_record(path, {}, "delete it to measure again")
        unchanged = is_unchanged(record)
        schema, digest = record.pop("schema", None), record.pop("digest", None)
        if schema not in (SCHEMA, SIGNED_SCHEMA):
            raise RunError(
                f"'{path}' is not a measurement of schema {SIGNED_SCHEMA}; update vitclinic, or delete it to measure"
                " again."
            )
        if not unchanged or (schema == SIGNED_SCHEMA and digest is None):
            raise RunError(f"'{path}' was changed since it was written; delete it to measure again.")
        listed = record.pop("arrays", None)
        arrays = {} if listed is None else _read_arrays(path, listed)
        try:
            return validate(cls, {**record, "arrays": arrays})
        except RecipeError as error:
            raise RunError(f"'{path}' is not a complete measurement: {error}") from error


def _pack(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the arrays as numpy.savez_compressed writes them, but with any names and with reproducible bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy")
            entry.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(entry, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)
    return buffer.getvalue()


def _unpack(content: bytes, name: str) -> NDArray[Any]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive, archive.open(f"{name}.npy") as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        return array


def _read_arrays(path: Path, listed: Any) -> dict[str, NDArray[Any]]:
    file = path.with_suffix(".npz")
    try:
        refuse_special(file)
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != listed["sha256"]:
            raise RunError(f"'{file}' does not belong to '{path.name}'; delete both to measure again.")
        return {name: _unpack(content, name) for name in listed["names"]}
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise RunError(f"The arrays of '{path}' cannot be read: {error}.") from error


def _same_arrays(ours: Mapping[str, NDArray[Any]], theirs: Mapping[str, NDArray[Any]]) -> bool:
    return ours.keys() == theirs.keys() and all(_same_array(ours[name], theirs[name]) for name in ours)


def _same_array(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))


Basis = Literal["reference network", "published range", "heuristic"]


class Suggestion(Config):
    """A treatment to try, and the reason."""

    treatment: str
    """Its name in `vitclinic list treatments`, or a change to the recipe, such as `data.augment=deit`."""
    paper: str
    """Source of the remedy, such as "Chen et al. 2022 (SAM)"."""
    why: str
    """One sentence."""
    command: str | None = None
    """What trains the network with it, where there is such a command."""


class Finding(Config):
    """Conclusion of a rule from the measurements of one network."""

    rule: str
    """Such as `over_smoothing`."""
    title: str
    """A few words: "Over-smoothed patches"."""
    severity: Literal["problem", "notice", "healthy"]
    statement: str
    """One or two sentences, with the numbers."""
    numbers: dict[str, Scalar]
    """The numbers it is based on, by PROBE.NAME (or `training.NAME`)."""
    threshold: str
    """The comparison, and the source of its threshold."""
    basis: Basis
    suggestions: tuple[Suggestion, ...] = ()
    again: str | None = None
    """The command that measures its numbers again, of the treated network too if there is one."""
