"""TARGETs: what can be examined, from what a user wrote; and the images to examine it on.

    runs/photos            a run directory (its best checkpoint); runs/photos@epoch-3 for another
    timm:NAME              with the published weights; timm:NAME@FILE with a checkpoint's, or timm:NAME@FILE#KEY with
                           those that a checkpoint has under KEY, such as state_dict_ema
    torchvision:NAME[@FILE], hf:NAME
    module:function        a function that returns a network taking pixels in [0, 1]

Keywords for the network follow its name: timm:vit_tiny_patch16_224?img_size=32&patch_size=4. The images that
networks are examined on are opened once for all networks that see them alike (`ExamData`).
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vitclinic._core.callback import Callback
from vitclinic._core.config import validate
from vitclinic._core.distributed import Distributed
from vitclinic._core.errors import ModelError, RecipeError
from vitclinic._core.io import fingerprint
from vitclinic._core.sources import LIBRARIES
from vitclinic.data import DataConfig, Dataset, Normalization, load_batches, open_data
from vitclinic.data.decoding import Size
from vitclinic.exam.request import advise, check_target
from vitclinic.models import Normalized
from vitclinic.models.input_sizes import check_ready
from vitclinic.models.libraries import fix_seed, open_library
from vitclinic.probes import PastWeights, Subject, Training
from vitclinic.probes.loading import Data, is_loader, name_classes
from vitclinic.training import Checkpoint, Run, load_model
from vitclinic.training.callbacks import read_projections
from vitclinic.training.network import adapt_augmentation
from vitclinic.training.optimizer import weight_decay_parameters
from vitclinic.training.run import find_run

log = logging.getLogger(__name__)

Target = str | Path | Run | Checkpoint | nn.Module
"""What can be examined."""


@dataclass(frozen=True)
class Network:
    """A network that has not met its images yet, and what these must be where that is not left to the data."""

    name: str
    network: nn.Module
    size: Size | None = None
    channels: int | None = None
    run: Run | None = None
    drawn: tuple[str, ...] = ()
    """The classifier's parameters, if they were drawn at random."""

    @property
    def data(self) -> DataConfig | None:
        """The data that a run was trained on."""
        return None if self.run is None else self.run.recipe.data

    @property
    def output_names(self) -> tuple[str, ...] | None:
        """The classes that a run's outputs mean, in their order."""
        return None if self.run is None else tuple(self.run.data_facts["classes"])

    @property
    def training(self) -> Training | None:
        """The augmentation, weight decay and earlier weights of a run."""
        if self.run is None or not isinstance(self.network, Normalized):
            return None
        recipe = self.run.recipe
        augment, _ = adapt_augmentation(recipe, self.network.trunk, self.run.spec)
        decayed = {id(parameter) for parameter in weight_decay_parameters(self.network)}
        names = frozenset(name for name, p in self.network.named_parameters() if id(p) in decayed)
        return Training(augment, recipe.optimizer.weight_decay, names, past_weights(self.run))


def open_subject(
    target: Target,
    open_dataset: Callable[[Network], Dataset],
    *,
    device: torch.device,
    random_weights: bool = False,
    normalization: Normalization | None = None,
    **options: Any,
) -> Subject:
    """Return the subject that a target names.

    Args:
        target: A network, which stays as it is, or whatever names one; that is then in eval mode on `device`.
        open_dataset: Opens the images for a network.
        device: Where to put the network.
        random_weights: Do not ask for pretrained weights of a library's network.
        normalization: What the input of a network given as a module is normalized by, if it does not do it itself.
        options: Other arguments of `Subject`.
    """
    found = resolve(target, device, random_weights)
    dataset = open_dataset(found)
    network = found.network if normalization is None else Normalized(found.network, *normalization)
    return Subject(
        network,
        name_classes(dataset, network, options.get("output")),
        name=found.name,
        output_names=found.output_names,
        training=found.training,
        run=found.run,
        drawn=found.drawn,
        **options,
    )


def resolve(target: Target, device: torch.device, random_weights: bool = False) -> Network:
    """Return the network that a target names, in eval mode on `device`; one given as such stays as it is."""
    if isinstance(target, nn.Module):
        check_ready(target, type(target).__name__)
        return Network(type(target).__name__, target)
    if isinstance(target, Checkpoint):
        found = _run(str(target), target.run.path, target.name)
    else:
        found = _resolve(str(target.path if isinstance(target, Run) else target), random_weights)
    check_ready(found.network, found.name)
    found.network.eval().to(device)
    return found


def _resolve(text: str, random_weights: bool) -> Network:
    check_target(text)
    found = find_run(text)
    if found is not None and random_weights:
        raise RecipeError(
            f"'{text}' is a run, and `random_weights` is for networks of libraries; for its untrained network, train"
            " with checkpoint.keep_epochs=[0] and examine RUN@epoch-0."
        )
    if found is not None:
        return _run(text, *found)
    library, _, rest = text.partition(":")
    if library in LIBRARIES:
        opened = open_library(text, random_weights)
        if opened.drawn:
            log.warning(
                "The weights of %s have no classifier of this size. It is drawn at random (%s), and what needs labels"
                " is not measured.",
                text,
                ", ".join(opened.drawn),
            )
        return Network(text, opened.network, opened.size, len(opened.network.mean), drawn=opened.drawn)
    network = _call(text, library, rest)
    return Network(text, network, channels=_channels(network))


def _run(text: str, folder: Path, checkpoint: str) -> Network:
    run = Run.open(folder)
    height, width = run.data_facts["size"]
    return Network(text, load_model(folder, checkpoint or None), (height, width), run.data_facts["channels"], run)


