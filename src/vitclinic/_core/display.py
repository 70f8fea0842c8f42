"""The base of terminal displays: progress bars and lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn, TaskID


class Display:
    """Progress bars and lines on `console`; a context manager around the work.

    Bars are drawn on a terminal only, and vanish at the end.

    Args:
        console: The console to print to.
        columns: Columns to the right of a bar: columns of rich, or their formats.
    """

    def __init__(self, console: Console, *columns: ProgressColumn | str) -> None:
        from rich.progress import BarColumn, Progress  # importing vitclinic does without rich

        self.console = console
        self.bar = Progress(
            "{task.description}",
            BarColumn(bar_width=24),
            *columns,
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def advance(self, what: str, done: float, total: float) -> None:
        """Update the bar of `what`, which is hidden once everything is done."""
        if what not in self.tasks:
            self.tasks[what] = self.bar.add_task(what, total=total)
        self.bar.update(self.tasks[what], completed=done, total=total, visible=done < total)

    def say(self, text: str) -> None:
        """Print a line, which may contain rich markup; the terminal wraps it."""
        self.console.print(text, soft_wrap=True, highlight=False)
