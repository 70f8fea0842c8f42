"""Draw docs/demo.svg, the README's picture: a real run of the demo, with one look at its progress bar.

python docs/make_picture.py
"""

from __future__ import annotations

import tempfile
from contextlib import chdir
from pathlib import Path

from rich.console import Console

from vitclinic.training import train
from vitclinic.training.display import Display, show_result
from vitclinic.training.trainer import Trainer


class Snapshot(Display):
    """A display that leaves a picture of its bar on the page, two thirds through the run."""

    def on_step(self, trainer: Trainer) -> None:
        super().on_step(trainer)
        if trainer.step == trainer.total_steps * 2 // 3:
            self.console.print(self.bar.get_renderable())


def main() -> None:
    console = Console(record=True, width=112, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print("$ vitclinic demo", style="bold green")
    display = Snapshot(console)
    display.bar.live.console = Console(file=open("/dev/null", "w"))  # noqa: SIM115
    picture = Path(__file__).resolve().parent / "demo.svg"
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        with display:
            run = train("shapes", out="runs/demo", callbacks=[display])
        show_result(run, console)
    picture.write_text(console.export_svg(title="vitclinic"), encoding="utf-8")


if __name__ == "__main__":
    main()
