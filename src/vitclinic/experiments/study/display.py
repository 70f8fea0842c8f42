"""What a person sees of a study that goes on: one bar for all its runs, with the time left."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID
from rich.table import Table

from vitclinic._core import display
from vitclinic._core.statistics import t_interval
from vitclinic._core.time import format_duration
from vitclinic.experiments.runner import Outcome, Watcher
from vitclinic.experiments.study.conduct import Result
from vitclinic.experiments.study.costs import ASSUMPTION, ArmCost, Plan
from vitclinic.experiments.study.verdicts import ENOUGH_SEEDS, Comparison


class Display(display.Display, Watcher):
    """Shows on `console` how far a study is. Use as a context manager around `study`."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, "{task.percentage:>3.0f}%", "{task.fields[left]}")
        self.task: TaskID | None = None
        self.left = TimeLeft()
        self.diverged = self.failed = 0

    def on_outcome(self, outcome: Outcome) -> None:
        self.diverged += outcome.status == "diverged"
        self.failed += outcome.status == "failed"

    def on_progress(self, done: float, total: int) -> None:
        if self.task is None:
            self.task = self.bar.add_task("", total=total, left="")
        words = [f"run {min(int(done) + 1, total)} of {total}"]
        words += [f"{self.diverged} diverged"] * (self.diverged > 0) + [f"{self.failed} failed"] * (self.failed > 0)
        left = self.left.after(done, total, time.monotonic())
        told = "" if left is None else f"about {format_duration(left)} left"
        self.bar.update(self.task, completed=done, total=total, description=", ".join(words), left=told)


class TimeLeft:
    """How long the rest will take, by what has been trained so far.

    A run that was found ended, or failed at once, comes whole and in no time: it says nothing of the others' length.

    Example:
        >>> left = TimeLeft()
        >>> [left.after(done, 4, now) for done, now in ((0, 0.0), (1, 0.1), (1.5, 60.1), (2.0, 120.1))]
        [None, None, 300.0, 240.0]
    """

    def __init__(self) -> None:
        self.seconds = self.trained = 0.0
        self.last: tuple[float, float] | None = None

    def after(self, done: float, total: int, now: float) -> float | None:
        """Seconds, or None as long as nothing was trained."""
        if self.last is not None and done - self.last[0] < 1:
            self.trained += done - self.last[0]
            self.seconds += now - self.last[1]
        self.last = done, now
        return round(self.seconds / self.trained * (total - done), 1) if self.trained > 0 else None


Rows = Sequence[dict[str, str]]

_COLOURS = {"reproduced": "green", "not reproduced": "red", "undecided": "yellow"}


def show_result(result: Result, console: Console) -> None:
    """The verdict, the arms, the comparisons, what went wrong, and where it is."""
    colour = _COLOURS[result.verdict.word]
    _say(console, f"[bold]{escape(result.study.claim)}: [{colour}]{escape(statement(result))}[/][/]")
    _show("arms: mean [95% interval] over seeds", [_arm(result, arm) for arm in result.values], console)
    comparisons = result.verdict.comparisons
    confidence = 100 - 5 / len(comparisons)
    _show(f"comparisons: mean [{confidence:.4g}% interval] over seeds", list(map(_comparison, comparisons)), console)
    alike: dict[tuple[str, str], list[str]] = {}
    for (arm, seed), reason in result.failures.items():
        alike.setdefault((arm, reason), []).append(str(seed))
    for (arm, reason), seeds in alike.items():
        _say(console, f"[red]failed:[/] {escape(arm)}, seed {', '.join(seeds)}: {escape(reason)}")
    for reason, where in _without_numbers(result).items():
        _say(console, f"[yellow]no number:[/] {escape(where)}: {escape(reason)}")
    _say(console, f"training took {format_duration(result.seconds)} in all, by the runs' own record")
    _say(console, f"in full: {escape(str(result.file))}; the runs: {escape(str(result.file.parent / 'pool'))}")
    _say(console, f"report: [bold]{escape(str(result.page))}[/]")


def statement(result: Result) -> str:
    """The verdict in words."""
    text = f"{result.verdict.word}: {result.study.title}"
    if not result.verdict.exploratory:
        return text
    fewest = min(comparison.seeds for comparison in result.verdict.comparisons)
    seeds = f"{fewest} seed{'s' * (fewest != 1)} with all numbers"
    return f"{text} (exploratory: {seeds}, and a verdict takes {ENOUGH_SEEDS})"


def _arm(result: Result, arm: str) -> dict[str, str]:
    statuses = list(result.statuses[arm].values())
    failed = sum(status not in ("finished", "diverged") for status in statuses)
    runs = [str(len(statuses))]
    runs += [f"{statuses.count('diverged')} diverged"] * ("diverged" in statuses) + [f"{failed} failed"] * (failed > 0)
    row = {"arm": arm, "runs": ", ".join(runs)}
    for name, measure in result.study.measures.items():
        numbers = [numbers.get(name, math.nan) for numbers in result.values[arm].values()]
        known = [number for number in numbers if not math.isnan(number)]
        share = f"{sum(known):.0f} of {len(known)}"
        row[f"log10 {name}" if measure.log else name] = share if measure.result == "diverged" else _mean(known)
    return row


def _mean(numbers: Sequence[float]) -> str:
    if not numbers:
        return "-"
    mean, interval = math.fsum(numbers) / len(numbers), t_interval(numbers)
    return f"{mean:.3g}" if interval is None else f"{mean:.3g} [{interval[0]:.3g}, {interval[1]:.3g}]"


def _comparison(one: Comparison) -> dict[str, str]:
    return {
        "says": one.says,
        "measure": one.measure,
        "mean": "-" if math.isnan(one.mean) else f"{one.mean:+.3g}",
        "interval": "-" if math.isnan(one.low) else f"[{one.low:.3g}, {one.high:.3g}]",
        "seeds": f"{one.seeds} ({one.missing} without a number)" if one.missing else str(one.seeds),
        "status": one.status,
    }


def _without_numbers(result: Result) -> dict[str, str]:
    """Reason -> an example of what it left without a number, where a comparison or a whole measure lacks it.

    That a probe of Convs has no number of a ViT is no news, nor that a run that diverged lacks what comes later.
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
    """What a dry run tells."""
    _say(console, f"[bold]{escape(plan.study.claim)}[/]: {escape(plan.study.title)}")
    _show("arms, for one seed", [_cost(cost, plan.scale == "paper") for cost in plan.arms], console)
    seeds = f"{plan.seeds} seed{'s' * (plan.seeds != 1)}"
    arms = f"{len(plan.arms)} arm{'s' * (len(plan.arms) != 1)}"
    _say(console, f"{plan.runs} runs ({arms} x {seeds}), {plan.flops:.2g} FLOPs of training in all")
    if plan.scale == "paper":
        _say(
            console,
            f"about {format_duration(3600 * plan.gpu_hours)} on a GPU, without measuring the runs: {ASSUMPTION}",
        )
    elif plan.minutes is not None:
        _say(console, f"about {format_duration(60 * plan.minutes)} on two cores, by an estimate for training alone")


def _cost(cost: ArmCost, gpu: bool) -> dict[str, str]:
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


def _show(title: str, rows: Rows, console: Console) -> None:
    """A table on a terminal; in a pipe one line each, separated by tabs."""
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


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)
