"""`vitclinic export`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vitclinic._core.errors import RecipeError
from vitclinic.cli.common import Quiet, Verbose, app, console_for, named_path, resumable


class Form(StrEnum):
    """What a network is written as."""

    timm = "timm"
    hf = "hf"
    onnx = "onnx"
    torch_export = "torch-export"


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, perhaps @CHECKPOINT.")],
    to: Annotated[Form, typer.Option("--to", help="A folder for timm or Hugging Face, or a file.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", parser=named_path, metavar="PATH", help="The folder or file; default: export/ in the run."
        ),
    ] = None,
    push: Annotated[
        str | None, typer.Option("--push", metavar="USER/NAME", help="Also send a folder to the Hugging Face hub.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="A repository that is made by --push is public.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Export the network of a run for other libraries; written only if its logits match.

    \b
    vitclinic export runs/photos --to onnx          runs/photos/export/model.onnx
    vitclinic export runs/photos --to torch-export  runs/photos/export/model.pt2
    vitclinic export runs/photos --to timm          a folder for timm.create_model
    vitclinic export runs/photos --to hf --push me/photos

    Nothing is sent anywhere without --push. More: docs/export.md.
    """
    from vitclinic.training.run import find_run, no_run

    if find_run(run) is None:
        raise no_run(run)
    if push is not None and to not in (Form.timm, Form.hf):
        raise RecipeError("--push sends a folder: use it with --to timm or --to hf.")
    with resumable("nothing was written", same=False):
        from vitclinic.deployment import export as write
        from vitclinic.deployment import push_to_hub

        console = console_for(verbose, quiet or as_json)
        path = write(run, to.value, out)
        address = None if push is None else push_to_hub(path, push, private=not public)
    if as_json:
        typer.echo(json.dumps({"run": run, "to": to.value, "path": str(path), "pushed": address}, indent=2))
    console.print(f"{to.value}: {path} (same logits)", markup=False, highlight=False, soft_wrap=True)
    if address:
        console.print(f"sent: {address}", markup=False, highlight=False, soft_wrap=True)
