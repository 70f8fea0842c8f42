"""`vitclinic anatomy`: every kind of target, text and JSON, and sentences where there is nothing to show."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import timm
from safetensors.torch import save_file

from vitclinic.anatomy import Anatomy
from vitclinic.cli import main

TINY = "img_size=32&patch_size=8&embed_dim=24&depth=1&num_heads=2&num_classes=5"
KEYWORDS = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 5}
NETS = """
import timm
from tests.anatomy.handwritten import LinearPatchViT, FlipAveraged

def plain():
    return LinearPatchViT()

def twice():
    return FlipAveraged(LinearPatchViT())

def picky():
    from torch import nn

    class Picky(nn.Module):
        def forward(self, x):
            raise RuntimeError("17 x 17 images only")

    return Picky()

def linear():
    import torch
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 224 * 224, 2))
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command in an empty folder, without published weights: (exit code, stdout, stderr)."""
    (tmp_path / "mynets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mynets", raising=False)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vitclinic", "anatomy", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return call


def test_a_network_of_timm_is_printed_as_its_anatomy_is(run):
    code, out, _ = run(f"timm:vit_tiny_patch16_224?{TINY}")
    assert code == 0
    assert out.rstrip("\n") == str(Anatomy.of(timm.create_model("vit_tiny_patch16_224", **KEYWORDS)))


def test_json_has_what_the_table_has_and_more(run):
    code, out, _ = run("torchvision:resnet18", "--data", "digits", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["network"], found["family"], found["observed"]) == ("ResNet", "torchvision ResNet", False)
    assert (found["image"], found["notes"], found["parameters"]) == ([3, 8, 8], [], 11_689_512)
    assert sum(unit["parameters"] for unit in found["units"]) + found["parameters_outside_units"] == 11_689_512
    block = found["units"][1]
    assert (block["name"], block["block"], block["kind"], block["grid"]) == (
        "layer1.0.conv",
        "layer1.0",
        "conv",
        [2, 2],
    )
    assert (block["channels"], block["residual"], block["attention"], block["heads"]) == (64, True, False, None)
    assert block["removal"] == "branch set to zero"


def test_images_have_the_size_that_a_library_s_network_was_made_for(run):
    assert run("torchvision:resnet18")[1].startswith("ResNet on 3 x 224 x 224 images")
    assert run("timm:resnet10t?in_chans=1")[1].startswith("ResNet on 1 x 176 x 176 images")


def test_a_network_of_one_s_own_is_observed_and_doubts_are_told(run):
    code, out, _ = run("mynets:plain")
    assert code == 0
    assert "(observed from one forward pass)" in out
    assert out.startswith("LinearPatchViT on 3 x 32 x 32 images")  # the first size that it takes
    assert run("mynets:twice")[1].splitlines()[-1].startswith("The network runs 2 times")


def test_a_file_of_weights_is_read(run, tmp_path):
    network = timm.create_model("vit_tiny_patch16_224", **KEYWORDS)
    save_file(network.state_dict(), str(tmp_path / "w.safetensors"))
    assert run(f"timm:vit_tiny_patch16_224?{TINY}@w.safetensors")[0] == 0
    code, _, error = run(f"timm:vit_tiny_patch16_224?{TINY}&depth=2@w.safetensors".replace("depth=1&", ""))
    assert code == 2
    assert "do not fit" in error


def test_a_network_without_units_is_a_sentence(run):
    code, out, error = run("mynets:linear")
    assert (code, out) == (2, "")
    assert error.startswith("error: ")
    assert "Traceback" not in error
    assert "shows no units" in error


def test_a_network_that_takes_no_usual_image_is_told_what_to_do(run):
    code, _, error = run("mynets:picky")
    assert code == 2
    assert "mynets:picky takes images of none of the usual sizes; name some with --data." in error


def test_a_terminal_gets_the_same_cells(run, monkeypatch):
    plain = run(f"timm:vit_tiny_patch16_224?{TINY}")[1]
    monkeypatch.setenv("COLUMNS", "70")  # narrower than the table
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, shown, _ = run(f"timm:vit_tiny_patch16_224?{TINY}")
    assert code == 0
    assert re.sub(r"\x1b\[\d+m", "", shown).split() == plain.split()


def test_a_run_is_a_target(run, tmp_path):
    import vitclinic

    model = {"name": "vit_tiny_patch16_224", "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}
    vitclinic.train({"data": {"source": "shapes:60"}, "batch_size": 8}, steps=1, model=model, out=str(tmp_path / "run"))
    found = json.loads(run("run", "--json")[1])
    assert found["image"] == [3, 32, 32]
    assert [unit["grid"] for unit in found["units"]] == [[4, 4]] * 4 + [None]
    assert Path("run").is_dir()
