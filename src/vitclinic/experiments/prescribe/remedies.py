"""Remedies: changes of a recipe that may help on few images, in the order in which they are tried.

A remedy is a name that a reader understands and plain overrides of a recipe: a treatment, a network, a learning rate.
`TABLE` has those that are tried unless others are named; whatever is not in it can be named, too. Nothing here imports
torch: `vitclinic list remedies` and a mistyped name do not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from vitclinic import list_models
from vitclinic._core.errors import RecipeError, did_you_mean
from vitclinic.training.optimizer import OptimizerConfig
from vitclinic.training.overrides import build_recipe, merge, nest, parse_word, to_plain
from vitclinic.training.recipe import LENGTHS, Recipe
from vitclinic.treatments.treatment import TREATMENTS

Entry = str | Mapping[str, Any]
"""A treatment as a recipe lists it; or a remedy by its name, as `key=value`, or as {name: overrides}."""


@dataclass(frozen=True)
class Remedy:
    """One change of a recipe, under a name of its own.

    Example:
        >>> remedy = make_remedy("wide", {"model.embed_dim": 192, "treatments": ["gap_head"]})
        >>> sorted(remedy.keys), remedy.apply(build_recipe()).model.embed_dim
        (['model.embed_dim', 'treatments.gap_head'], 192)
    """

    name: str
    overrides: Mapping[str, Any]
    """Nested plain data, as in a recipe file; treatments in it are added to the recipe's own."""

    @property
    def keys(self) -> frozenset[str]:
        """The recipe's keys that it sets, such as `optimizer.lr`, and its treatments, such as `treatments.sam`."""
        settings = {key: value for key, value in self.overrides.items() if key != "treatments"}
        added = (f"treatments.{_treatment_name(entry)}" for entry in self.overrides.get("treatments", ()))
        return frozenset([*(key for key, _ in flatten(settings)), *added])

    def apply(self, recipe: Recipe) -> Recipe:
        """Return the changed recipe. Another network replaces all of the old one's keywords and sees the same images.

        Raises:
            RecipeError: The recipe does not take the change.
        """
        changes = {key: value for key, value in self.overrides.items() if key != "treatments"}
        if _network(changes) not in (None, recipe.model.name):
            seen = recipe.model.model_dump(include={"img_size", "in_chans"}, exclude_none=True)
            changes["model"] = {**seen, **changes["model"]}
        changed = build_recipe(recipe, changes) if changes else recipe
        return changed.add_treatments(self.overrides.get("treatments", ()))


