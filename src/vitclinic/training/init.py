"""The weights that a run starts from, `init` of its recipe: those of a run, of a library's network or of a file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitclinic._core.errors import ModelError, RecipeError
from vitclinic._core.sources import LIBRARIES
from vitclinic.data import ImageSpec
from vitclinic.data.decoding import Size
from vitclinic.models.filling import Adoption, adopt, convert, list_resampled, strip_prefix
from vitclinic.models.libraries import open_library
from vitclinic.models.vilt import MEAN, STD, convert_vilt, is_vilt, load_head
from vitclinic.models.weights import metadata, read_weights, split_key
from vitclinic.training.recipe import ModelConfig, Recipe
from vitclinic.training.run import Run, find_run
from vitclinic.treatments import Treatment, Treatments

_OF_THE_DATA = ("num_classes", "in_chans", "img_size", "image_size", "num_channels", "mean", "std")
"""Keywords of a network that the data of the new run decide."""
_SHOWN = 4
"""Names of tensors that a notice lists; the run's `init.json` has all."""


@dataclass(frozen=True)
class InitialWeights:
    """Weights to start from, and what is known of their network."""

    source: str
    state: dict[str, Tensor]
    """By the names of the network without its normalization; a file's may have prefixes."""
    statistics: tuple[list[float], list[float]] | None = None
    """Mean and standard deviation that the network normalizes with, if known."""
    model: Mapping[str, Any] | None = None
    """`model` of a recipe that builds the network, if known."""
    treatments: Treatments = field(default_factory=Treatments)
    """Those that changed the network."""
    classes: tuple[str, ...] | None = None
    """What the outputs of its head mean, if known."""
    size: Size | None = None
    """The size of the images that it was trained on, if known."""
    has_head: bool = True
    task_head: tuple[str, ...] = ()
    """Parts of the head that a task had put on the network; they are not loaded."""
    head: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights for the head of a task, by its names."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of names, shapes and numbers."""
        hashed = hashlib.sha256(repr(self.statistics).encode())
        for name, tensor in sorted({**self.state, **self.head}.items()):
            hashed.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            hashed.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        return hashed.hexdigest()

    def convert_for(self, network: nn.Module, spec: ImageSpec) -> dict[str, Tensor]:
        """Return the weights by the names and on the grid of an untreated network.

        Raises:
            ModelError: They are on a grid that cannot be resampled.
        """
        state = strip_prefix(self.state, network.state_dict(), Path(self.source))
        if self.size is not None and self.size != spec.img_size and self.size[0] != self.size[1]:
            raise ModelError(
                f"'{self.source}' was trained on {self.size[0]} x {self.size[1]} images, and positions are resampled"
                f" from square ones only; set model.img_size={list(self.size)}."
            )
        return convert(network, state)

    def load_into(self, network: nn.Module, state: dict[str, Tensor], classes: Sequence[str]) -> Loaded:
        """Put what `convert_for` returned into the treated network."""
        same = self.classes is None or self.classes == tuple(classes)
        found = adopt(network, state, self.source, head=self.has_head and same)
        return Loaded(self, found, list_resampled(self.state, state), len(classes))


@dataclass(frozen=True)
class Loaded:
    """Initial weights that a run has loaded."""

    init: InitialWeights
    found: Adoption
    resampled: Mapping[str, tuple[list[int], list[int]]]
    num_classes: int
    head: tuple[str, ...] = ()
    """Tensors of the task's head that were loaded."""
    unfit: tuple[str, ...] = ()
    """Sentences on those that were not."""

    def with_head(self, network: nn.Module) -> Loaded:
        """Load what there is for the head of a task, which is on the network now."""
        if not self.init.head:
            return self
        loaded, unfit = load_head(network, dict(self.init.head))
        return replace(self, head=tuple(loaded), unfit=tuple(unfit))

    @property
    def notices(self) -> list[str]:
        """Sentences for the user."""
        source, found = self.init.source, self.found
        total = len(found.loaded) + len(found.drawn)
        notices = [f"{len(found.loaded)} of the network's {total} tensors are those of {source}"]
        if not found.head:
            notices[0] += f", its head is new, for {self.num_classes} classes"
        for name, (before, after) in self.resampled.items():
            notices.append(f"{name} is resampled from {before} to {after}")
        drawn = [name for name in found.drawn if name not in found.head_names]
        if drawn:
            notices.append(f"not in {source}, so drawn at random: {_list_names(drawn)}")
        if found.unused:
            notices.append(f"not used of {source}: {_list_names(found.unused)}")
        if self.head:
            notices.append(f"of its task's head: {_list_names(self.head)}")
        notices += self.unfit
        if self.init.task_head:
            notices.append(f"left out of {source}, as its task's head: {', '.join(self.init.task_head)}")
        return notices

    def plain(self) -> dict[str, Any]:
        """Return it as plain data, for the run directory."""
        return {
            "source": self.init.source,
            "digest": self.init.digest,
            "loaded": list(self.found.loaded),
            "drawn": list(self.found.drawn),
            "unused": list(self.found.unused),
            "task_head": list(self.init.task_head),
            "resampled": dict(self.resampled),
        }


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def read_initial_weights(recipe: Recipe, random_weights: bool = False) -> InitialWeights | None:
    """Return the weights that `init` of a recipe names; None if it names none.

    Args:
        recipe: The recipe.
        random_weights: Draw those of a library's network, to plan a run without them.

    Raises:
        VitclinicError: There are no such weights, they cannot be read, or they are not those that the run began with.
    """
    source = recipe.init.source
    if source is None:
        return None
    found = find_run(source)
    if found is not None:
        init = _read_run(source, *found)
    elif source.partition(":")[0] in LIBRARIES:
        init = _read_library(source, random_weights)
    else:
        init = _read_file(source, describe=not _names_model(recipe))
    if recipe.init.digest not in (None, init.digest):
        raise RecipeError(f"The weights of '{source}' are not those that init.digest names: they have changed.")
    return init


