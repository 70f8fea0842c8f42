"""Prescriptions and studies on the terminal: the plan, the progress of all runs, and the evidence at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID, TimeRemainingColumn
from rich.table import Table

from vitclinic._core.callback import Callback, Display, say
from vitclinic._core.time import format_duration
from vitclinic.experiments.prescribe.arms import PLAIN, Arm
from vitclinic.experiments.prescribe.ledger import DecidedStage
from vitclinic.experiments.prescribe.plan import SEED_NOISE, Stage
from vitclinic.experiments.prescribe.prescription import Prescription, TriedStage
from vitclinic.experiments.runner import Outcome
from vitclinic.experiments.study.conduct import StudyResult
from vitclinic.experiments.study.costs import ASSUMPTION, ArmCost, Plan
from vitclinic.experiments.study.expectations import Expectation
from vitclinic.experiments.study.verdicts import ENOUGH_SEEDS, count_seeds
from vitclinic.reports.study_result import ArmNumbers, Comparison


class PrescriptionDisplay(Display, Callback):
    """The progress of a prescription. Use as a context manager around `prescribe`."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, "{task.percentage:>3.0f}%", TimeRemainingColumn())

    def on_progress(self, what: str, done: float, total: float) -> None:
        self.advance(what, done, total)

    def on_trial_plan(
        self, plan: Sequence[Stage], arms: Sequence[Arm], left_out: Mapping[str, str], used: float, budget: float
    ) -> None:
        names = ", ".join(escape(arm.name) for arm in arms)
        self.say(f"[bold]{len(arms)} {'remedies' if len(arms) != 1 else 'remedy'} to try:[/] {names}")
        for reason in dict.fromkeys(left_out.values()):
            alike = ", ".join(escape(name) for name, why in left_out.items() if why == reason)
            self.say(f"[yellow]left out:[/] {alike} ({escape(reason)})")
        for stage in plan:
            seeds = f"{stage.seeds} seed{'s' * (stage.seeds != 1)}"
            what = f"{stage.seeds} fresh seeds, on test" if stage.final else f"{seeds}, on val"
            most = "" if stage.final or stage.name.startswith("rung") else "up to "
            self.say(
                f"  {stage.name}: {most}{stage.arms} arms x {what}, {format_duration(stage.seconds)} per trial, about"
                f" {format_duration(stage.planned)}; tells {100 * stage.detectable:.1f} points"
            )
        self.say(
            "  a stage tells differences that stand out from the noise of its images, at 50% accuracy, and of seeds,"
            f" assumed to be {100 * SEED_NOISE:g} point"
        )
        rest = sum(stage.planned for stage in plan)
        self.say(f"about {format_duration(rest)} in total, of a budget of {format_duration(budget)}")

    def on_stage(self, decided: DecidedStage) -> None:
        steps = ", ".join(f"{escape(arm.name)} {decided.steps[arm.name]}" for arm in decided.arms)
        self.say(f"[bold]{decided.stage.name}[/], {format_duration(decided.stage.seconds)} per trial; steps: {steps}")

    def on_tried(self, tried: TriedStage, kept: Sequence[str]) -> None:
        self.say(f"  {tried.name} keeps {', '.join(map(escape, kept))}")


def show_prescription(found: Prescription, console: Console) -> None:
    """Print the verdict first, then the evidence, then where it is."""
    colour = "green" if found.verdict == "helps" else "yellow"
    console.print(f"[{colour}]{escape(found.statement)}[/]", soft_wrap=True, highlight=False)
    for change in found.changes:
        say(console, f"  {escape(change)}")
    _show_table("Final comparison: test accuracy, fresh seeds", _final_rows(found), console)
    if found.rungs:
        _show_table("Selection (optimistic): val accuracy minus that of plain", _selection_rows(found), console)
    if found.reasons:
        _show_table("What the exam found, and what its remedies gained alone", _reason_rows(found), console)
    if found.file is not None:
        file = escape(str(found.file))
        say(console, f"recipe: [bold]{file}[/]; train with: vitclinic train {file}")
        if found.cost_ratio > 1.1:
            say(
                console,
                f"a step costs {found.cost_ratio:.2f} times a plain one, so its trials had fewer steps",
            )
    say(console, f"all numbers: [bold]{escape(str(found.folder / 'prescription.json'))}[/]")


