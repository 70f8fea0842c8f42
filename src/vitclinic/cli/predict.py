"""`vitclinic predict`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitclinic._core.errors import RecipeError
from vitclinic.cli.common import IMAGES_SKIPPED, Quiet, Verbose, app, console_for, named_path, resumable

if TYPE_CHECKING:
    from rich.console import Console

    from vitclinic.deployment.images import Asked
    from vitclinic.deployment.predictor import ImagePredictor

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
        typer.Option(
            "--out",
            "-o",
            parser=named_path,
            metavar="FILE",
            help="A .csv, .jsonl or .parquet file; default: CSV on stdout.",
        ),
    ] = None,
    top_k: Annotated[int, typer.Option(help="Number of top classes or answers to print.", min=1)] = 5,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also the probability of each class, in columns p(NAME).")
    ] = False,
    ask: Annotated[
        list[str] | None, typer.Option(metavar="QUESTION", help="For vqa: ask this of each image; can be repeated.")
    ] = None,
    min_score: Annotated[
        float | None, typer.Option(help="For detection: the least score of an object; default: 0.5.", min=0, max=1)
    ] = None,
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
    """Classify images with a trained network, or do what else it was trained for.

    \b
    vitclinic predict runs/photos new/ -o new.csv      a folder of images
    vitclinic predict runs/photos cat.jpg 'new/*.png'  files, patterns, to stdout
    find new -name '*.jpg' | vitclinic predict runs/photos - -o new.jsonl
    vitclinic predict runs/photos@last new/ --top-k 3 -o new.parquet
    vitclinic predict runs/roads new/ -o new.csv       segmentation: new_masks/
    vitclinic predict runs/boats new/ -o new.json      detection: COCO's JSON
    vitclinic predict runs/vqa new/ --ask 'is it day'  vqa
    vitclinic predict runs/vqa asked.csv -o new.csv    columns image and question

    Images are prepared as the run's test images were. Probabilities are
    calibrated by a temperature that fits the run's val images. Images that
    cannot be read are reported, skipped and counted; the exit code is then 8.
    More: docs/predict.md.
    """
    from vitclinic.deployment.images import COCO, SUFFIXES, check_output, find_inputs, takes_questions
    from vitclinic.exam.request import check_target

    check_target(target)
    if out is not None:
        check_output(out, (*SUFFIXES, COCO))
    if temperature is not None and not temperature > 0:
        raise RecipeError(f"--temperature must be above 0 (got {temperature}).")
    inputs = find_inputs(images, takes_questions(target))
    with resumable("no table was written" if out else "the rest is missing", same=False):
        from vitclinic.deployment.predict import open_predictor
        from vitclinic.exam.display import Display

        console = console_for(verbose, quiet or as_json, stderr=True)
        with Display(console) as display:
            how = {"size": size, "device": device, "callback": display}
            predictor = open_predictor(target, ask=ask, min_score=min_score, temperature=temperature, **how)
            options = _check_rows(predictor, out, top_k, probabilities)
            predictor.check(inputs)
            predictor.prepare()  # with the calibration, which the rate is not about
            started = time.monotonic()
            rows, kept, skipped = _write(predictor, inputs, out, options, as_json, batch_size, workers)
            seconds = time.monotonic() - started
        read = len(inputs) - len(skipped)
        _show(read, skipped, out, predictor.describe(rows, out), seconds, console)
        if as_json:
            facts = {"target": target, "images": read, "skipped": skipped, "out": out and str(out), "rows": rows}
            facts |= predictor.facts | ({} if out else {"predictions": kept})
            typer.echo(json.dumps(facts, indent=2))
    if skipped:
        raise typer.Exit(IMAGES_SKIPPED)


def _check_rows(predictor: ImagePredictor[Any], out: Path | None, top_k: int, probabilities: bool) -> dict[str, Any]:
    """Return the options of a table that there are for the predictor's task; raise for a file or option of another."""
    from vitclinic.deployment.annotate import Boxes
    from vitclinic.deployment.images import check_output

    if out is not None:
        check_output(out, predictor.results.suffixes)
    if predictor.results is not Boxes:
        return {"top_k": top_k, "probabilities": probabilities}
    if probabilities:
        raise RecipeError("--probabilities is not for the task detection, whose objects have one score; remove it.")
    return {}


def _write(
    predictor: ImagePredictor[Any],
    inputs: list[str | Asked],
    out: Path | None,
    options: dict[str, Any],
    as_json: bool,
    batch_size: int,
    workers: int | None,
) -> tuple[int, list[dict[str, Any]], dict[str, str]]:
    """Write predictions as they come.

    Returns:
        How many rows there are; the rows, if they are to be printed as JSON; and what was skipped.
    """
    from vitclinic.deployment.images import COCO, open_rows
    from vitclinic.deployment.predictor import refuse_nothing_read

    if out is not None and out.suffix == COCO:
        found = predictor.collect(inputs, batch_size, workers)
        found.write(out)
        return len(found.rows()), [], found.skipped
    names = [each if isinstance(each, str) else each.image for each in inputs]
    places = {} if out is None else predictor.results.choose_places(names, out)
    count, kept = 0, list[dict[str, Any]]()
    skipped: dict[str, str] = {}
    with open_rows(out, predictor.results.columns) as write:
        for part in predictor.stream(inputs, batch_size, workers):
            part.save(places)
            rows = part.rows(**options)
            if as_json and out is None:
                kept += rows
            else:
                write(rows)
            count += len(rows)
            skipped |= part.skipped
        # Inside: an output without an image does not appear.
        refuse_nothing_read(len(inputs), skipped, len(inputs) - len(skipped))
    return count, kept, skipped


def _show(read: int, skipped: dict[str, str], out: Path | None, how: str, seconds: float, console: Console) -> None:
    from rich.markup import escape

    from vitclinic._core.callback import say

    for name, why in list(skipped.items())[:TOLD]:
        say(console, f"[yellow]skipped[/] {escape(name)}: {escape(why)}")
    if len(skipped) > TOLD:
        say(console, f"[yellow]skipped[/] {len(skipped) - TOLD} more")
    left = f"; {len(skipped)} image{'s' * (len(skipped) != 1)} skipped" if skipped else ""
    where = f" to [bold]{escape(str(out))}[/]" if out else ""
    rate = f"{read / seconds:.0f} images/s"
    say(console, f"{read} prediction{'s' * (read != 1)} written{where}{left} ({escape(how)}, {rate})")
