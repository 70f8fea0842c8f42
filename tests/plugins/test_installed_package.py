"""What an installed package brings is equal to ours: listed, trained with, planned, measured, reported, found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

MODULE = '''
"""A package that knows vitclinic; vitclinic does not know it."""

import torch
from torch import nn

from vitclinic.anatomy import OFF_GRID, Family, Residual, Silence, Unit, into, out_of
from vitclinic.exam.findings import Verdict, rule
from vitclinic.probes import FigureSpec, OwningProbe, Result, Scalar, unit_row
from vitclinic.reports import Figure, Table, draws
from vitclinic.tasks import Classification
from vitclinic.treatments import Treatment


class Oddness(OwningProbe):
    """Share of the weights that are odd."""

    name = "oddness"
    group = "Oddities"
    rank = 1
    title = "Odd weights"
    question = "How odd is it?"
    paper = "Odd et al. 2027, Fig. 1"
    key_scalars = {"share": "lower"}
    figures = (
        FigureSpec(
            name="oddness-units", kind="units", values={"odd": "odd"}, title="Odd by depth", reading="Up. Down."
        ),
    )
    needs = frozenset({"anatomy"})
    least: int = 1

    def forwards(self, subject):
        return 0.0

    def measure(self, subject):
        share = Scalar(value=0.5, low=0.4, high=0.6)
        return Result({"share": share}, units=[unit_row(unit, odd=share) for unit in subject.anatomy.units])


class Drawn(OwningProbe):
    """Something that is drawn by code."""

    name = "drawn"
    rank = 2

    def forwards(self, subject):
        return 0.0

    def measure(self, subject):
        return Result({"one": Scalar(value=1.0)})


@draws("drawn")
def drawing(exams):
    return [Figure("drawn", "Drawn by the package", "One. Two.", "", Table(("a",), [(1,)]))]


@rule("Odd", ("oddness.share",), threshold="above 0.3", source="theirs", basis="heuristic")
def odd(evidence):
    share = evidence.number("oddness.share")
    return Verdict("problem", f"{share.value:.0%} of the weights are odd.", {"oddness.share": share})


class Grey(Treatment):
    """Images without colour."""

    name = "grey"
    changes = "colours are gone"
    costs = "nothing"

    def operate(self, network, spec):
        network.register_buffer("greyness", torch.ones(1))
        return network


class OddTask(Classification):
    """Tell odd classes apart."""

    name = "odd_task"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return x + self.conv(x)


class OddNet(nn.Module):
    """A network that no library has."""

    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, 4, 4, 4), nn.Sequential(Block(), Block()), nn.Linear(4, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def units(network):
    yield Unit("stem", "stem", 0, network.stem, into(network), out_of(network.stem))
    for i, block in enumerate(network.blocks):
        branch = out_of(block.conv)
        yield Unit(f"blocks.{i}.conv", "conv", 0, block.conv, into(block), out_of(block), block=f"blocks.{i}",
                   residual=Residual(into(block), branch, out_of(block)), removal=Silence(branch))
    yield Unit("head", "head", 0, network.head, out_of(block), out_of(network, OFF_GRID))


FAMILY = Family("odd nets", ("oddities.OddNet",), units, input_size=lambda network: (3, 32, 32))
'''

ENTRY_POINTS = """
[vitclinic.probes]
oddness = oddities:Oddness
drawn = oddities:Drawn

[vitclinic.rules]
odd = oddities:odd

[vitclinic.figures]
drawn = oddities:drawing

[vitclinic.treatments]
grey = oddities:Grey

[vitclinic.tasks]
odd_task = oddities:OddTask

[vitclinic.families]
odd-nets = oddities:FAMILY
"""

SCRIPT = """
import contextlib, io, json, sys
from vitclinic.cli import app

printed = {}
for name, words in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        app(words, standalone_mode=False)
    printed[name] = out.getvalue() + err.getvalue()