def flatten(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested plain data with dotted keys.

    Example:
        >>> list(flatten({"optimizer": {"lr": 0.1}, "ema": None}))
        [('optimizer.lr', 0.1), ('ema', None)]
    """
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _network(overrides: Mapping[str, Any]) -> str | None:
    name: str | None = overrides.get("model", {}).get("name")
    return name


_SAME = (*LENGTHS, "task", "validation", "checkpoint", "test", "seed", "out", "workers", "device", "logging", "compile")
_SAME_IMAGES = ("img_size", "in_chans")


def make_remedy(name: str, overrides: Mapping[str, Any]) -> Remedy:
    """Return a remedy from overrides as `build_recipe` takes them.

    Raises:
        RecipeError: It would change what all arms have in common: images, task, time and how they are scored.
    """
    tree: dict[str, Any] = {}
    for key, value in overrides.items():
        tree = merge(Recipe, tree, nest(key, to_plain(value)))
    shared = [key for key in tree if key in _SAME]
    shared += [f"data.{key}" for key in tree.get("data", {}) if key != "augment"]
    shared += [f"model.{key}" for key in tree.get("model", {}) if key in _SAME_IMAGES]
    if shared:
        raise RecipeError(
            f"The remedy '{name}' changes {' and '.join(shared)}, which all arms have in common: change the recipe."
        )
    return Remedy(name, tree)


@dataclass(frozen=True, eq=False)
class KnownRemedy:
    """An entry of the table: what it changes in words, and its overrides, which may depend on the recipe."""

    name: str
    changes: str
    overrides: Mapping[str, Any] | Callable[[Recipe], Mapping[str, Any]]
    """None of them where the recipe has it already."""

    def propose(self, recipe: Recipe) -> Remedy:
        """Return the remedy, whether or not it can be applied."""
        return make_remedy(self.name, self.overrides(recipe) if callable(self.overrides) else self.overrides)

    def make(self, recipe: Recipe) -> Remedy | None:
        """Return the remedy for a recipe; None if it changes nothing there, or needs what is not installed."""
        remedy = self.propose(recipe)
        if (
            not _is_there(remedy)
            or _has_treatments(recipe, remedy)
            or (recipe.model.pretrained and _network(remedy.overrides))
        ):
            return None  # published weights are those of one network
        return remedy if remedy.apply(recipe) != recipe else None


def _has_treatments(recipe: Recipe, remedy: Remedy) -> bool:
    """Return True if the recipe has one of the remedy's treatments, with whatever options."""
    return any(f"treatments.{treatment.name}" in remedy.keys for treatment in recipe.treatments)


def _is_there(remedy: Remedy) -> bool:
    """Return False for a network, optimizer, treatment, option or key that this version does not have."""
    overrides, network = remedy.overrides, _network(remedy.overrides)
    optimizer = overrides.get("optimizer", {}).get("name")
    optimizers = get_args(OptimizerConfig.model_fields["name"].annotation)
    return (
        set(overrides) <= set(Recipe.model_fields)
        and (network is None or network in list_models())
        and (optimizer is None or optimizer in optimizers)
        and all(_is_treatment(entry) for entry in overrides.get("treatments", ()))
    )


def _is_treatment(entry: Entry) -> bool:
    """Return True if there is such a treatment, with such options."""
    name = _treatment_name(entry)
    if isinstance(entry, str) or name not in TREATMENTS.names():
        return name in TREATMENTS.names()
    return set(entry[name]) <= set(next(facts for facts in TREATMENTS.facts() if facts.name == name).options)


def _scale_rate(factor: float) -> Callable[[Recipe], Mapping[str, Any]]:
    return lambda recipe: {"optimizer.lr": float(f"{recipe.optimizer.lr * factor:.3g}")}


def _augment(level: str) -> Callable[[Recipe], Mapping[str, Any]]:
    """Return a level as it is, without the parts that the recipe has changed."""
    return lambda recipe: {
        "data.augment": {**dict.fromkeys(recipe.data.augment.model_dump(exclude_none=True)), "level": level}
    }


def _switch_optimizer(name: str, lr: float, weight_decay: float) -> Callable[[Recipe], Mapping[str, Any]]:
    """Return another optimizer with its usual rates, and without SGD's options."""

    def switch(recipe: Recipe) -> Mapping[str, Any]:
        own = recipe.optimizer
        if own.name == name:
            return {}
        defaults = {key: OptimizerConfig.model_fields[key].default for key in ("momentum", "nesterov")}
        unused = {key: value for key, value in defaults.items() if getattr(own, key) != value}
        return {"optimizer": {"name": name, "lr": lr, "weight_decay": weight_decay, **unused}}

    return switch


def _halve_batch(recipe: Recipe) -> Mapping[str, Any]:
    half = recipe.batch_size // 2
    return {"batch_size": half} if half >= 16 and half % recipe.accumulate == 0 else {}


_HALF_SIZE = {"progressive_resizing.start": 0.5}

TABLE: tuple[KnownRemedy | str, ...] = (
    KnownRemedy(
        "hybrid network",
        "convolutions first, attention after them, sized for the images",
        {"model.name": "hybrid_vit"},
    ),
    KnownRemedy(
        "muon",
        "Muon for matrices and AdamW for the rest, with rate 0.01 and decay 0.3",
        _switch_optimizer("muon", lr=1e-2, weight_decay=0.3),
    ),
    KnownRemedy(
        "AlterNet",
        "a thin pre-activation ResNet-18 with attention at the ends of its stages [park2022]",
        {
            "model": {
                "name": "alternet18",
                "stem": "cifar",
                "channels": [16, 32, 64, 128],
                "heads": [1, 2, 4, 8],
                "head_width": 16,
            }
        },
    ),
    KnownRemedy(
        "residual stem",
        "a convolution and residual blocks in place of the patchify stem, for small images",
        {"treatments": [{"conv_stem": {"preset": "residual"}}]},
    ),
    "conv_stem",
    "gap_head",
    KnownRemedy("lr x 3", "three times the learning rate", _scale_rate(3)),
    KnownRemedy("lr / 3", "a third of the learning rate", _scale_rate(1 / 3)),
    KnownRemedy("crop and flip", "augmentation by crop and flip alone", _augment("light")),
    KnownRemedy("no augmentation", "the images as they are", _augment("none")),
    KnownRemedy(
        "ema",
        "the weights averaged over training: decay 0.999, less at the beginning",
        lambda recipe: {} if recipe.ema else {"ema": 0.999},
    ),
    KnownRemedy("batch size / 2", "half the images a step, so more steps in the same time", _halve_batch),
    "mimetic_init",
    KnownRemedy("small images first", "the first part of the run on images of half the side", _HALF_SIZE),
    KnownRemedy(
        "4 blocks",
        "a transformer of depth 4: cheaper steps, so more of them",
        lambda recipe: {"model.depth": 4} if recipe.model.keywords.get("depth", 12) > 4 else {},
    ),
    KnownRemedy("late sam", "SAM in the last fifth of the run", {"treatments": [{"sam": {"start": 0.8}}]}),
    "context_broadcasting",
    "patch_diversity",
    "sam",
    "patch_dropout",
    "local_attention",
    "uniform_heads",
    KnownRemedy("warm-up 10%", "the learning rate rises over a tenth of the run", {"schedule.warmup": "10%"}),
    KnownRemedy("label smoothing", "labels smoothed by 0.1", {"data.augment.smoothing": 0.1}),
    KnownRemedy("deit augmentation", "RandAugment, erasing, mixup, CutMix, smoothing, repeats", _augment("deit")),
    KnownRemedy(
        "adamw",
        "AdamW in place of another optimizer, with rate 0.001 and decay 0.05",
        _switch_optimizer("adamw", lr=1e-3, weight_decay=0.05),
    ),
    KnownRemedy("bf16", "bfloat16 arithmetic, where the device is quick at it", {"precision": "bf16"}),
)
"""What is tried, in this order: the network and its beginning first, where small sets gain most, then what costs
nothing, then what costs time. A text is a treatment; treatments that are not here come after it, by name. What
this version does not have, such as a network that is not registered, is skipped."""


def known_remedies(recipe: Recipe) -> dict[str, Remedy]:
    """Return all remedies that would change the recipe, by name, in the order in which they are tried.

    Example:
        >>> names = list(known_remedies(build_recipe({"ema": 0.99, "treatments": ["sam"]})))
        >>> "lr x 3" in names, "ema" in names, "sam" in names, "crop and flip" in names
        (True, False, False, False)
    """
    made = [entry.make(recipe) for entry in _all_remedies()]
    return {remedy.name: remedy for remedy in made if remedy is not None}


def _all_remedies() -> list[KnownRemedy]:
    """Return the table and the treatments that are not in it, by name."""
    told = {facts.name: str(facts.attributes["changes"]) for facts in TREATMENTS.facts("changes")}
    entries = dict.fromkeys([*TABLE, *told])
    return [
        KnownRemedy(entry, told.get(entry, ""), {"treatments": [entry]}) if isinstance(entry, str) else entry
        for entry in entries
    ]


def describe_remedies() -> list[dict[str, str]]:
    """Return every remedy that there is with what it changes, in the order in which they are tried."""
    recipe = Recipe()
    return [
        {"name": entry.name, "changes": entry.changes} for entry in _all_remedies() if _is_there(entry.propose(recipe))
    ]


def find_remedy(entry: Entry, recipe: Recipe) -> Remedy:
    """Return the remedy that is named: by its name, as a treatment, as `key=value`, or as {name: overrides}.

    Raises:
        RecipeError: There is none of that name, its keys are wrong, or it changes nothing.

    Example:
        >>> recipe = build_recipe()
        >>> [find_remedy(entry, recipe).name for entry in ("lr x 3", "ema=0.99", {"sam": {"rho": 0.05}})]
        ['lr x 3', 'ema=0.99', 'sam(rho=0.05)']
    """
    name = entry if isinstance(entry, str) else _treatment_name(entry)
    known = next((one for one in TABLE if isinstance(one, KnownRemedy) and one.name == entry), None)
    if name in TREATMENTS.names():
        return treatment_remedy(entry)
    if isinstance(entry, str) and "=" in entry:
        remedy = make_remedy(entry, parse_word(entry))
    elif isinstance(entry, Mapping):
        overrides = entry[name]
        if not isinstance(overrides, Mapping):
            raise RecipeError(f"The remedy '{name}' needs overrides of the recipe, as in {{{name}: {{ema: 0.99}}}}.")
        remedy = make_remedy(name, overrides)
    elif known is None:
        names = [row["name"] for row in describe_remedies()]
        hint = did_you_mean(name, names) or " See `vitclinic list remedies`, or write key=value."
        raise RecipeError(f"There is no remedy '{name}'.{hint}")
    elif (made := known.make(recipe)) is not None:
        return made
    else:
        raise RecipeError(
            f"The remedy '{name}' has no effect on this recipe, or needs a package that is not installed."
        )
    if "treatments" not in remedy.overrides and remedy.apply(recipe) == recipe:
        raise RecipeError(f"The remedy '{name}' has no effect: the recipe already sets it.")
    return remedy


def treatment_remedy(entry: Entry) -> Remedy:
    """Return the remedy that adds a treatment, named as in `gap_head` or `sam(rho=0.05)`.

    Raises:
        RecipeError: There is no such treatment, or it does not take these options.
    """
    name = _treatment_name(entry)
    options = {} if isinstance(entry, str) else entry[name] or {}
    TREATMENTS.check(name, options)
    settings = ", ".join(f"{key}={value}" for key, value in options.items())
    written: Sequence[Any] = [entry if isinstance(entry, str) else dict(entry)]
    return Remedy(f"{name}({settings})" if settings else name, {"treatments": written})


def _treatment_name(entry: Entry) -> str:
    return entry if isinstance(entry, str) else next(iter(entry))
