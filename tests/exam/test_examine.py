"""Examining: stored results are found again, mistakes are sentences, and a network of one's own takes three lines."""

import dataclasses
import inspect
import json
import logging
import sys
import types
from typing import ClassVar

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vitclinic
from tests.probes.subjects import CLASSES, Unknown, noise, vit
from vitclinic._core.errors import DataError, ModelError, RecipeError
from vitclinic._core.records import Measurement, Scalar
from vitclinic.cli import main
from vitclinic.exam.examine import Options
from vitclinic.probes import OwningProbe, Result


class Counting(nn.Module):
    """A ViT that counts the images it has seen."""

    def __init__(self, **keywords):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = vit(**keywords)
        self.images = 0

    def forward(self, x):
        self.images += len(x)
        return self.backbone(x)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_options_are_in_the_signature_and_in_the_docstring():
    options = list(inspect.signature(vitclinic.examine).parameters)
    assert options[:2] == ["targets", "data"]
    assert options[2:] == list(Options.__annotations__)
    assert all(f"    {option}: " in vitclinic.examine.__doc__ for option in options)


def test_a_network_of_ones_own_in_three_lines(tmp_path):
    exam = vitclinic.examine(Unknown(), data="shapes:60", probes=["cost", "norms", "cka"], limit=6)
    assert exam["cost"].scalars["parameters"].value == sum(p.numel() for p in Unknown().parameters())
    assert exam["cka"].status == "does_not_apply"
    assert repr(exam) == "Exam(Unknown; cost: ok, norms: ok, cka: does_not_apply)"
    assert exam.folder.parent.resolve() == tmp_path / "exams"
    with pytest.raises(KeyError, match="Did you mean 'norms'"):
        exam["norm"]


def test_what_is_stored_is_not_computed_again():
    network, data = Counting(), noise()
    first = vitclinic.examine(network, data, probes=["norms"])
    assert not first.reused
    seen = network.images
    second = vitclinic.examine(network, data, probes=["norms"])
    assert network.images == seen  # not one forward pass
    assert second.reused == {"norms"}
    assert second["norms"] == first["norms"]


