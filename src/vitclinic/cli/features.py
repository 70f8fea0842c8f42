"""`vitclinic features`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from vitclinic.cli.common import Quiet, Verbose, app, check_data, console_for, named_file, resumable


@app.command()
def features(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A run, timm:NAME, torchvision:NAME, hf:NAME ...")],
    out: Annotated[
        Path, typer.Option("--out", "-o", parser=named_file, metavar="FILE", help="The parquet file to write.")
    ],
    data: Annotated[str | None, typer.Option(metavar="D", help="The images; default: a run's own.")] = None,
    split: Annotated[str | None, typer.Option(help="train, val or test; default: all.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many images of a split.")] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Pixels a side, for networks that take any.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Write one embedding for each image, with its label and path.

    \b
    vitclinic features runs/photos -o photos.parquet
    vitclinic features hf:facebook/dinov2-small --data photos/ -o photos.parquet
    vitclinic features timm:resnet18 --data photos/ --split test -o test.parquet

    An embedding is what the classifier reads, or what a network without one
    returns. TARGET is what `vitclinic examine` takes. More: docs/features.md.
    """
    from vitclinic.exam.request import check_features_file, check_split, check_target

    check_features_file(str(out))
    check_target(target)
    check_data(data)
    if split is not None:
        check_split(split)
    with resumable("nothing is written", same=False):
        from vitclinic.exam.display import Display
        from vitclinic.exam.features import features as compute

        console = console_for(verbose, quiet or as_json)
        with Display(console) as display:
            found = compute(
                target,
                data,
                split=split,
                limit=limit,
                size=size,
                batch_size=batch_size,
                device=device,
                out=out,
                callbacks=(display,),
            )
    count, width = found.embeddings.shape
    if as_json:
        typer.echo(json.dumps({"target": target, "out": str(out), "embeddings": count, "channels": width}, indent=2))
    console.print(f"{count:,} embeddings of {width} channels in {out}", soft_wrap=True, markup=False)
