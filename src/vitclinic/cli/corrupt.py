"""`vitclinic corrupt`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vitclinic.cli.common import Quiet, Verbose, app, check_data, console_for, named_path, resumable


class Form(StrEnum):
    """File format of the copies."""

    parquet = "parquet"
    png = "png"


@app.command()
def corrupt(
    data: Annotated[str, typer.Argument(metavar="DATA", help="The data to corrupt: see `vitclinic list datasets`.")],
    out: Annotated[
        Path, typer.Option(parser=named_path, metavar="DIR", help="Folder for the copies, one sub-folder each.")
    ],
    corruption: Annotated[
        str, typer.Option(metavar="A,B", help="Names; 15: those of the benchmark; all: those and 4 more.")
    ] = "all",
    severity: Annotated[str, typer.Option(metavar="1,2", help="1 (weak) to 5 (strong), or all.")] = "all",
    form: Annotated[Form, typer.Option("--format", help="parquet files, or folders of PNG files.")] = Form.parquet,
    split: Annotated[str, typer.Option(help="train, val, test or all.")] = "test",
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most this many images of a split, class-balanced.")
    ] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Pixels a side; default: as in the data.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random corruptions, such as noise.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Write corrupted copies of your data, as in CIFAR-10-C and ImageNet-C.

    \b
    vitclinic corrupt photos/ --out photos-c          19 corruptions, 5 severities
    vitclinic corrupt photos/ --out c --corruption fog,snow --severity 3
    vitclinic examine runs/a --data photos-c/fog-3    measure on one of them

    Noise, blur, weather, JPEG and others; docs/corrupt.md shows them all. After
    an interruption, run the same command to continue.
    """
    from vitclinic.data.corruptions.parameters import list_cells

    list_cells(corruption, severity)
    check_data(data)
    with resumable("what has been written is kept"):
        from vitclinic.data.corruptions.copies import corrupt_data
        from vitclinic.exam.display import Display

        console = console_for(verbose, quiet or as_json)
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
        if as_json:
            typer.echo(json.dumps({"out": str(out), "folders": [str(folder) for folder in folders]}, indent=2))
        console.print(f"{len(folders)} corrupted cop{'y' if len(folders) == 1 else 'ies'} in {out}", markup=False)