@pytest.mark.parametrize(
    "change",
    [
        {"limit": 5},
        {"split": "val"},
        {"seed": 1},
        {"data": noise(seed=1)},
        {"fresh": True},
        {"probes": [{"cost": {"repeats": 2, "batch": 3}}]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_anything_that_the_result_depends_on_makes_another_result(change):
    network = Counting()
    options = {"data": noise(), "probes": [{"cost": {"repeats": 2, "batch": 2}}]}
    vitclinic.examine(network, **options)
    assert not vitclinic.examine(network, **(options | change)).reused
    with torch.no_grad():
        network.backbone.head.weight.add_(0.1)
    assert not vitclinic.examine(network, **options).reused


def test_an_option_at_its_default_is_the_same_result():
    network, data = Counting(), noise()
    vitclinic.examine(network, data, probes=["cost"])
    assert vitclinic.examine(network, data, probes=[{"cost": {"repeats": 10}}]).reused == {"cost"}


def test_the_batch_size_does_not_matter_for_what_is_stored():
    network, data = Counting(), noise()
    vitclinic.examine(network, data, probes=["norms"], batch_size=4)
    assert vitclinic.examine(network, data, probes=["norms"], batch_size=5).reused == {"norms"}


class Fickle(OwningProbe):
    """Fails, until it is told not to."""

    name = "fickle"
    working: ClassVar[bool] = False

    def forwards(self, subject):
        return 0

    def measure(self, subject):
        if not Fickle.working:
            raise ValueError("not today")
        return Result({"x": Scalar(value=1.0)})


def test_a_failure_is_stored_and_tried_again(monkeypatch):
    network, data = Counting(), noise()
    exam = vitclinic.examine(network, data, probes=[Fickle(), "norms"])
    assert (exam["fickle"].status, exam["norms"].status) == ("failed", "ok")
    assert Measurement.read(exam.files["fickle"]).reason == "ValueError: not today"
    monkeypatch.setattr(Fickle, "working", True)
    again = vitclinic.examine(network, data, probes=[Fickle(), "norms"])
    assert again["fickle"].status == "ok"
    assert again.reused == {"norms"}


def test_a_kill_between_two_probes_keeps_the_first(monkeypatch):
    class Killed(Fickle):
        name = "killed"

        def measure(self, subject):
            raise KeyboardInterrupt

    network, data = Counting(), noise()
    before = [module.training for module in network.modules()]
    with pytest.raises(KeyboardInterrupt):
        vitclinic.examine(network, data, probes=["norms", Killed()])
    assert [module.training for module in network.modules()] == before
    assert vitclinic.examine(network, data, probes=["norms"]).reused == {"norms"}


def test_a_damaged_file_is_measured_anew(caplog):
    network, data = Counting(), noise()
    first = vitclinic.examine(network, data, probes=["norms"])
    first.files["norms"].write_text("{")
    with caplog.at_level(logging.WARNING):
        again = vitclinic.examine(network, data, probes=["norms"])
    assert not again.reused
    assert "measured again" in caplog.text
    assert again["norms"].units == first["norms"].units


def test_several_networks_and_two_of_one_name():
    one, other = Counting(), Counting(depth=2)
    exams = vitclinic.examine([one, other], noise(), probes=["norms"])
    assert [len(exam["norms"].units) for exam in exams] == [9, 7]
    assert exams[0].folder != exams[1].folder


def test_a_class_count_that_differs_is_a_reason():
    class Labelled(Fickle):
        name = "labelled"
        needs = frozenset({"labels"})

    exam = vitclinic.examine(Counting(), noise(classes=3), probes=[Labelled(), "norms"])
    assert exam["labelled"].status == "does_not_apply"
    assert f"has {CLASSES} outputs and the data 3 classes" in exam["labelled"].reason
    assert exam["norms"].status == "ok"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"data": None}, RecipeError, "Say on which images to examine 'Counting'"),
        ({"data": "/no/such"}, DataError, "There is no data at '/no/such'"),
        ({"split": "tset"}, DataError, "no images in its tset split; it has train (22)"),
        ({"split": "tset"}, DataError, "choose the split train."),
        ({"limit": 1.5}, RecipeError, "'limit' must be a whole number (got 1.5)."),
        ({"size": "32"}, RecipeError, "'size' must be a whole number (got '32')."),
        ({"limit": 0}, RecipeError, "'limit' must be at least 1"),
        ({"callbacks": print}, RecipeError, "'callbacks' has a builtin_function_or_method; derive it from"),
        ({"probes": ["nroms"]}, RecipeError, "Did you mean 'norms'?"),
        ({"data": "digits"}, ModelError, "Counting cannot take the 1 x 8 x 8 images"),
    ],
)
def test_mistakes_are_sentences(arguments, error, message):
    with pytest.raises(error) as caught:
        vitclinic.examine(Counting(), **({"data": noise(), "probes": ["norms"]} | arguments))
    assert message in str(caught.value)


@pytest.mark.parametrize("target", [Counting().state_dict(), Counting, 3])
def test_what_is_no_target_is_one_sentence(target):
    with pytest.raises(RecipeError, match=r"examine\(\) takes a torch.nn.Module, a run, .* \(got "):
        vitclinic.examine(target, noise(), probes=["norms"])


def test_a_mistyped_keyword_names_the_one_that_was_meant():
    with pytest.raises(TypeError, match=r"^examine\(\) got an unexpected keyword .* Did you mean 'budget'"):
        vitclinic.examine(Counting(), noise(), buget="1m")


def test_a_probe_whose_own_images_are_not_there_does_not_apply():
    data = noise()
    without = dataclasses.replace(data, splits={"train": data.splits["train"]})
    exam = vitclinic.examine(Counting(), without, split="train", probes=["lesion", "norms"])
    assert (exam["lesion"].status, exam["norms"].status) == ("does_not_apply", "ok")
    assert exam["lesion"].reason == "it is measured on test images, and the data has none."