def _call(text: str, module: str, function: str) -> nn.Module:
    if module.endswith(".py"):
        meant = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise RecipeError(f"'{text}' is not a target: a module has no '.py', write '{meant}:{function}'.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` would: the module is most often a file right here
    try:
        imported = importlib.import_module(module)
    except (ModuleNotFoundError, TypeError) as error:  # a TypeError: a relative name, such as ./nets
        raise RecipeError(f"'{text}' is not a target: {error}; {advise(text)}") from error
    except Exception as error:  # the user's own code may raise anything
        raise ModelError(f"'{text}' cannot be imported: {type(error).__name__}: {error}.") from error
    if not hasattr(imported, function):
        raise RecipeError(f"'{text}': the module {module} has no '{function}'.")
    try:
        with fix_seed():
            network = getattr(imported, function)()
    except Exception as error:  # the user's own code may raise anything
        raise ModelError(f"'{text}' raised {type(error).__name__}: {error}.") from error
    if not isinstance(network, nn.Module):
        raise ModelError(f"'{text}' returned {type(network).__name__}; expected a torch.nn.Module.")
    return network


def _channels(network: nn.Module) -> int | None:
    """Grey or coloured images, by the network's first convolution; None where that does not tell."""
    first = next((module for module in network.modules() if isinstance(module, nn.Conv2d)), None)
    return first.in_channels if first is not None and first.in_channels in (1, 3) else None


def past_weights(run: Run) -> PastWeights:
    """Return the weights of the checkpoints epoch-N and `last`, and the projections of `logging.trajectory`."""
    names = {float(match[1]): name for name in run.checkpoints.names() if (match := re.fullmatch(r"epoch-(\d+)", name))}
    if "last" in run.checkpoints.names():
        names[_epochs_done(run)] = "last"
    names = dict(sorted(names.items()))

    def digest() -> str:
        checksums = [run.checkpoints.model_checksum(name) for name in names.values()]
        return fingerprint(checksums, {step: row.tolist() for step, (_, row) in read_projections(run.path).items()})

    return PastWeights(
        weights={epoch: partial(run.checkpoints.read_model, name) for epoch, name in names.items()},
        projections=partial(_projections, run),
        digest=digest,
        finished=run.status["status"] == "finished",
    )


def _epochs_done(run: Run) -> float:
    """Return how many epochs the checkpoint `last` has seen."""
    return float(run.status["step"] * run.recipe.batch_size / run.data_facts["counts"]["train"])


def _projections(run: Run) -> dict[float, NDArray[np.float64]]:
    return dict(read_projections(run.path).values())


class ExamData:
    """The user's data, for networks of different sizes, channels and origins."""

    def __init__(
        self,
        data: Data | None,
        *,
        size: int | None,
        limit: int | None,
        normalized: bool | None,
        distributed: Distributed,
        callback: Callback,
    ) -> None:
        """Note the data; nothing is read yet.

        Args:
            data: As in `examine`; None stands for what each run was trained on.
            size: Pixels a side for networks that take any.
            limit: Read no more than so many images of a loader.
            normalized: The loader's images are, or are not, normalized.
            distributed: The leading process decodes a source first, and the others find it decoded.
            callback: Hears of reading.
        """
        self.data = str(data) if isinstance(data, Path) else data
        self.size, self.limit, self.normalized = size, limit, normalized
        self.distributed, self.callback = distributed, callback
        self._open_source = cache(self._open_uncached)
        self._loaded: dict[Any, Dataset] = {}

    def open(self, network: Network, normalization: Normalization | None = None) -> Dataset:
        """Return the images for a network, as many pixels and channels as it takes.

        Raises:
            RecipeError: If there is no data: none was given, and the network is not a run's.
        """
        data = self.data if self.data is not None else network.data
        if data is None:
            raise RecipeError(f"Say on which images to examine '{network.name}': give `data` (only a run has its own).")
        if is_loader(data):
            return self._read_loader(data, normalization)
        if isinstance(data, Dataset):
            return data
        if isinstance(data, str) and network.data is not None and _is_same_place(data, network.data.source):
            data = network.data  # with the run's own splits: its test images are then those it has not seen
        target = "class" if network.data is None else network.data.target
        config = (
            data
            if isinstance(data, DataConfig)
            else validate(DataConfig, {"source": str(data), "target": target}, where="data")
        )
        size = network.size if network.size is not None else self.size and (self.size, self.size)
        return self._open_source(config.model_dump_json(), size or None, network.channels)

    def _read_loader(self, data: Any, normalization: Normalization | None) -> Dataset:
        """Read a loader once for all networks whose input is normalized alike."""
        key = None if normalization is None else (tuple(normalization.mean), tuple(normalization.std))
        if key not in self._loaded:
            self._loaded[key] = load_batches(
                data, limit=self.limit, normalization=normalization, normalized=self.normalized
            )
        return self._loaded[key]

    def _open_uncached(self, config: str, size: Size | None, channels: int | None) -> Dataset:
        source = DataConfig.model_validate_json(config)
        opened = partial(open_data, source, size=size, channels=channels, progress=self.callback.on_progress)
        return self.distributed.leader_first(opened)


def _is_same_place(one: str, other: str) -> bool:
    return one == other or Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


def name_target(target: Target) -> str:
    """Return the name to show for a target before it is opened."""
    if isinstance(target, nn.Module):
        return type(target).__name__
    return str(target.path if isinstance(target, Run) else target)
