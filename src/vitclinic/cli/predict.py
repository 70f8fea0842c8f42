"""`vitclinic predict`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitclinic._core.errors import DataError, RecipeError
from vitclinic.cli.common import IMAGES_SKIPPED, Quiet, Verbose, app, console_for, resumable

if TYPE_CHECKING:
    from rich.console import Console

    from vitclinic.deployment import Predictor

TOLD = 10
"""Unreadable images that are named; the others are counted."""


@app.command()
def predict(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A run, or another network, as for examine.")],
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGES", help="Files, folders, quoted patterns, or - for a list on stdin.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="A .csv, .jsonl or .parquet file; default: CSV on stdout."),
    ] = None,
    top_k: Annotated[int, typer.Option(help="How many of the likeliest classes to tell.", min=1)] = 5,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also the probability of each class, in columns p(NAME).")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="Of the softmax; default: fitted on the run's val images. 1: as trained.")
    ] = None,
    size: Annotated[int | None, typer.Option(help="Pixels a side, for networks that take any size.", min=1)] = None,
    batch_size: Annotated[int, typer.Option(help="Images per batch.", min=1)] = 64,
    workers: Annotated[
        int | None, typer.Option(help="Processes that decode images; default: spare CPUs.", min=0)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object about what was done.")] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Classify images with a trained network.

    \b
    vitclinic predict runs/photos new/ -o new.csv      a folder of images
    vitclinic predict runs/photos cat.jpg 'new/*.png'  files and patterns, to stdout
    find new -name '*.jpg' | vitclinic predict runs/photos - -o new.jsonl
    vitclinic predict runs/photos@last new/ --top-k 3 -o new.parquet

    Images are prepared as the run's test images were. Probabilities are calibrated
    by a temperature that fits the run's val images. Images that cannot be read are
    told, left out and counted; the exit code is then 8. More: docs/predict.md.
    """
    from vitclinic.deployment.images import check_output, find_images
    from vitclinic.exam.request import check_target

    check_target(target)
    if out is not None:
        check_output(out)
    if temperature is not None and not temperature > 0:
        raise RecipeError(f"--temperature must be above 0 (got {temperature}).")
    files = find_images(images)
    with resumable("nothing was written" if out else "the rest is missing", same=False):
        from vitclinic.deployment import Predictor
        from vitclinic.exam.display import Display

        console = console_for(verbose, quiet or as_json, stderr=True)
        started = time.monotonic()
        with Display(console) as display:
            predictor = Predictor(target, temperature=temperature, size=size, device=device, callback=display)
            told, skipped = _write(predictor, files, out, top_k, probabilities, batch_size, workers, as_json)
        _show(predictor, len(files), skipped, out, time.monotonic() - started, console)
        if as_json:
            rows = {} if out else {"predictions": told}
            facts = {"target": target, "images": len(files) - len(skipped), "skipped": skipped, "out": out and str(out)}
            typer.echo(json.dumps({**facts, "temperature": predictor.temperature, **rows}, indent=2))
    if skipped:
        raise typer.Exit(IMAGES_SKIPPED)


def _write(
    predictor: Predictor,
    files: list[str],
    out: Path | None,
    top_k: int,
    probabilities: bool,
    batch_size: int,
    workers: int | None,
    as_json: bool,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Write predictions as they come; return their rows, if they are to be printed as JSON, and what was skipped."""
    from vitclinic.deployment.images import make_rows, open_rows

    kept: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    with open_rows(out) as write:
        for part in predictor.stream(files, batch_size, workers):
            rows = list(make_rows(part.names, part.probabilities, predictor.classes, top_k, probabilities))
            if as_json and out is None:
                kept += rows
            else:
                write(rows)
            skipped |= part.skipped
        if len(skipped) == len(files):  # inside: an output without an image does not appear
            name, why = next(iter(skipped.items()))
            raise DataError(f"None of the {len(files)} images can be read; '{name}': {why}.")
    return kept, skipped


def _show(
    predictor: Predictor, count: int, skipped: dict[str, str], out: Path | None, seconds: float, console: Console
) -> None:
    from rich.markup import escape

    from vitclinic._core.callback import say

    for name, why in list(skipped.items())[:TOLD]:
        say(console, f"[yellow]skipped[/] {escape(name)}: {escape(why)}")
    if len(skipped) > TOLD:
        say(console, f"[yellow]skipped[/] {len(skipped) - TOLD} more")
    read = count - len(skipped)
    left = f", {len(skipped)} skipped" if skipped else ""
    where = f" in [bold]{escape(str(out))}[/]" if out else ""
    how = f"temperature {predictor.temperature:.3g}"
    say(console, f"{read} image{'s' * (read != 1)} predicted{left}{where} ({how}, {read / seconds:.0f} images/s)")
