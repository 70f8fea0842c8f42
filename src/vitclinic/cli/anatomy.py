"""`vitclinic anatomy`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitclinic._core.errors import AnatomyError, ModelError
from vitclinic.cli.common import app, check_data, console_for

if TYPE_CHECKING:
    from torch import Tensor

    from vitclinic.anatomy import Anatomy
    from vitclinic.exam.targets import Network


@app.command()
def anatomy(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The network, as in the examples.")],
    data: Annotated[
        str | None, typer.Option(metavar="D", help="Data whose images set the size; default: the network's own size.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the units of a network: kinds, stages, grids, parameters, and what is not certain.

    \b
    vitclinic anatomy timm:swin_tiny_patch4_window7_224
    vitclinic anatomy 'timm:vit_tiny_patch16_224?img_size=32&patch_size=4'
    vitclinic anatomy torchvision:resnet50 --data photos/   grids for these images
    vitclinic anatomy mynets:build                          a network of your own
    vitclinic anatomy runs/photos --json                    for programs

    One forward pass shows them; nothing is measured. Structure does not depend on
    weights, so those of timm:, torchvision: and hf: are random and not downloaded
    (hf: reads the configuration). More: docs/anatomy.md.
    """
    from vitclinic.exam.request import check_target

    check_target(target)
    check_data(data)
    console_for(verbose=False, quiet=False)
    found = _find_anatomy(target, data)
    if as_json:
        typer.echo(json.dumps(_as_json(found), indent=2))
    elif sys.stdout.isatty():
        _print_table(found)
    else:
        typer.echo(str(found))


def _find_anatomy(target: str, data: str | None) -> Anatomy:
    import torch

    from vitclinic.anatomy import Anatomy
    from vitclinic.exam.targets import resolve
    from vitclinic.training.run import find_run

    # A file of weights may say what the network is, so that one is read.
    network = resolve(target, torch.device("cpu"), random_weights="@" not in target and find_run(target) is None)
    return Anatomy.of(network.network, _make_example(network, data))


def _make_example(network: Network, data: str | None) -> Tensor:
    """Return an image of noise, of a size that the network takes."""
    import torch

    from vitclinic.anatomy.wrappers import find_example

    shape = _image_shape(network, data)
    if shape is not None:
        return torch.rand(1, *shape, generator=torch.Generator().manual_seed(0))
    try:
        return find_example(network.network, None)
    except AnatomyError as error:
        raise ModelError(f"{network.name} takes images of none of the usual sizes; name some with --data.") from error


def _image_shape(network: Network, data: str | None) -> tuple[int, int, int] | None:
    """Return (channels, height, width) of the data's images, else of those that the network takes, if it is known."""
    from vitclinic.data import open_data
    from vitclinic.models import Normalized

    if data is not None:
        opened = open_data(data, size=network.size, channels=network.channels)
        return opened.channels, *opened.size
    if network.size is not None:
        return network.channels or 3, *network.size
    if not isinstance(network.network, Normalized):
        return None
    published = getattr(network.network.backbone, "pretrained_cfg", None) or {}
    channels, height, width = published.get("input_size") or (3, 224, 224)
    return network.channels or channels, height, width


def _as_json(anatomy: Anatomy) -> dict[str, Any]:
    from vitclinic.anatomy.table import count_outside, list_facts

    return {
        "network": type(anatomy.network).__name__,
        "family": None if anatomy.observed else anatomy.family,
        "observed": anatomy.observed,
        "image": anatomy.image,
        "parameters": sum(parameter.numel() for parameter in anatomy.network.parameters()),
        "parameters_outside_units": count_outside(anatomy),
        "units": [asdict(facts) for facts in list_facts(anatomy)],
        "notes": list(anatomy.notes),
    }


def _print_table(anatomy: Anatomy) -> None:
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    from vitclinic.anatomy.table import NUMBERS, describe, list_cells, list_facts, list_remarks

    columns = list_cells(list_facts(anatomy))
    table = Table(box=None, header_style="bold")
    for title in columns:
        table.add_column(title, justify="right" if title in NUMBERS else "left")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    console = Console()
    console.print(Text(describe(anatomy), style="bold"))
    needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    Console(width=max(console.width, needed)).print(table)  # a narrow terminal breaks lines, and no cell is cut
    for remark in list_remarks(anatomy):
        console.print(Text(remark))