def _final_rows(found: Prescription) -> list[dict[str, str]]:
    """Return the test accuracy of each seed, and what else there is of the two arms."""
    final, arms = found.final, (PLAIN, found.winner.name)
    rows = [
        {"seed": str(seed), **{arm: f"{final.accuracies(arm)[place]:.1%}" for arm in arms}}
        for place, seed in enumerate(final.seeds)
    ]
    steps = {trial.arm: str(trial.steps) for trial in final.trials}
    rows.append({"seed": "mean", **{arm: f"{final.mean(arm):.1%}" for arm in arms}})
    rows.append({"seed": "steps", **{arm: steps[arm] for arm in arms}})
    if any(map(final.diverged, arms)):
        rows.append({"seed": "diverged", **{arm: str(final.diverged(arm)) for arm in arms}})
    return rows


def _selection_rows(found: Prescription) -> list[dict[str, str]]:
    """Return the mean val accuracy of every arm minus the plain recipe's, rung by rung."""
    rows = []
    for arm in dict.fromkeys(arm for rung in reversed(found.rungs) for arm in rung.arms):
        row = {"arm": arm}
        for rung in found.rungs:
            if arm not in rung.arms:
                row[rung.name] = "failed" if arm in rung.failed else ""
            elif arm == PLAIN:
                row[rung.name] = f"{rung.mean(arm):.1%}"
            else:
                diverged = " diverged" if rung.diverged(arm) else ""
                row[rung.name] = f"{rung.mean(arm) - rung.mean(PLAIN):+.1%}{diverged}"
        rows.append(row)
    return rows


def _reason_rows(found: Prescription) -> list[dict[str, str]]:
    """Return what the exam found, the number, the remedy that this suggests, and what it gained here."""
    tried = {one.arm.name: one for one in found.tried}
    rows = []
    for reason in found.reasons:
        one = tried.get(reason.remedy)
        gain = f"{one.gain:+.1%} ({one.stage})" if one else found.left_out.get(reason.remedy, "not asked for")
        number = next((f"{name} {value:.3g}" for name, value in reason.numbers.items()), "")
        rows.append({"finding": reason.finding, "number": number, "remedy": reason.remedy, "gain": gain})
    return rows