def test_want_of_memory_does_not_stop_an_exam():
    class Small(Counting):
        def forward(self, x):
            if len(x) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(x)

    exam = vitclinic.examine(Small(), noise(), probes=["norms"], batch_size=16)
    assert (exam["norms"].status, exam["norms"].provenance.batch_size) == ("ok", 4)


def test_a_network_that_returns_no_logits_is_a_sentence():
    class OneScore(nn.Flatten):
        def forward(self, x):
            return super().forward(x).mean(1)

    with pytest.raises(ModelError, match=r"OneScore returns shape \(1,\) for one image; expected \(1, classes\)"):
        vitclinic.examine(OneScore(), noise())


class Mistaken(nn.Module):
    """A network that fails at its first call."""

    def __init__(self, error):
        super().__init__()
        self.error = error
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        raise self.error


@pytest.mark.parametrize("error", [AttributeError("no 'heads'"), KeyError("x"), NotImplementedError(), OSError("gone")])
def test_whatever_a_network_raises_is_a_sentence(error):
    with pytest.raises(
        ModelError, match=f"Mistaken cannot take the 3 x 16 x 16 images of the data: {type(error).__name__}"
    ):
        vitclinic.examine(Mistaken(error), noise())


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize(
    ("network", "message"),
    [
        (lambda: Unknown().to("meta"), "is on the meta device and has no weights"),
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES)), "has lazy modules without weights"),
        (lambda: torch.jit.trace(Unknown().eval(), torch.rand(1, 3, 16, 16)), "is a TorchScript module"),
        (lambda: torch.export.export(Unknown().eval(), (torch.rand(2, 3, 16, 16),)).module(), "of torch.export, whose"),
    ],
    ids=["meta", "lazy", "script", "exported"],
)
def test_a_network_that_cannot_be_measured_yet_is_a_sentence(network, message):
    told = network()
    with pytest.raises(ModelError, match=message):
        vitclinic.examine(told, noise())
    loader = DataLoader(TensorDataset(torch.rand(2, 3, 16, 16), torch.tensor([0, 1])), 2)
    with pytest.raises(ModelError, match=message):
        vitclinic.examine(told, data=loader)


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command in this process (tests/test_cli.py runs real ones): exit code, stdout, stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["vitclinic", *words])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


def test_the_command_compares_and_stores(tmp_path, command):
    (tmp_path / "nets.py").write_text(
        "import torch, timm\n"
        "def build(depth=2):\n"
        "    torch.manual_seed(0)\n"
        "    return timm.models.VisionTransformer(32, 8, embed_dim=24, depth=depth, num_heads=2, num_classes=10)\n"
        "def deep():\n    return build(3)\n"
    )
    words = ["examine", "nets:build", "nets:deep", "--data", "shapes:60", "--limit", "6", "--probes", "cost,norms"]
    words += ["--set", "cost.repeats=1"]
    code, out, error = command(*words)
    assert code == 0, error
    table = [line.split("\t") for line in out.splitlines() if "\t" in line]
    assert table[0] == ["measured", "nets:build", "nets:deep"]
    assert {row[0] for row in table} >= {"cost.flops", "cost.parameters", "norms.weight_norm"}
    assert "nets:build, nets:deep on 6 test images of shapes:60: under 1 MB of memory at most\n" in out
    assert "\n  shared pass (norms): under 1 MB\n  cost" in out
    assert (tmp_path / "exams" / "report.html").is_file()
    assert "\x1b" not in out
    exams = json.loads(command(*words, "--json")[1])
    assert [exam["target"] for exam in exams] == ["nets:build", "nets:deep"]
    assert all(measured["reused"] for exam in exams for measured in exam["measurements"].values())
    assert exams[0]["measurements"]["norms"]["units"][0]["name"] == "stem"
    assert command(*words, "-q") == (0, "", "")


