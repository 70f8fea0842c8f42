"""The verb `examine`: probes on one or several networks, every result stored as soon as it is there."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

from vitclinic._core.callback import Callback
from vitclinic._core.errors import RecipeError, did_you_mean
from vitclinic.exam.exam import Exam, Exams
from vitclinic.exam.examination import Examination
from vitclinic.exam.targets import Target
from vitclinic.probes import Probe
from vitclinic.probes.loading import Data
from vitclinic.probes.output import OutputFunction


class Options(TypedDict, total=False):
    """Keywords of `examine`; see there."""

    probes: Sequence[str | Mapping[str, Any] | Probe] | str | None
    budget: str | float | None
    quick: bool
    full: bool
    settings: Mapping[str, Mapping[str, Any]] | None
    split: str
    limit: int | None
    size: int | None
    batch_size: int
    seed: int
    device: str
    random_weights: bool
    mean: Sequence[float] | None
    std: Sequence[float] | None
    normalized: bool | None
    output: OutputFunction | None
    out: str | Path | None
    fresh: bool
    together: bool
    callbacks: Iterable[Callback]


@overload
def examine(  # type: ignore[overload-overlap]
    targets: Target, data: Data | None = None, **options: Unpack[Options]
) -> Exam: ...
@overload
def examine(targets: Sequence[Target], data: Data | None = None, **options: Unpack[Options]) -> Exams: ...
def examine(targets: Target | Sequence[Target], data: Data | None = None, **options: Unpack[Options]) -> Exam | Exams:
    """Measure one network (an `Exam`) or several (`Exams`, a list of them) on some data, within five minutes.

    Args:
        targets: A network, a run or one of its checkpoints, or what `vitclinic examine` takes: a run directory,
            `timm:NAME`, `timm:NAME@FILE`, `torchvision:NAME`, `hf:NAME`, `module:function`. Or a list of them: one that
            cannot be examined is then found in `Exams.failures`, and the others are measured.
        data: A torch DataLoader or any other iterable of `(images, labels)`, `{"train": loader, "test": loader}`, a
            `Dataset`, a folder, or a name of `vitclinic list datasets`; of a run, its own unless given.
        probes: Names, `{name: {option: value}}` or probes, all of which are measured; unless given, those that fit
            into the budget.
        budget: Seconds, or a time such as "20m", for all targets together.
        quick: Measure only what one pass over the images shows.
        full: Measure all that applies, whatever it takes.
        settings: Options of some of the probes, `{name: {option: value}}`.
        split: Which images to measure on: "train", "val" or "test"; some probes always use a certain split.
        limit: Use at most so many images, the same share of each class.
        size: Pixels a side, where the network takes any.
        batch_size: Images at a time; halved when memory runs out.
        seed: Seed of everything random in measuring.
        device: "auto", "cpu" or "cuda".
        random_weights: Do not ask for pretrained weights of a library's network.
        mean: What a network given as a module has its input normalized by, for each channel, if it does not normalize
            itself.
        std: The standard deviation that goes with `mean`.
        normalized: The loader's images are normalized: by `mean` and `std`, or by the network's own preprocessing if
            these are not given. Images outside of [0, 1] of which nothing is said are an error.
        output: A function from what the networks return to their class scores [B, K]. Unless given, these are the
            tensor that a network returns, `logits` of a dict or Hugging Face output, or the first tensor of a tuple.
        out: Where results go, instead of a run's `exams/` or `./exams`.
        fresh: Measure again what is stored.
        together: All processes of torch.distributed's group, each of which calls this, measure together.
        callbacks: Objects that follow the progress.

    Returns:
        The exam: a mapping of probes to measurements, with `findings`, `figure` and `report`; or a list of exams.

    Raises:
        VitclinicError: If the one target, the only usable one, or an option is wrong. A probe that fails is a
            measurement that says so.

    Example:
        >>> import timm, torch, vitclinic
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> exam = vitclinic.examine(model, data=loader, probes=["norms"], out="/tmp/exams")  # doctest: +SKIP
        >>> exam["norms"].scalars["weight_norm"].value  # doctest: +SKIP
    """
    _check_keywords(options)
    examination = Examination(data, **options)
    if isinstance(targets, Target):
        return examination.run([examination.open(targets)])[0]
    if targets is None or (isinstance(targets, Sequence) and not targets):
        raise RecipeError("There is nothing to examine: name a target.")
    if isinstance(targets, Mapping) or not isinstance(targets, Iterable):
        raise RecipeError(
            f"examine() takes a torch.nn.Module, a run, the name of a target, or a list of these (got"
            f" {type(targets).__name__})."
        )
    return examination.run_all(targets)


def _check_keywords(options: Mapping[str, Any]) -> None:
    """Raise a TypeError that names `examine` and the keyword that was probably meant."""
    for name in options:
        if name not in Options.__annotations__:
            hint = did_you_mean(name, Options.__annotations__)
            raise TypeError(f"examine() got an unexpected keyword argument '{name}'.{hint}")


def _show_options() -> None:
    """Make `help(examine)`, and editors that ask at run time, show each option instead of `**options`."""
    fixed = [one for one in inspect.signature(examine).parameters.values() if one.kind is not one.VAR_KEYWORD]
    options = [one for one in inspect.signature(Examination).parameters.values() if one.kind is one.KEYWORD_ONLY]
    examine.__signature__ = inspect.Signature([*fixed, *options])  # type: ignore[attr-defined]


_show_options()
