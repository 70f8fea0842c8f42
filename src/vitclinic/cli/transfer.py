"""`vitclinic transfer`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitclinic._core.errors import RecipeError
from vitclinic.cli.common import (
    Quiet,
    Verbose,
    app,
    check_recipe,
    console_for,
    named_path,
    recipe_and_changes,
    resumable,
)

if TYPE_CHECKING:
    from rich.console import Console

    from vitclinic.experiments.transfer import Transfer


@app.command()
def transfer(
    words: Annotated[list[str], typer.Argument(metavar="INIT [KEY=VALUE]", help="The weights, then recipe keys.")],
    data: Annotated[str, typer.Option(metavar="D", help="The images to fine-tune on.")],
    lrs: Annotated[
        str, typer.Option(metavar="LR,LR", help="Learning rates to choose among.")
    ] = "0.001,0.003,0.01,0.03",
    held_out: Annotated[float, typer.Option(metavar="SHARE", help="Training images that the rate is chosen on.")] = 0.1,
    processes: Annotated[int, typer.Option(metavar="N", min=1, help="How many runs to train at a time.")] = 1,
    out: Annotated[Path, typer.Option(parser=named_path, metavar="DIR", help="Folder for runs and result.")] = Path(
        "transfer"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Fine-tune pretrained weights on other images, by chen2022's protocol.

    \b
    vitclinic transfer runs/pretrained --data flowers/
    vitclinic transfer timm:vit_small_patch16_224 --data pets/ batch_size=64
    vitclinic transfer runs/pretrained --data cifar10/ steps=10000 --held-out 0.02

    Chooses the learning rate on a sub-split of the training images, then trains
    on all of them and scores the test images once. After an interruption, run
    the same command to continue. INIT is what `init=` of a recipe takes.
    """
    init, changes = recipe_and_changes(words)
    if init is None:
        raise RecipeError("Which weights? Name a run, timm:NAME, torchvision:NAME, hf:NAME or a file.")
    check_recipe(None, changes, data)
    rates = _parse_rates(lrs)
    console = console_for(verbose, quiet or as_json)
    with resumable("every run is saved"):
        from vitclinic.experiments.display import StudyDisplay
        from vitclinic.experiments.transfer import transfer as conduct

        with StudyDisplay(console) as display:
            found = conduct(
                init,
                data,
                changes,
                lrs=rates,
                held_out=held_out,
                out=out,
                processes=processes,
                callbacks=[display],
            )
    if as_json:
        typer.echo(json.dumps(found.plain(), indent=2))
    _show(found, console)


def _parse_rates(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise RecipeError(f"--lrs takes numbers with commas between them (got '{text}').") from None


def _show(found: Transfer, console: Console) -> None:
    from rich.table import Table

    from vitclinic.tasks import headlines

    metric = next(each for each in found.run.recipe.task.metrics if each.name == found.metric)
    table = Table(title=f"{found.init}: transfer")
    for column in ("learning rate", f"{found.metric} on the sub-split", "on test, trained on all"):
        table.add_column(column, justify="right")
    scores = ", ".join(f"{each.name} {each.show(found.test[each.name])}" for each in headlines(found.run.recipe.task))
    for lr, value in found.trials.items():
        shown = "diverged" if value is None else metric.show(value)
        table.add_row(f"{lr:g}", shown, scores if lr == found.lr else "")
    console.print(table)
    console.print(f"run: {found.path}", soft_wrap=True)
