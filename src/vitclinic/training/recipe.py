"""A recipe: everything a training run needs, as a validated config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from vitclinic.config import Config
from vitclinic.data import DataConfig
from vitclinic.durations import Time
from vitclinic.training.optimizer import OptimizerConfig
from vitclinic.training.schedule import Duration, ScheduleConfig
from vitclinic.training.task import LossConfig
from vitclinic.treatments import Treatment, parse_treatments

SCHEMA = 1
"""Version of the recipe's meaning; it is part of every digest."""

DEFAULT_EPOCHS = 30
LENGTHS = ("epochs", "steps", "max_time")

Side = Annotated[int, Field(ge=1)]


class ModelConfig(Config):
    """`model` of a recipe: a name, and whatever keywords that network takes."""

    model_config = ConfigDict(extra="allow")
    main_key: ClassVar[str | None] = "name"

    name: str = Field("vit_tiny_fitted", description="any name of `vitclinic list models`")
    pretrained: bool = Field(False, description="start from timm's published weights")
    img_size: Side | Annotated[list[Side], Field(min_length=2, max_length=2)] | None = Field(
        None, description="pixels a side; the data's own unless given"
    )
    in_chans: Literal[1, 3] | None = Field(None, description="1 (grey) or 3; the data's own unless given")

    @property
    def keywords(self) -> dict[str, Any]:
        """What else goes to timm."""
        return dict(self.model_extra or {})


class CheckpointConfig(Config):
    """`checkpoint` of a recipe."""

    main_key: ClassVar[str | None] = "every"

    every: Duration = Field(1, description="epochs, 'n steps' or 'n%' between checkpoints")
    keep_epochs: list[int] = Field([], description="epochs whose checkpoints are kept as epoch-N; 0 is the start")


class ValidationConfig(Config):
    """`validation` of a recipe."""

    main_key: ClassVar[str | None] = "every"

    every: Duration = Field(1, description="epochs, 'n steps' or 'n%' between validations")


class LoggingConfig(Config):
    """`logging` of a recipe: says nothing about the result, so it is not part of the digest."""

    every: Annotated[int, Field(ge=1)] = Field(1, description="steps between rows of metrics.jsonl")
    tensorboard: bool = Field(False, description="also write TensorBoard events (an extra)")
    trajectory: Annotated[int, Field(ge=10)] | None = Field(
        None, description="size of a random projection of the weights kept of every epoch, for the probe `trajectory`"
    )


def _listed(value: Any) -> Any:
    """Pydantic's own sentences speak of its types, not of what to write."""
    entries = value if isinstance(value, list | tuple) else [None]
    for entry in entries:
        plain = isinstance(entry, Mapping) and all(
            options is None or isinstance(options, Mapping) for options in entry.values()
        )
        if not isinstance(entry, str) and not plain:
            raise ValueError("write a list, as in [sam] or [{sam: {rho: 0.1}}]")
    return value


class Recipe(Config):
    """All keys of a training run. Number of classes, channels and image size come from the data."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    treatments: Annotated[list[str | dict[str, Any]], BeforeValidator(_listed)] = Field(
        [], description="names, or {name: {option: value}}"
    )
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    epochs: Annotated[float, Field(gt=0)] | None = Field(
        None, description=f"passes over the training images; {DEFAULT_EPOCHS} unless steps or max_time is given"
    )
    steps: Annotated[int, Field(ge=1)] | None = Field(None, description="optimizer steps, in place of epochs")
    max_time: Time | None = Field(None, description="such as 30m, in place of epochs")
    batch_size: Annotated[int, Field(ge=1)] = Field(128, description="images a step, over all processes")
    accumulate: Annotated[int, Field(ge=1)] = Field(1, description="micro-batches that a batch is computed in")
    clip: Annotated[float, Field(gt=0)] | None = Field(1.0, description="largest gradient norm")
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(None, description="decay of averaged weights")
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    compile: bool = False
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    test: bool = Field(True, description="score the best checkpoint on the test images at the end")
    seed: int = 0
    out: str | None = Field(None, description="run directory; runs/DATA-MODEL-DIGEST unless given")
    workers: Annotated[int, Field(ge=0)] | None = Field(None, description="reading processes; chosen unless given")
    device: str = "auto"
    logging: LoggingConfig = LoggingConfig()

    @property
    def image_size(self) -> int | tuple[int, int] | None:
        """What `model.img_size` asks of the data."""
        size = self.model.img_size
        return (size[0], size[1]) if isinstance(size, list) else size

    unidentified: ClassVar[frozenset[str]] = frozenset({"out", "workers", "device", "logging"})
    """Keys that do not change what is computed, and so are no part of the digest."""

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        given = [key for key in LENGTHS if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of {', '.join(LENGTHS)}, not {' and '.join(given)}")
        if self.batch_size % self.accumulate:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of accumulate {self.accumulate}")
        return self

    def parsed_treatments(self) -> list[Treatment]:
        return parse_treatments(self.treatments)

    def plain(self) -> dict[str, Any]:
        """The recipe as plain data, without keys at their defaults, so that a new option orphans no stored run."""
        return self.model_dump(exclude_defaults=True, mode="json")

    def digest(self, data_digest: str) -> str:
        """SHA-256 of what determines the run's numbers."""
        identity = {key: value for key, value in self.plain().items() if key not in self.unidentified}
        identity.setdefault("data", {}).pop("source", None)  # the data's own digest stands for where it lies
        text = json.dumps([SCHEMA, identity, data_digest], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