print(json.dumps(printed))
"""

SMALL = [
    *("data=shapes:40", "model=vit_tiny_patch16_224", "model.patch_size=8", "model.embed_dim=24", "model.depth=1"),
    *("model.num_heads=2", "steps=1", "epochs=null", "batch_size=20", "schedule.warmup=0"),
]

COMMANDS = {
    **{noun: ["list", noun] for noun in ("probes", "treatments", "tasks")},
    "train": ["train", *SMALL, "treatments=[grey]", "task=odd_task", "out=runs/odd"],
    "examine": ["examine", "runs/odd", "--budget", "2s", "--limit", "8"],
    "stranger": ["examine", "oddities:OddNet", "--data", "shapes:40", "--limit", "8", "--probes", "oddness,norms"],
    "report": ["report", "runs/odd"],
}


class Text(HTMLParser):
    """The headings of a page, and all its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands ran, of a Python in whose path the package is installed."""
    folder = tmp_path_factory.mktemp("plugins")
    installed = folder / "site-packages"
    information = installed / "oddities-1.0.dist-info"
    information.mkdir(parents=True)
    (installed / "oddities.py").write_text(MODULE)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: oddities\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(COMMANDS)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder / "printed.json").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "printed.json").read_text())
    return found


def measurement(folder: Path, probe: str) -> dict:
    (path,) = folder.glob(f"{probe}-*.json")
    return json.loads(path.read_text())


def test_it_is_listed(printed: dict[str, str]) -> None:
    assert "oddness\tShare of the weights that are odd.\tanatomy\tleast=1" in printed["probes"]
    assert "grey\tcolours are gone\tnothing\tany network" in printed["treatments"]
    assert "odd_task\tTell odd classes apart." in printed["tasks"]


def test_it_trains(folder: Path) -> None:
    recipe = (folder / "runs" / "odd" / "recipe.yaml").read_text()
    assert "grey" in recipe
    assert "odd_task" in recipe


def test_it_is_planned_first_by_its_rank_and_measured(folder: Path, printed: dict[str, str]) -> None:
    assert re.search(r"\boddness\b", printed["examine"])
    found = measurement(folder / "runs" / "odd" / "exams", "oddness")
    assert found["status"] == "ok"
    assert found["facts"]["question"] == "How odd is it?"
    assert found["facts"]["key_scalars"] == {"share": "lower"}
    plan = json.loads(next((folder / "runs" / "odd" / "exams").glob("*.plan")).read_text())
    assert [entry["probe"] for entry in plan["entries"]][:3] == ["anatomy", "oddness", "drawn"]


def test_it_is_in_summary_and_findings(printed: dict[str, str]) -> None:
    assert re.search(r"oddness\.share\s+0\.5 \[0\.4, 0\.6\]", printed["examine"])
    assert "50% of the weights are odd." in printed["examine"]


@pytest.mark.parametrize("page", ["runs/odd/report.html", "exams/report.html"])
def test_it_has_a_section_of_its_own(folder: Path, page: str) -> None:
    html = (folder / page).read_text()
    assert 'id="group-oddities"' in html
    assert 'id="probe-oddness"' in html
    text = Text(html).text
    for words in ("Oddities", "Odd weights", "How odd is it?", "lower is better", "Odd by depth", "50% of the weights"):
        assert words in text
    assert "Odd et al. 2027, Fig. 1" in text


def test_a_figure_that_takes_code_is_drawn(folder: Path) -> None:
    assert "Drawn by the package" in (folder / "runs" / "odd" / "report.html").read_text()


def test_a_network_of_its_family_has_an_anatomy(folder: Path) -> None:
    (exams,) = (folder / "exams").glob("oddities-OddNet-*")
    assert [unit["name"] for unit in measurement(exams, "oddness")["units"]] == [
        *("stem", "blocks.0.conv", "blocks.1.conv", "head")
    ]
    assert measurement(exams, "norms")["status"] == "ok"