def test_one_targets_mistake_does_not_hide_the_others_results(tmp_path, command):
    (tmp_path / "fair.py").write_text(
        "from tests.probes.subjects import Unknown\n"
        "def good():\n    return Unknown()\n"
        "def bad():\n    return Unknown().to('meta')\n"
    )
    words = ["examine", "fair:good", "fair:bad", "--data", "shapes:60", "--limit", "4", "--quick"]
    code, out, error = command(*words)
    assert code == 2
    assert "cost.parameters\t" in out
    assert error.strip().endswith("error: fair:bad is on the meta device and has no weights. Load them first.")
    code, out, _ = command(*words, "--json")
    assert (code, [exam["target"] for exam in json.loads(out)]) == (2, ["fair:good"])


def test_grey_data_become_what_the_network_takes(tmp_path, command):
    (tmp_path / "coloured.py").write_text("from tests.probes.subjects import Unknown as build\n")
    words = ["examine", "coloured:build", "--data", "digits", "--limit", "4", "--quick"]
    code, out, error = command(*words)
    assert code == 0, error
    assert "cost.flops\t" in out


@pytest.mark.parametrize("moment", ["measuring", "importing"])
def test_ctrl_c_is_not_a_traceback(moment, command, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    if moment == "measuring":
        monkeypatch.setattr("vitclinic.exam.Examination.open", interrupt)
    else:
        interrupted = types.ModuleType("vitclinic.exam.display")
        interrupted.__getattr__ = interrupt
        monkeypatch.setitem(sys.modules, interrupted.__name__, interrupted)
    code, _, error = command("examine", "timm:resnet18", "--data", "digits")
    assert code == 130
    assert error == "interrupted; what has been measured is stored; run the same command to resume\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["resnet18", "--data", "digits"], 2, "error: 'resnet18' is not a target: write timm:resnet18."),
        (
            ["nets/own.py:build", "--data", "digits"],
            2,
            "error: 'nets/own.py:build' is not a target: a module has no '.py', write 'nets.own:build'.",
        ),
        (["timm:resnet18", "--probes", "nroms", "--data", "digits"], 2, "Did you mean 'norms'?"),
        (["timm:resnet18", "--set", "cost=3", "--data", "digits"], 2, "--set takes PROBE.OPTION=VALUE"),
        (
            ["timm:resnet18", "--probes", "norms", "--set", "cost.repeats=3"],
            2,
            "'cost' is not among the probes, so its options cannot be set. The probes are norms.",
        ),
        (["timm:resnet18", "--random-weights"], 2, "Say on which images"),
        ([], 2, "Missing argument"),
    ],
)
def test_mistakes_on_the_command_line(words, code, message, command):
    ended, _, error = command("examine", *words)
    assert ended == code
    assert message in error


def test_a_network_that_fails_in_a_batch_fails_its_probes_and_not_the_exam(command, tmp_path):
    (tmp_path / "brittle.py").write_text(
        "import timm\n"
        "class Brittle(timm.models.VisionTransformer):\n"
        "    def forward(self, x):\n"
        "        if len(x) > 1:\n"
        "            raise RuntimeError('one at a time')\n"
        "        return super().forward(x)\n"
        "def build():\n"
        "    return Brittle(32, 8, embed_dim=24, depth=2, num_heads=2, num_classes=10)\n"
    )
    code, out, _ = command("examine", "brittle:build", "--data", "shapes:60", "--limit", "6", "--probes", "cost,norms")
    assert code == 6
    assert "cost, norms failed (brittle:build): RuntimeError: one at a time" in out


def test_a_run_on_data_whose_classes_are_called_otherwise(tmp_path):
    from tests.training.conftest import TINY

    class Labelled(Fickle):
        name = "labelled"
        needs = frozenset({"labels"})

        def measure(self, subject):
            return Result({"x": Scalar(value=1.0)})

    run = vitclinic.train({**TINY, "out": str(tmp_path / "run")})
    own = vitclinic.examine(run, probes=[Labelled()], limit=4)
    assert own["labelled"].status == "ok", own["labelled"].reason
    for number in range(10):
        (tmp_path / "photos" / f"digit {number}").mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "photos" / f"digit {number}" / "a.png")
    exam = vitclinic.examine(run, data=tmp_path / "photos", split="train", probes=[Labelled()])
    assert exam["labelled"].status == "does_not_apply"
    assert "output 0 of the network is" in exam["labelled"].reason
