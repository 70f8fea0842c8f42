"""`vitclinic corrupt`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vitclinic.cli.common import Quiet, Verbose, app, console_for, resumable


class Form(StrEnum):
    """How images are written."""

    parquet = "parquet"
    png = "png"


@app.command()
def corrupt(
    data: Annotated[str, typer.Argument(metavar="DATA", help="As `vitclinic list datasets` says.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the copies go, one folder each.")],
    corruption: Annotated[str, typer.Option(metavar="A,B", help="Names, 15 (the benchmark's) or all 19.")] = "all",
    severity: Annotated[str, typer.Option(metavar="1,2", help="1 to 5, or all.")] = "all",
    form: Annotated[Form, typer.Option("--format", help="parquet, or a folder of PNG files.")] = Form.parquet,
    split: Annotated[str, typer.Option(help="train, val, test or all.")] = "test",
    limit: Annotated[int | None, typer.Option(help="At most so many images of a split, stratified.")] = None,
    size: Annotated[int | None, typer.Option(help="Pixels a side; the data's own unless given.")] = None,
    seed: Annotated[int, typer.Option(help="Of whatever is random in corrupting.")] = 0,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Write corrupted copies of a data set, as CIFAR-10-C and ImageNet-C are of theirs: noise, blur, weather, JPEG, ...

    \b
    vitclinic corrupt photos/ --out photos-c                         all 19 corruptions at 5 severities
    vitclinic corrupt cifar10/ --out c --corruption fog --severity 3  one of them
    vitclinic examine runs/a --data photos-c/fog-3                   measure on one

    The same command goes on where it was interrupted. What the corruptions are: docs/corrupt.md.
    """
    with resumable("what has been written is kept"):
        from vitclinic.data.corruptions.copies import corrupt_data
        from vitclinic.exam.display import Display

        console = console_for(verbose, quiet)
        with Display(console) as display:
            folders = corrupt_data(
                data,
                out,
                corruptions=corruption,
                severities=severity,
                form=form.value,
                split=split,
                limit=limit,
                size=size,
                seed=seed,
                progress=display.on_progress,
            )
        console.print(f"{len(folders)} corrupted cop{'y' if len(folders) == 1 else 'ies'} in {out}", markup=False)
