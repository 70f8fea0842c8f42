"""A prescription on the terminal: the plan, one progress bar, a line per rung, and the evidence at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import TimeRemainingColumn
from rich.table import Table

from vitclinic._core import display
from vitclinic._core.callback import Callback
from vitclinic._core.time import format_duration
from vitclinic.experiments.prescribe.arms import PLAIN, Arm
from vitclinic.experiments.prescribe.ledger import DecidedStage
from vitclinic.experiments.prescribe.plan import Stage
from vitclinic.experiments.prescribe.prescription import Prescription, TriedStage


class Display(display.Display, Callback):
    """The progress of a prescription. Use as a context manager around `prescribe`."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, "{task.percentage:>3.0f}%", TimeRemainingColumn())

    def on_progress(self, what: str, done: float, total: float) -> None:
        self.advance(what, done, total)

    def on_trial_plan(
        self, plan: Sequence[Stage], arms: Sequence[Arm], left_out: Mapping[str, str], used: float, budget: float
    ) -> None:
        names = ", ".join(escape(arm.name) for arm in arms)
        self.say(f"[bold]{len(arms)} treatment{'s' * (len(arms) != 1)} to try:[/] {names}")
        for name, reason in left_out.items():
            self.say(f"[yellow]left out:[/] {escape(name)} ({escape(reason)})")
        for stage in plan:
            seeds = f"{stage.seeds} seed{'s' * (stage.seeds != 1)}"
            what = "fresh seeds, on test" if stage.name == "final" else f"{seeds}, on val"
            what = f"{stage.seeds} {what}" if stage.name == "final" else what
            self.say(
                f"  {stage.name}: {stage.arms} arms x {what}, {format_duration(stage.seconds)} per trial,"
                f" about {format_duration(stage.planned)}"
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
    console.print(_final_table(found))
    console.print(_selection_table(found))
    if found.file is not None:
        file = escape(str(found.file))
        _say(console, f"recipe: [bold]{file}[/]; train with: vitclinic train {file}")
        if found.cost_ratio > 1.1:
            _say(
                console,
                f"a step costs {found.cost_ratio:.2f} times a plain one, so its trials had fewer steps",
            )
    _say(console, f"all numbers: [bold]{escape(str(found.folder / 'prescription.json'))}[/]")


def _final_table(found: Prescription) -> Table:
    table = Table(title="Final comparison: test accuracy, fresh seeds", title_justify="left", box=None)
    for column in ("arm", "steps", *(f"seed {seed}" for seed in found.final.seeds), "mean"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    steps = {trial.arm: str(trial.steps) for trial in found.final.trials}
    for arm in (PLAIN, found.winner.name):
        values = [*found.final.accuracies(arm), found.final.mean(arm)]
        diverged = found.final.diverged(arm)
        name = f"{arm} ({diverged} diverged)" if diverged else arm
        table.add_row(escape(name), steps[arm], *(f"{value:.1%}" for value in values))
    return table


def _selection_table(found: Prescription) -> Table:
    """Return the mean val accuracy of every arm minus the plain recipe's, rung by rung."""
    table = Table(title="Selection (optimistic): val accuracy minus that of plain", title_justify="left", box=None)
    table.add_column("arm")
    for rung in found.rungs:
        table.add_column(rung.name, justify="right")
    arms = dict.fromkeys(arm for rung in reversed(found.rungs) for arm in rung.arms)
    for arm in arms:
        cells = []
        for rung in found.rungs:
            if arm not in rung.arms:
                cells.append("failed" if arm in rung.failed else "")
            elif arm == PLAIN:
                cells.append(f"{rung.mean(arm):.1%}")
            else:
                diverged = " diverged" if rung.diverged(arm) else ""
                cells.append(f"{rung.mean(arm) - rung.mean(PLAIN):+.1%}{diverged}")
        table.add_row(escape(arm), *cells)
    return table


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)
