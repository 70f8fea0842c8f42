"""The recipe: everything a training run needs, as one validated config."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from vitclinic._core.config import SENTENCE, Settings
from vitclinic._core.errors import RecipeError
from vitclinic._core.time import Time
from vitclinic.data import DataConfig
from vitclinic.tasks import Classification, LossConfig, Task, parse_task
from vitclinic.training.drop_path import LateDropPathConfig
from vitclinic.training.optimizer import OptimizerConfig
from vitclinic.training.resizing import ResizingConfig
from vitclinic.training.schedule import Duration, ScheduleConfig, in_steps
from vitclinic.treatments import Treatment, Treatments

SCHEMA = 1
"""Version of what recipes mean; part of every digest."""

DEFAULT_EPOCHS = 30
LENGTHS = ("epochs", "steps", "max_time")

Side = Annotated[int, Field(ge=1, le=2**16)]
T = TypeVar("T")


_COUNTS = {"depth": 2**10, "embed_dim": 2**16, "num_heads": 2**12, "patch_size": 2**12}
"""Keywords of networks that count something, and far more than anybody has trained; `hybrid_vit` without attention has
depth 0."""
_ELSEWHERE = {"checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}
"""Keywords by which timm reads weights that no digest would know of."""
_WIDEST_MLP = 1024
_MOST_WEIGHTS = 10**12
"""Of the blocks of a transformer: ten times those of the largest vision transformers."""


class ModelConfig(Settings):
    """`model` of a recipe: a name, and any keywords that the network takes."""

    model_config = ConfigDict(extra="allow")
    main_key: ClassVar[str | None] = "name"

    name: str = Field(
        "vit_tiny_fitted", description="any name of `vitclinic list models`, `torchvision:NAME` or `hf:TYPE`"
    )
    pretrained: bool = Field(False, description="start from timm's published weights")
    img_size: Side | Annotated[list[Side], Field(min_length=2, max_length=2)] | None = Field(
        None, description="pixels per side; the data's own unless given"
    )
    in_chans: Literal[1, 3] | None = Field(None, description="1 (grey) or 3; the data's own unless given")

    @model_validator(mode="after")
    def _keywords_make_a_network(self) -> ModelConfig:
        """Refuse values that timm takes in silence and that make no network, or one that nobody means."""
        for key, value in self.keywords.items():
            if key in _ELSEWHERE:
                raise ValueError(f"'{key}' is no keyword of a network: write init=FILE for the weights of a file")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"'{key}' must be a finite number (got {value})")
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            if key.endswith(("drop_rate", "drop_path_rate", "drop_prob")) and not 0 <= value < 1:
                raise ValueError(f"'{key}' is a share, from 0 to below 1 (got {value})")
            least = 0 if key == "depth" and self.name.startswith("hybrid_vit") else 1
            if key in _COUNTS and value < least:
                raise ValueError(f"'{key}' must be at least {least} (got {value})")
            if value > _COUNTS.get(key, math.inf):
                raise ValueError(f"'{key}' must be at most {_COUNTS[key]} (got {value:g})")
        self._check_widths()
        return self

    def _check_widths(self) -> None:
        """Refuse MLPs without a hidden neuron, which compute nothing, and networks that no machine holds."""
        width = self.keywords.get("embed_dim", 1)
        for key in ("mlp_ratio", "mlp_ratios"):
            given = self.keywords.get(key, 1)
            for ratio in given if isinstance(given, list | tuple) else [given]:
                if not isinstance(ratio, int | float) or isinstance(ratio, bool):
                    continue
                if not 0 < ratio <= _WIDEST_MLP:
                    raise ValueError(f"'{key}' must be above 0 and at most {_WIDEST_MLP} (got {ratio:g})")
                if isinstance(width, int) and "embed_dim" in self.keywords and int(width * ratio) < 1:
                    raise ValueError(f"'{key}' {ratio:g} leaves an MLP of {width} channels no hidden neuron")
        depth = self.keywords.get("depth", 1)
        if isinstance(width, int) and isinstance(depth, int) and 12 * depth * width**2 > _MOST_WEIGHTS:
            raise ValueError(f"'depth' {depth} with 'embed_dim' {width} is a network too large for any machine")

    @property
    def keywords(self) -> dict[str, Any]:
        """The remaining keywords, passed on to timm."""
        return dict(self.model_extra or {})


class InitConfig(Settings):
    """`init` of a recipe: the weights to start from."""

    main_key: ClassVar[str | None] = "source"

    source: str | None = Field(
        None,
        description="weights to start from: RUN[@CHECKPOINT], timm:NAME, torchvision:NAME, hf:NAME, or FILE[#KEY]",
    )
    digest: str | None = Field(None, description="SHA-256 of these weights; noted when the run starts")

    @model_validator(mode="after")
    def _check_source(self) -> InitConfig:
        if self.digest is not None and self.source is None:
            raise ValueError("'digest' is that of the weights that 'source' names; give it, too")
        return self


def _check_interval(value: str | int | float) -> str | int | float:
    if in_steps(value, 1, 1) == 0:
        raise ValueError("write '1 steps' for after every step, or '100%' for at the end alone")
    return value


Interval = Annotated[Duration, AfterValidator(_check_interval)]


class CheckpointConfig(Settings):
    """`checkpoint` of a recipe."""

    main_key: ClassVar[str | None] = "every"

    every: Interval = Field(1, description="epochs, 'n steps' or 'n%' between checkpoints")
    keep_epochs: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="epochs whose checkpoints are kept as epoch-N; 0 is the start"
    )


class ValidationConfig(Settings):
    """`validation` of a recipe."""

    main_key: ClassVar[str | None] = "every"

    every: Interval = Field(1, description="epochs, 'n steps' or 'n%' between validations")


class LoggingConfig(Settings):
    """`logging` of a recipe; it does not affect the result, so it is not part of the digest."""

    every: Annotated[int, Field(ge=1)] = Field(1, description="steps between rows of metrics.jsonl")
    samples: Annotated[int, Field(ge=0, le=64)] = Field(
        0, description="how many training images to keep a picture of, samples.png, as the network sees them"
    )
    tensorboard: bool = Field(False, description="also write TensorBoard events (an extra)")
    wandb: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="a project of Weights & Biases to log to; offline unless WANDB_MODE says otherwise (an extra)"
    )
    mlflow: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="an experiment of MLflow to log to, at MLFLOW_TRACKING_URI (an extra)"
    )
    trackio: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="a project of trackio to log to (an extra)"
    )
    trajectory: Annotated[int, Field(ge=10, le=1_000_000)] | None = Field(
        None, description="size of a random projection of the weights, recorded every epoch for the probe `trajectory`"
    )


def _parse_treatments(value: Any) -> Treatments:
    if isinstance(value, Treatments):
        return value
    for entry in value if isinstance(value, list | tuple) else [None]:
        plain = isinstance(entry, Mapping) and all(
            options is None or isinstance(options, Mapping) for options in entry.values()
        )
        if not isinstance(entry, str | Treatment) and not plain:
            raise ValueError("write a list, as in [sam] or [{sam: {rho: 0.1}}]")
    return _with_sentences(Treatments, value)


def _parse_task(value: Any) -> Task:
    return _with_sentences(parse_task, value)


def _with_sentences(parse: Callable[[Any], T], value: Any) -> T:
    """Parse a part of the recipe, reporting its error alongside those of the other keys."""
    try:
        return parse(value)
    except RecipeError as error:
        raise PydanticCustomError(SENTENCE, "{sentence}", {"sentence": str(error)}) from error


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _write_task(task: Task) -> str | dict[str, Any]:
    return task.plain()


def _write_treatments(treatments: Treatments) -> list[str | dict[str, Any]]:
    return treatments.written


class Recipe(Settings):
    """All settings of a training run, validated; unknown keys are errors. docs/train.md lists every key.

    The number of classes, the channels and the image size come from the data unless `model` sets them. Build one with
    `build_recipe`, which also reads names, files and overrides.

    Example:
        >>> recipe = Recipe(data="digits", epochs=2, treatments=["sam"])
        >>> recipe.data.source, recipe.optimizer.lr, recipe.treatments[0].rho
        ('digits', 0.001, 0.1)
    """

    model: ModelConfig = ModelConfig()
    init: InitConfig = InitConfig()
    data: DataConfig = DataConfig()
    treatments: Annotated[Treatments, PlainValidator(_parse_treatments), PlainSerializer(_write_treatments)] = Field(
        Treatments(), description="names, or {name: {option: value}}"
    )
    task: Annotated[Task, PlainValidator(_parse_task), PlainSerializer(_write_task)] = Field(
        Classification(), description="what to learn: a name, or {name: ..., option: value}"
    )
    loss: LossConfig = Field(LossConfig(), description="for the task classification")
    optimizer: OptimizerConfig = OptimizerConfig()
    layer_decay: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="factor on the learning rate of each block, from the head down"
    )
    head_lr: Annotated[float, Field(gt=0)] | None = Field(
        None, description="peak learning rate of the classifier; that of the optimizer unless given"
    )
    freeze: Annotated[list[str], BeforeValidator(_as_list)] = Field(
        [], description="units or blocks of `vitclinic anatomy` that are not trained, or `backbone`"
    )
    schedule: ScheduleConfig = ScheduleConfig()
    progressive_resizing: ResizingConfig = ResizingConfig()
    late_drop_path: LateDropPathConfig = LateDropPathConfig()
    epochs: Annotated[float, Field(gt=0, le=10**6)] | None = Field(
        None, description=f"passes over the training images; {DEFAULT_EPOCHS} unless steps or max_time is given"
    )
    steps: Annotated[int, Field(ge=1, le=10**12)] | None = Field(None, description="optimizer steps, instead of epochs")
    max_time: Time | None = Field(None, description="a time such as 30m, instead of epochs")
    batch_size: Annotated[int, Field(ge=1, le=2**20)] = Field(128, description="images per step, over all processes")
    accumulate: Annotated[int, Field(ge=1)] = Field(1, description="number of micro-batches a batch is split into")
    clip: Annotated[float, Field(gt=0)] | None = Field(1.0, description="maximum gradient norm")
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="decay of averaged weights (off unless given)"
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    compile: bool = False
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    test: bool = Field(True, description="score the best checkpoint on the test images at the end")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    out: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="run directory; runs/DATA-MODEL-DIGEST unless given"
    )
    workers: Annotated[int, Field(ge=0, le=256)] | None = Field(None, description="processes that read images")
    device: str = "auto"
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp", description="several processes: each a copy of the network, or fsdp: each a part of every weight"
    )
    logging: LoggingConfig = LoggingConfig()

    @property
    def image_size(self) -> int | tuple[int, int] | None:
        """The size images are read at, from `model.img_size`; None leaves it to the data."""
        size = self.model.img_size
        return (size[0], size[1]) if isinstance(size, list) else size

    unidentified: ClassVar[frozenset[str]] = frozenset({"out", "workers", "device", "parallel", "logging"})
    """Keys that do not change what is computed and are left out of the digest."""

    @model_validator(mode="before")
    @classmethod
    def _take_data_of_task(cls, values: Any) -> Any:
        """Let the task say what its images come with and, if no data is named, where they are from."""
        if not isinstance(values, Mapping) or "task" not in values:
            return values
        try:
            task = parse_task(values["task"])
        except RecipeError:  # told with the errors of other keys
            return values
        data = DataConfig.expand(values.get("data") or {})
        if task.target == "class" or not isinstance(data, Mapping):
            return values
        return {**values, "data": {"source": task.default_source, "target": task.target, **data}}

    @model_validator(mode="after")
    def _check_consistency(self) -> Recipe:
        given = [key for key in LENGTHS if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of {', '.join(LENGTHS)}, not {' and '.join(given)}")
        if self.batch_size % self.accumulate:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of accumulate {self.accumulate}")
        if self.init.source is not None and self.model.pretrained:
            raise ValueError("give init or model.pretrained, not both: each says which weights to start from")
        self._check_task()
        return self

    def _check_task(self) -> None:
        task = self.task
        if not isinstance(task, Classification) and self.loss != LossConfig():
            raise ValueError(f"'loss' is only for the task classification; the options of {task.name} go under 'task'")
        if isinstance(task, Classification) and "loss" in task.model_fields_set:
            raise ValueError("write 'loss' instead of 'task.loss': the loss is a top-level key of the recipe")
        if self.data.target != task.target:
            raise ValueError(
                f"the task {task.name} learns from a data.target of {task.target}, not {self.data.target}: remove it"
            )
        for treatment in self.treatments:
            fitting = treatment.fitting_tasks()
            if fitting is not None and task.name not in fitting:
                named = treatment.name if treatment.tasks == fitting else f"{treatment.name} with these options"
                raise ValueError(f"the treatment {named} is for {' or '.join(fitting)}, not for the task {task.name}")
        task.check(self)

    @property
    def resolved_task(self) -> Task:
        """The task to train, with the recipe's `loss` if it takes one."""
        return self.task.model_copy(update={"loss": self.loss}) if isinstance(self.task, Classification) else self.task

    def add_treatments(self, entries: Sequence[Any]) -> Recipe:
        """Return a copy with more treatments appended."""
        return self.model_copy(update={"treatments": Treatments([*self.treatments.written, *entries])})

    def plain(self) -> dict[str, Any]:
        """Return plain data without the keys at their defaults, so that a new option does not change old digests."""
        return self.model_dump(exclude_defaults=True, mode="json")

    def digest(self, data_digest: str) -> str:
        """Return the SHA-256 of everything that determines the run's numbers."""
        identity = {key: value for key, value in self.plain().items() if key not in self.unidentified}
        identity.setdefault("data", {}).pop("source", None)  # identified by the data's digest, not by its path
        if self.init.digest is not None:
            identity["init"].pop("source")
        if isinstance(self.task, Classification) and self.task.token_labels and self.task.token_labels.digest:
            identity["task"]["token_labels"].pop("source")
        text = json.dumps([SCHEMA, identity, data_digest], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
