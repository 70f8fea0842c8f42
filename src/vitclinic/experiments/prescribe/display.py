"""What a person sees of a prescription: the plan, one bar for all of it, a line a rung, the evidence at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import TimeRemainingColumn
from rich.table import Table

from vitclinic._core import display
from vitclinic._core.time import format_duration
from vitclinic.experiments.prescribe.arms import PLAIN, Arm
from vitclinic.experiments.prescribe.callback import Watcher
from vitclinic.experiments.prescribe.ledger import Decided
from vitclinic.experiments.prescribe.plan import Stage
from vitclinic.experiments.prescribe.prescription import Prescription
from vitclinic.experiments.prescribe.selection import Tried


class Display(display.Display, Watcher):
    """Shows a prescription on `console`. Use as a context manager around `prescribe`."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, "{task.percentage:>3.0f}%", TimeRemainingColumn())

    def on_reading(self, what: str, done: int, total: int) -> None:
        self.advance(f"{what} images", done, total)

    def on_measuring(self, arm: str, done: int, total: int) -> None:
        self.advance("measuring the cost of a step", done + 1, total)

    def on_plan(
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
                f"  {stage.name}: {stage.arms} arms x {what}, {format_duration(stage.seconds)} a trial,"
                f" about {format_duration(stage.planned)}"
            )
        rest = sum(stage.planned for stage in plan)
        self.say(f"about {format_duration(rest)} in all, of a budget of {format_duration(budget)}")

    def on_stage(self, decided: Decided) -> None:
        steps = ", ".join(f"{escape(arm.name)} {decided.steps[arm.name]}" for arm in decided.arms)
        self.say(f"[bold]{decided.stage.name}[/], {format_duration(decided.stage.seconds)} a trial; steps: {steps}")

    def on_progress(self, done: float, total: float) -> None:
        self.advance("trials", done, total)

    def on_tried(self, tried: Tried, kept: Sequence[str]) -> None:
        self.say(f"  {tried.name} keeps {', '.join(map(escape, kept))}")


def show_prescription(found: Prescription, console: Console) -> None:
    """The verdict first, then the evidence, then where it is."""
    colour = "green" if found.verdict == "helps" else "yellow"
    console.print(f"[{colour}]{escape(found.statement)}[/]", soft_wrap=True, highlight=False)
    console.print(_final_table(found))
    console.print(_selection_table(found))
    if found.file is not None:
        file = escape(str(found.file))
        _say(console, f"the recipe: [bold]{file}[/]; go on with: vitclinic train {file}")
        if found.cost_ratio > 1.1:
            _say(console, f"a step of it costs {found.cost_ratio:.2f} times a plain one, and the trials made up for it")
    _say(console, f"in full: [bold]{escape(str(found.folder / 'prescription.json'))}[/]")


def _final_table(found: Prescription) -> Table:
    table = Table(title="final comparison: test accuracy, fresh seeds", title_justify="left", box=None)
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
    """Every arm's mean val accuracy in each rung, in which it was, less the plain recipe's."""
    table = Table(title="selection, optimistic: val accuracy less that of plain", title_justify="left", box=None)
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