def _read_run(source: str, folder: Path, checkpoint: str) -> InitialWeights:
    run = Run.open(folder)
    name = checkpoint or run.checkpoints.default()
    run.refuse_changed_files(name)
    state = run.checkpoints.read_model(name)
    recipe = run.recipe
    model = {"name": recipe.model.name, **recipe.model.keywords}
    structural = [
        written
        for treatment, written in zip(recipe.treatments, recipe.treatments.written, strict=True)
        if type(treatment).operate is not Treatment.operate
    ]
    weights = {name.removeprefix("backbone."): value for name, value in state.items() if name.startswith("backbone.")}
    parts = sorted({name.partition(".")[0] for name in weights})
    return InitialWeights(
        source,
        weights,
        (state["mean"].flatten().tolist(), state["std"].flatten().tolist()),
        model,
        Treatments(structural),
        tuple(run.data_facts["classes"]),
        run.spec.img_size,
        task_head=tuple(part for part in parts if part != "backbone") if "backbone" in parts else (),
    )


def _read_library(source: str, random_weights: bool = False) -> InitialWeights:
    opened = open_library(source, random_weights)
    network = opened.network
    keywords = {key: value for key, value in opened.keywords.items() if key not in _OF_THE_DATA}
    return InitialWeights(
        source,
        {name: value.detach().clone() for name, value in network.backbone.state_dict().items()},
        (network.mean.flatten().tolist(), network.std.flatten().tolist()),
        {"name": opened.name, **keywords},
        size=opened.size,
        has_head=not opened.drawn,
    )


def _read_file(source: str, describe: bool) -> InitialWeights:
    file, key = split_key(source)
    if not file.is_file():
        raise RecipeError(
            f"init '{source}' is neither a run directory nor a file of weights; write RUN[@CHECKPOINT], timm:NAME,"
            " torchvision:NAME, hf:NAME or FILE[#KEY]."
        )
    if describe and "timm" in metadata(file):  # it says what it is of
        return _read_library(f"timm:@{source}")
    state = read_weights(file, key).state
    if not is_vilt(state):
        return InitialWeights(source, state)
    backbone, head = convert_vilt(state)
    return InitialWeights(source, backbone, (MEAN, STD), has_head=False, head=head)


def _names_model(recipe: Recipe) -> bool:
    """Tell whether a recipe names a network; one at its default stands for the one that the weights are of."""
    default = ModelConfig()
    return recipe.model.name != default.name or recipe.model.keywords != default.keywords


def settle(recipe: Recipe, init: InitialWeights | None) -> tuple[Recipe, list[str]]:
    """Return the recipe with the digest of its initial weights and, unless it names one, with their network.

    Treatments that changed the network come along with it.

    Returns:
        The recipe, and what the user should know.
    """
    if init is None:
        return recipe, []
    update: dict[str, Any] = {"init": recipe.init.model_copy(update={"digest": init.digest})}
    notices = []
    if init.model is not None and not _names_model(recipe):
        ours = recipe.model.model_dump(include={"img_size", "in_chans"}, exclude_none=True)
        update["model"] = ModelConfig.model_validate({**init.model, **ours})
        notices.append(f"the network is that of {init.source}: {update['model'].name}")
        named = {treatment.name for treatment in recipe.treatments}
        entries = zip(init.treatments, init.treatments.written, strict=True)
        if added := [written for treatment, written in entries if treatment.name not in named]:
            update["treatments"] = Treatments([*added, *recipe.treatments.written])
            names = ", ".join(t.name for t in init.treatments if t.name not in named)
            notices.append(f"its treatments come with it: {names}")
    return recipe.model_copy(update=update), notices