class StudyDisplay(Display, Callback):
    """A progress bar for a study. Use as a context manager around `study`."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, "{task.percentage:>3.0f}%", "{task.fields[left]}")
        self.task: TaskID | None = None
        self.left = TimeLeft()
        self.diverged = self.failed = 0

    def on_run(self, outcome: Outcome) -> None:
        self.diverged += outcome.status == "diverged"
        self.failed += outcome.status == "failed"

    def on_progress(self, what: str, done: float, total: float) -> None:
        if self.task is None:
            self.task = self.bar.add_task("", total=total, left="")
        words = [f"run {min(int(done) + 1, int(total))} of {int(total)}"]
        words += [f"{self.diverged} diverged"] * (self.diverged > 0) + [f"{self.failed} failed"] * (self.failed > 0)
        left = self.left.update(done, total, time.monotonic())
        told = "" if left is None else f"about {format_duration(left)} left"
        self.bar.update(self.task, completed=done, total=total, description=", ".join(words), left=told)


class TimeLeft:
    """An estimate of the time left, from what has been trained so far.

    A run that was found ended, or failed at once, counts as done in no time and says nothing about the others.

    Example:
        >>> left = TimeLeft()
        >>> [left.update(done, 4, now) for done, now in ((0, 0.0), (1, 0.1), (1.5, 60.1), (2.0, 120.1))]
        [None, None, 300.0, 240.0]
    """

    def __init__(self) -> None:
        self.seconds = self.trained = 0.0
        self.last: tuple[float, float] | None = None

    def update(self, done: float, total: float, now: float) -> float | None:
        """Return the seconds left, or None before anything was trained."""
        if self.last is not None and done - self.last[0] < 1:
            self.trained += done - self.last[0]
            self.seconds += now - self.last[1]
        self.last = done, now
        return round(self.seconds / self.trained * (total - done), 1) if self.trained > 0 else None


Rows = Sequence[dict[str, str]]

_COLOURS = {"reproduced": "green", "not reproduced": "red", "undecided": "yellow", "not testable here": "yellow"}


def show_result(result: StudyResult, console: Console) -> None:
    """Print the verdict, the arms, the comparisons, what went wrong, and where everything is."""
    colour = _COLOURS[result.verdict.word]
    say(console, f"[bold]{escape(result.study.claim)}: [{colour}]{escape(statement(result))}[/][/]")
    _show_table("Arms: mean [95% interval] over seeds", [_arm_row(result, arm) for arm in result.values], console)
    comparisons = result.verdict.comparisons
    confidence = 100 - 5 / len(comparisons)
    _show_table(
        f"Comparisons: mean [{confidence:.4g}% interval] over seeds", list(map(_comparison_row, comparisons)), console
    )
    alike: dict[tuple[str, str], list[str]] = {}
    for (arm, seed), reason in result.failures.items():
        alike.setdefault((arm, reason), []).append(str(seed))
    for (arm, reason), seeds in alike.items():
        say(console, f"[red]failed:[/] {escape(arm)}, seed {', '.join(seeds)}: {escape(reason)}")
    for reason, where in _without_numbers(result).items():
        say(console, f"[yellow]no number:[/] {escape(where)}: {escape(reason)}")
    say(console, f"training took {format_duration(result.seconds)} in total")
    say(console, f"all numbers: {escape(str(result.file))}; runs: {escape(str(result.file.parent / 'pool'))}")
    say(console, f"report: [bold]{escape(str(result.page))}[/]")


def statement(result: StudyResult) -> str:
    """Return the verdict in words."""
    text = f"{result.verdict.word}: {result.study.title}"
    broken = [f"{one.says} ({one.found})" for one in result.verdict.conditions if not one.holds]
    if broken:
        return f"{text}. What does not hold: {'; '.join(broken)}"
    if not result.verdict.exploratory:
        return text
    fewest = min(comparison.seeds for comparison in result.verdict.comparisons)
    seeds = f"{fewest} seed{'s' * (fewest != 1)} with all numbers"
    return f"{text} (exploratory: {seeds}; a verdict needs {ENOUGH_SEEDS})"


def _arm_row(result: StudyResult, arm: str) -> dict[str, str]:
    statuses = list(result.statuses[arm].values())
    failed = sum(status not in ("finished", "diverged") for status in statuses)
    runs = [str(len(statuses))]
    runs += [f"{statuses.count('diverged')} diverged"] * ("diverged" in statuses) + [f"{failed} failed"] * (failed > 0)
    row = {"arm": arm, "runs": ", ".join(runs)}
    for name, measure in result.study.measures.items():
        by_seed = {seed: numbers.get(name, math.nan) for seed, numbers in result.values[arm].items()}
        row[f"log10 {name}" if measure.log else name] = _cell(ArmNumbers(by_seed, share=measure.is_end))
    return row


def _cell(arm: ArmNumbers) -> str:
    if arm.share:
        return f"{sum(arm.known):.0f} of {len(arm.known)}"
    if not arm.known:
        return "-"
    ends = arm.interval
    return f"{arm.mean:.3g}" if ends is None else f"{arm.mean:.3g} [{ends[0]:.3g}, {ends[1]:.3g}]"


def _comparison_row(one: Comparison) -> dict[str, str]:
    return {
        "claim": one.says,
        "measure": one.measure,
        "mean": "-" if math.isnan(one.mean) else f"{one.mean:+.3g}",
        "interval": "-" if math.isnan(one.low) else f"[{one.low:.3g}, {one.high:.3g}]",
        "p": "-" if math.isnan(one.p) else f"{one.p:.2g}{' (signs)' * (one.test == 'signs')}",
        "seeds": f"{one.seeds} ({one.missing} without a number)" if one.missing else str(one.seeds),
        "status": one.status,
    }


def _without_numbers(result: StudyResult) -> dict[str, str]:
    """Return reason -> one example, for numbers that a comparison lacks or a measure has for no arm at all.

    That a probe of convolutions has no number for a ViT is expected, and so is that a diverged run lacks later numbers.
    """
    lacking = {comparison.measure for comparison in result.verdict.comparisons if comparison.missing}
    known = {
        name
        for by_seed in result.values.values()
        for numbers in by_seed.values()
        for name, number in numbers.items()
        if not math.isnan(number)
    }
    found: dict[str, str] = {}
    for arm, by_seed in result.missing.items():
        for seed, reasons in by_seed.items():
            for name, reason in reasons.items():
                if (name in lacking or name not in known) and result.statuses[arm][seed] != "diverged":
                    found.setdefault(reason, f"{name} of {arm}, seed {seed}")
    return found


def show_plan(plan: Plan, console: Console) -> None:
    """Print what a dry run found."""
    say(console, f"[bold]{escape(plan.study.claim)}[/]: {escape(plan.study.title)}")
    _show_table("Arms, for one seed", [_cost_row(cost, plan.scale == "paper") for cost in plan.arms], console)
    rows = [_power_row(plan, expected) for expected in plan.study.expectations]
    _show_table(f"Power of {plan.seeds} seeds for what the paper states", rows, console)
    seeds = f"{plan.seeds} seed{'s' * (plan.seeds != 1)}"
    arms = f"{len(plan.arms)} arm{'s' * (len(plan.arms) != 1)}"
    say(console, f"{plan.runs} runs ({arms} x {seeds}), {plan.flops:.2g} training FLOPs in total")
    if plan.scale == "paper":
        say(
            console,
            f"about {format_duration(3600 * plan.gpu_hours)} on a GPU for training alone, assuming {ASSUMPTION}",
        )
    elif plan.minutes is not None:
        say(console, f"about {format_duration(60 * plan.minutes)} on two cores for training alone (an estimate)")


def _power_row(plan: Plan, expected: Expectation) -> dict[str, str]:
    """Return how often this many seeds find the effect that the paper states."""
    power, needed = plan.power[expected.says], count_seeds(expected, plan.study)
    known = "-" if expected.effect is None else f"{expected.effect:+.3g}"
    return {
        "claim": expected.says,
        "the paper's effect": known,
        "spread over seeds": "-" if expected.spread is None else f"{expected.spread:.3g}",
        "power": "not known" if power is None else f"{power:.0%}",
        "seeds for 80%": "-" if needed is None else str(needed),
    }


def _cost_row(cost: ArmCost, gpu: bool) -> dict[str, str]:
    row = {
        "arm": cost.arm,
        "network": cost.model,
        "input": f"{cost.size[0]} x {cost.size[1]}, {cost.classes} classes",
        "parameters": f"{cost.parameters / 1e6:.2f} M",
        "steps": f"{cost.steps:,}",
        "images seen": f"{cost.images:,}",
        "FLOPs": f"{cost.flops:.2g}",
    }
    return {**row, "GPU time": format_duration(3600 * cost.gpu_hours)} if gpu else row


def _show_table(title: str, rows: Rows, console: Console) -> None:
    """Print a table; in a pipe one line per row, separated by tabs."""
    console.print(f"[bold]{escape(title)}[/]", highlight=False)
    if not console.is_terminal:
        for line in (list(rows[0]), *(list(row.values()) for row in rows)) if not console.quiet else ():
            print("\t".join(line), file=console.file)  # not by rich, which makes spaces of tabs
        return
    table = Table(box=None, header_style="bold")
    for number, name in enumerate(rows[0]):
        table.add_column(escape(name), justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row.values()))
    console.print(table)
