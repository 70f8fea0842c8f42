"""The verb `prescribe`: measure costs, plan, select and combine by short trials, compare the best with the plain one.

Every decision is in the ledger before it is acted on, so that the same call goes on after an interruption.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitclinic._core.callback import Callback, CallbackList
from vitclinic._core.environment import read_count
from vitclinic._core.errors import DataError, RecipeError, RunError
from vitclinic._core.io import expand_path, find_path, fingerprint, write_errors
from vitclinic._core.time import format_duration, parse_budget
from vitclinic.data import Dataset, open_data
from vitclinic.experiments.prescribe.arms import (
    PLAIN,
    Arm,
    Reason,
    Trials,
    explain_clash,
    grow,
    list_candidates,
    read_reasons,
)
from vitclinic.experiments.prescribe.ledger import FILE, Costs, Ledger
from vitclinic.experiments.prescribe.plan import (
    LARGEST_UNSEEN,
    MOST,
    NEXT,
    Stage,
    count_affordable,
    find_needed_budget,
    halve,
    make_plan,
)
from vitclinic.experiments.prescribe.prescription import (
    Prescription,
    TriedStage,
    judge_effect,
    measure_effect,
)
from vitclinic.experiments.prescribe.remedies import Entry, Remedy, find_remedy
from vitclinic.experiments.prescribe.stages import Stages
from vitclinic.experiments.runner import Pool
from vitclinic.training import Recipe, Run, build_recipe
from vitclinic.training.budget import fit_size_to_images, image_counts
from vitclinic.training.overrides import DEFAULT, Overrides, default_base

LEAST_IMAGES = 50
"""The fewest val and test images: fewer cannot tell arms apart."""


def build_plain_recipe(
    recipe: Recipe | str | Path | Mapping[str, Any] | None, overrides: Overrides | None, data: str | Path | None
) -> Recipe:
    """Return the recipe to compare with, without a seed of its own; `plain` unless a recipe or a network is named."""
    if recipe is None and default_base(overrides) == DEFAULT:
        recipe = PLAIN
    resolved = build_recipe(recipe, overrides)
    if data is not None:
        resolved = resolved.model_copy(update={"data": resolved.data.model_copy(update={"source": str(data)})})
    if resolved.out is not None:
        raise RecipeError(
            "Remove `out` from the recipe: it is for a single run, and prescribe has an `out` of its own."
        )
    if not resolved.test:
        raise RecipeError("The final comparison needs the test images: remove test=false.")
    if "accuracy" not in {metric.name for metric in resolved.task.metrics}:
        raise RecipeError(f"prescribe compares accuracies, and the task {resolved.task.name} has none.")
    return resolved.model_copy(update={"seed": 0})


def check_data(dataset: Dataset) -> None:
    """Raise a DataError if there are too few images to select or to compare on."""
    dataset.check_trainable()
    for split, use in (("val", "selects"), ("test", "makes its final comparison")):
        count = len(dataset.splits[split])
        if count < LEAST_IMAGES:
            raise DataError(
                f"'{dataset.name}' has {count} {split} images, and prescribe {use} on them: it needs at least"
                f" {LEAST_IMAGES} ({10 * LEAST_IMAGES} images in total, where a tenth of them is held out)."
            )


def choose_folder(out: str | Path | None, recipe: Recipe, dataset: Dataset, identity: Mapping[str, Any]) -> Path:
    """Return where it goes: the same folder for the same question, so that the same command goes on."""
    if out is None:
        name = "-".join([Path(dataset.name).name, recipe.model.name, fingerprint(identity)[:8]])
        folder = Path("prescriptions") / re.sub(r"[^\w.,=-]+", "-", name)
    else:
        folder = expand_path(str(out), RecipeError)
    if find_path(str(folder / FILE), RunError, "a prescription") is None:
        Run(folder).refuse_foreign_files()
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def prescribe(
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    overrides: Overrides | None = None,
    *,
    data: str | Path | None = None,
    budget: str | float = "1h",
    treatments: Sequence[Entry] | None = None,
    remedies: Sequence[Entry] | None = None,
    first: Sequence[Entry] = (),
    examined: str | Path | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> Prescription:
    """Try remedies on your data in short paired trials, and find out whether one, or several together, help.

    A remedy is a change of the recipe: a treatment, another network, learning rate, augmentation. Trials with the same
    seeds and the same training time select on val, by successive halving; combinations grow from the best. The winner
    and the plain recipe are then compared on test, with seeds that were not used before. After an interruption, the
    same call goes on.

    Args:
        recipe: The plain recipe, as `train` takes it.
        overrides: Changes to it: `{"optimizer.lr": 3e-4}`, or words such as `"optimizer.lr=3e-4"`.
        data: The data to try on, instead of the recipe's.
        budget: The time for all of it, such as `"30m"` or `"2h"`, or seconds.
        treatments: Treatments to try, as names or {name: {option: value}}.
        remedies: Remedies to try: names of `vitclinic list remedies`, `"key=value"`, or {name: {key: value}} with a
            name of your own. Unless some, or treatments, are given: the first twelve of that list that apply.
        first: Those to try first if the budget is not enough for all.
        examined: A run with an exam: what its findings suggest comes first, and the result explains itself by them.
        seed: Another one has all trials repeated with other seeds.
        out: The folder for trials and evidence; `prescriptions/NAME` unless given.
        callbacks: Their hooks `on_progress`, `on_trial_plan`, `on_stage`, `on_tried` and `on_run` are called.

    Returns:
        The verdict, the recipe to train with, and all trials.

    Raises:
        RecipeError: The recipe, a remedy or the budget is wrong, or the budget too small.
        DataError: The data cannot be read, or has too few images.
        RunError: The folder is in use for something else, or a trial that cannot be left out failed.

    Example:
        >>> found = vitclinic.prescribe(data="photos/", budget="1h")  # doctest: +SKIP
        >>> print(found.statement)  # doctest: +SKIP
        conv_stem helps: +4.1% test accuracy (95% interval +2.9% to +5.3%, 5 fresh seeds), at the same training time.
        >>> vitclinic.train(found.recipe)  # doctest: +SKIP
    """
    callback = CallbackList(callbacks)
    if read_count("WORLD_SIZE") > 1:
        raise RecipeError("prescribe runs in one process: start it without torchrun.")
    resolved = build_plain_recipe(recipe, overrides, data)
    time = parse_budget(budget)
    suggested = [] if examined is None else read_reasons(examined, resolved)
    early = [*(remedy for remedy, _ in suggested), *(find_remedy(entry, resolved) for entry in first)]
    arms = list_candidates(resolved, treatments, remedies, early)
    dataset = _open_enough(resolved, callback)
    resolved = fit_size_to_images(resolved, len(dataset.train))
    identity = {
        "recipe": resolved.digest(dataset.digest),
        "budget": time,
        "candidates": [arm.record() for arm in arms],
        "seed": seed,
    }
    folder = choose_folder(out, resolved, dataset, identity)
    with Run(folder).lock():
        most = MOST if treatments is None and remedies is None else len(arms)
        question = _Question(resolved, dataset, arms, most, [reason for _, reason in suggested], time, seed)
        return _Prescriber(folder, question, callback, identity).prescribe()


def _open_enough(recipe: Recipe, callback: Callback) -> Dataset:
    """Open the data of a recipe; raises a DataError if it has too few images to compare remedies on."""
    dataset = open_data(
        recipe.data, size=recipe.image_size, channels=recipe.model.in_chans, progress=callback.on_progress
    )
    check_data(dataset)
    return dataset


@dataclass(frozen=True)
class _Question:
    """Request for a prescription; the folder of its results is named after it."""

    recipe: Recipe
    dataset: Dataset
    wanted: Sequence[Arm]
    most: int
    """How many of them to try, at most."""
    reasons: Sequence[Reason]
    budget: float
    seed: int


class _Prescriber:
    """One prescription: measures costs, plans, selects and compares."""

    def __init__(self, folder: Path, question: _Question, callback: Callback, identity: Mapping[str, Any]) -> None:
        self.folder, self.question, self.callback = folder, question, callback
        self.counts = image_counts(question.dataset)
        self.ledger = Ledger(folder, identity)
        self.costs = Costs(question.recipe, question.dataset, self.ledger)
        self.trials = Trials(question.recipe, self.costs.count_own_steps(), self.counts)
        self.stages = Stages(Pool(folder / "runs"), self.trials, self.costs, question.budget, question.seed, callback)

    def prescribe(self) -> Prescription:
        """Return the prescription, of which stages that have ended are not repeated."""
        ledger = self.ledger
        arms = self._choose_candidates()
        self.callback.on_trial_plan(ledger.plan, arms, ledger.left_out, ledger.used, self.question.budget)
        winner = self._combine(self._select(arms))
        rungs = list(self.stages.tried)
        final = self.stages.run(len(ledger.plan) - 1, [Arm(), winner])
        if final.failed:
            raise RunError(f"The final comparison failed: {next(iter(final.failed.values()))}")
        return self._conclude(rungs, final, winner)

    def _select(self, arms: Sequence[Arm]) -> list[Arm]:
        """Return the best single remedy, and the others that beat the plain recipe, by successive halving."""
        sizes = halve(len(arms))
        for number in range(len(sizes)):
            tried = self.stages.run(number, [Arm(), *arms])
            ranked = self.stages.rank_last()
            if number == len(sizes) - 1:
                arms = [ranked[0], *(arm for arm in ranked[1:] if tried.mean(arm.name) > tried.mean(PLAIN))]
            else:
                arms = ranked[: sizes[number + 1]]
            self.callback.on_tried(tried, [arm.name for arm in arms])
        return list(arms)

    def _combine(self, arms: Sequence[Arm]) -> Arm:
        """Return the best arm that grows from the first by one remedy of the others at a time, while it improves."""
        base, others = arms[0], [remedy for arm in arms[1:] for remedy in arm.changes]
        for number in range(len(self.stages.tried), len(self.ledger.plan) - 1):
            added = self._grow(base, others, self.ledger.plan[number])
            if not added:
                break
            tried = self.stages.run(number, [Arm(), base, *(arm for arm, _ in added)])
            ranked = self.stages.rank_last()
            self.callback.on_tried(tried, [ranked[0].name])
            if ranked[0].name == base.name:
                break
            # What made the old base worse is not tried on the new one.
            names = [arm.name for arm in ranked]
            better = names[1 : names.index(base.name) if base.name in names else None]
            added_by = {arm.name: remedy for arm, remedy in added}
            unseen = [remedy for remedy in others if remedy not in added_by.values()]
            base, others = ranked[0], [*(added_by[name] for name in better), *unseen]
        return base

    def _grow(self, base: Arm, others: Sequence[Remedy], stage: Stage) -> list[tuple[Arm, Remedy]]:
        """Return the base with each of the next remedies that go with it."""
        grown: list[tuple[Arm, Remedy]] = []
        for remedy in others:
            if len(grown) == NEXT:
                break
            orders = grow(base, remedy)
            clash = explain_clash(base, remedy)
            if clash is not None:
                self.ledger.left_out[orders[0].name] = clash
                continue
            fitting = next((arm for arm in orders if self.stages.fits(arm, stage)), None)
            grown += [] if fitting is None else [(fitting, remedy)]
        return grown

    def _conclude(self, rungs: Sequence[TriedStage], final: TriedStage, winner: Arm) -> Prescription:
        found, ledger = measure_effect(final, winner.name), self.ledger
        failed = {arm: reason for tried in rungs for arm, reason in tried.failed.items()}
        # A combination is told once, and not at all if it goes together in the other order.
        told = {frozenset(name.split(" + ")) for name in ledger.costs if name not in ledger.left_out}
        unfit: dict[str, str] = {}
        for name, why in ledger.left_out.items():
            if (parts := frozenset(name.split(" + "))) not in told:
                unfit[name] = why
                told.add(parts)
        assert ledger.candidates is not None
        result = Prescription(
            folder=self.folder,
            verdict=judge_effect(found),
            winner=winner,
            effect=found,
            plain=self.question.recipe,
            changed=self.costs.keep_time(winner),
            rungs=rungs,
            final=final,
            left_out={**unfit, **failed},
            reasons=ledger.reasons,
            candidates=ledger.candidates,
            step_costs={name: cost.step for name, cost in ledger.costs.items()},
            own_steps=self.trials.own_steps,
            budget=self.question.budget,
            used=ledger.used,
        )
        result.write()
        return result

    def _choose_candidates(self) -> list[Arm]:
        """Return the remedies that apply and that the budget has time for; they and the plan are decided once."""
        ledger, wanted = self.ledger, self.question.wanted
        if ledger.candidates is not None:
            return ledger.candidates
        plain, trial = self.costs.plain, self.trials.make_recipe(Arm(), 1, 0, test=True)
        longest = plain.seconds(self.trials.own_steps, trial, self.counts)
        least = plain.seconds(self.costs.count_least_steps(), trial, self.counts)
        left, most = self.question.budget - ledger.used, min(len(wanted), self.question.most)
        affordable = count_affordable(most, left, plain.start, longest, least, self.counts)
        if affordable == 0:
            raise RecipeError(self._explain_budget(plain.start, longest, least))
        shortest = make_plan(affordable, left, plain.start, longest, self.counts)[0]
        arms: list[Arm] = []
        for number, arm in enumerate(wanted, 1):
            if len(arms) == affordable:
                ledger.left_out[arm.name] = (
                    "the budget has no time for it" if affordable < most else f"the first {most} are tried; name others"
                )
            elif self.stages.fits(arm, shortest):
                arms.append(arm)
            self.callback.on_progress("remedies timed", number, len(wanted))
        if not arms:
            reasons = " ".join(f"{name}: {reason}" for name, reason in ledger.left_out.items())
            raise RecipeError(f"No remedy applies to this network and data. {reasons}")
        overhead = min(cost.start for cost in ledger.costs.values())
        ledger.save()
        ledger.plan = make_plan(len(arms), self.question.budget - ledger.used, overhead, longest, self.counts)
        ledger.candidates, ledger.reasons = arms, list(self.question.reasons)
        ledger.save()
        return arms

    def _explain_budget(self, overhead: float, longest: float, least: float) -> str:
        """Say which budget would do: a tenth more than the plan needs, for measuring costs."""
        most = min(len(self.question.wanted), self.question.most)
        one, all_ = (1.1 * find_needed_budget(n, overhead, longest, least, self.counts) for n in (1, most))
        pairs = make_plan(1, 0.0, overhead, longest, self.counts)[-1].seeds
        more = f", and about {format_duration(all_)} for all {most} remedies" if most > 1 else ""
        return (
            f"A budget of {format_duration(self.question.budget)} is too small: a step takes"
            f" {self.costs.plain.step:.2g} s, a trial needs at least {self.costs.count_least_steps()} steps, and the"
            f" final comparison {pairs} pairs of trials, to tell {100 * LARGEST_UNSEEN:.0f} points on"
            f" {self.counts['test']} test images. Comparing one remedy needs about {format_duration(one)}{more}; or use"
            " a smaller network, or fewer images (data.limit)."
        )
