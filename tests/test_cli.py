"""The command line as a user meets it: its surface, its words, its exit codes."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import vitclinic as vitclinic_package
from tests.processes import run_command
from vitclinic.cli import VERBS


def vitclinic(*arguments, **environment):
    return run_command(*arguments, environment={"COLUMNS": "200", **environment})


def test_the_surface_grows_on_purpose():
    from vitclinic.cli import click_app

    surface = {
        name: sorted(option for parameter in command.params for option in parameter.opts)
        for name, command in click_app().commands.items()
    }
    assert surface == {
        "train": ["--dry-run", "--json", "--quiet", "--resume", "--verbose", "--watch", "-q", "-v", "words"],
        "watch": ["--json", "--port", "--quiet", "--verbose", "-q", "-v", "folder"],
        "transfer": sorted(
            [
                *("words", "--data", "--lrs", "--held-out", "--processes", "--out", "--json"),
                *("--verbose", "-v", "--quiet", "-q"),
            ]
        ),
        "demo": ["--json", "--out", "--quiet", "-q"],
        "anatomy": ["--data", "--json", "target"],
        "examine": sorted(
            [
                *("targets", "--data", "--probes", "--set", "--split", "--limit", "--size", "--batch-size", "--seed"),
                *("--budget", "--quick", "--full", "--report", "--no-report", "--no-images"),
                *("--fail-on", "--baseline", "--junit", "--curves"),
                *("--device", "--random-weights", "--out", "--fresh", "--json", "--verbose", "-v", "--quiet", "-q"),
            ]
        ),
        "features": sorted(
            [
                *("target", "--data", "--out", "-o", "--split", "--limit", "--size", "--batch-size", "--device"),
                *("--json", "--verbose", "-v", "--quiet", "-q"),
            ]
        ),
        "report": sorted(
            ["targets", "--all", "--out", "--no-images", "--title", "--json", "--verbose", "-v", "--quiet", "-q"]
        ),
        "corrupt": sorted(
            [
                *("data", "--out", "--corruption", "--severity", "--format", "--split", "--limit", "--size", "--seed"),
                *("--json", "--verbose", "-v", "--quiet", "-q"),
            ]
        ),
        "predict": sorted(
            [
                *("target", "images", "--out", "-o", "--top-k", "--probabilities", "--temperature", "--size"),
                *("--ask", "--min-score"),
                *("--batch-size", "--workers", "--device", "--json", "--verbose", "-v", "--quiet", "-q"),
            ]
        ),
        "export": sorted(
            ["run", "--to", "--out", "-o", "--push", "--public", "--json", "--verbose", "-v", "--quiet", "-q"]
        ),
        "prescribe": sorted(
            [
                *("words", "--data", "--budget", "--try", "--treatments", "--from", "--seed", "--out"),
                *("--json", "--verbose", "-v", "--quiet", "-q"),
            ]
        ),
        "study": sorted(
            [
                *("words", "--data", "--scale", "--dry-run", "--seeds", "--processes", "--ray", "--slurm"),
                *("--cores", "--gpus"),
                *("--out", "--json", "--target", "--verbose", "-v", "--quiet", "-q"),
            ]
        ),
        "list": ["--json", "pattern", "what"],
        "doctor": ["--json"],
    }


def test_every_verb_that_prints_a_result_prints_it_as_json():
    from vitclinic.cli import click_app

    assert {
        name for name, command in click_app().commands.items() for one in command.params if "--json" in one.opts
    } == {*VERBS}


COMPLETED = """
import sys
from vitclinic.cli import main
try:
    main()
except SystemExit:
    pass
assert "torch" not in sys.modules, "it waits for torch"
"""


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("tra", {"train", "transfer"}),
        ("train --dr", {"--dry-run"}),
        ("train shap", {"shapes"}),
        ("train optim", {"optimizer="}),
        ("export runs/a --to on", {"onnx"}),
        ("list prob", {"probes"}),
    ],
)
def test_the_shell_completes_without_waiting_for_torch(typed, wanted):
    words = ["vitclinic", *typed.split()]
    asked = {"_VITCLINIC_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    command = [sys.executable, "-c", f"import sys; sys.argv = ['vitclinic']\n{COMPLETED}"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **asked}, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == wanted


def test_the_table_of_exit_codes_has_all_of_them():
    from vitclinic._core import errors
    from vitclinic.cli import common

    page = (Path(__file__).parent.parent / "docs" / "commands.md").read_text(encoding="utf-8")
    documented = {
        int(code) for cells in re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE) for code in cells.split(",")
    }
    classes = [one for one in vars(errors).values() if isinstance(one, type) and one is not errors.VitclinicError]
    raised = {one.exit_code for one in classes if issubclass(one, errors.VitclinicError)}
    named = {value for name, value in vars(common).items() if name.isupper() and isinstance(value, int)}
    assert documented == {0, 1, 143} | raised | named  # 1 is typer's own, for a closed pipe


def test_doctor_names_what_is_here(capsys, monkeypatch):
    from vitclinic.cli import main

    monkeypatch.setattr(sys, "argv", ["vitclinic", "doctor", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    facts = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert facts["packages"]["vitclinic"] == vitclinic_package.__version__
    assert {"cores", "gpu", "compiler", "cache", "extras"} <= facts.keys()
    assert facts["extras"]["parquet"] == "installed"


def test_doctor_knows_packages_by_their_own_names(monkeypatch):
    from vitclinic.cli import doctor

    wanted = ["PyYAML>=6; extra == 'here'", "no-such-package; extra == 'gone'"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda package: wanted)
    assert doctor._extras() == {
        "here": "installed",
        "gone": "missing no-such-package: pip install 'vitclinic[gone]'",
    }


def test_help_fits_a_terminal_of_80_columns():
    from vitclinic.cli import click_app

    for name, command in click_app().commands.items():
        lines = inspect.cleandoc(command.help).splitlines()[1:]  # the first is broken where it has to be
        assert [line for line in lines if len(line) > 78] == [], name


def test_help_names_every_key_of_a_recipe():
    from vitclinic.training import Recipe

    help_text = vitclinic("train", "--help").stdout
    assert all(key in help_text for key in Recipe.model_fields)


WITHOUT_TORCH = [
    *(
        ["list", what]
        for what in ("probes", "treatments", "remedies", "studies", "datasets", "recipes", "tasks", "models")
    ),
    ["--help"],
    *([verb, "--help"] for verb in VERBS),
    ["trian"],
    ["train"],
    ["train", "epoch=3"],
    ["train", "optimizer.momentums=1"],
    ["train", "treatments=[samm]"],
    ["train", "treatments=[{sam: {roh: 0.1}}]"],
    ["train", "treatments=[{sam: {rho: wide}}]"],
    ["train", "model=vit_tny"],
    ["train", "task=clasification"],
    ["train", "data=/no/such/place"],
    ["train", "nothing"],
    ["train", "--resume", "/no/run"],
    ["anatomy", "/no/run"],
    ["anatomy", "resnet18"],
    ["anatomy", "timm:resnet18", "--data", "/no/such/place"],
    ["examine", "/no/run"],
    ["examine", "resnet18", "--data", "digits"],
    ["examine", "timm:resnet18", "--probes", "fouriers"],
    ["examine", "timm:resnet18", "--set", "fouriers.x=1"],
    ["examine", "timm:resnet18", "--data", "/no/such/place"],
    ["examine", "timm:resnet1", "--data", "digits"],
    ["examine", "timm:resnet18", "--data", "digits", "--set", "accuracy.bims=3"],
    ["examine", "timm:resnet18", "--data", "digits", "--set", "accuracy.bins=0"],
    ["examine", "timm:resnet18", "--data", "digits", "--set", "sharpness.budget=5x"],
    ["examine", "timm:resnet18", "--data", "digits", "--probes", "norms", "--set", "accuracy.bins=3"],
    ["examine", "timm:resnet18", "--data", "digits", "--budget", "5x"],
    ["examine", "timm:resnet18", "--data", "digits", "--quick", "--full"],
    ["examine", "timm:resnet18", "--data", "digits", "--split", "tset"],
    ["examine", "timm:resnet18", "--data", "digits", "--fail-on", "accuracy"],
    ["examine", "timm:resnet18", "--data", "digits", "--fail-on", "acuracy.accuracy<1"],
    ["study", "C66"],
    ["transfer", "runs/none", "--data", "shapes", "stepz=3"],
    ["features", "resnet18", "--data", "shapes", "-o", "x.parquet"],
    ["features", "timm:resnet18", "--data", "shapes", "-o", "x.csv"],
    ["transfer", "runs/none", "--data", "/no/such/place"],
    ["prescribe", "--data", "shapes", "--budget", "5x"],
    ["prescribe", "--data", "shapes", "model=vit_tny"],
    ["prescribe", "--data", "shapes", "--treatments", "samm"],
    ["prescribe", "--data", "shapes", "--try", "lr x 4"],
    ["prescribe", "--data", "shapes", "--try", "optimizer.rate=1"],
    ["prescribe", "--data", "shapes", "--try", "epochs=3"],
    ["prescribe", "--data", "shapes", "--try", "samm"],
    ["prescribe", "--data", "/no/such/place"],
    ["report", "/no/run"],
    ["predict", "/no/run", "x.png"],
    ["export", "/no/run", "--to", "onnx"],
    ["export", "/no/run", "--to", "onxx"],
    ["predict", "timm:resnet18", "/no/such.png"],
    ["predict", "timm:resnet18", "/no/such.png", "-o", "x.txt"],
    ["corrupt", "/no/such/place", "--out", "copies"],
    ["corrupt", "digits", "--out", "copies", "--corruption", "fgo"],
    ["corrupt", "digits", "--out", "copies", "--severity", "6"],
]


def test_lists_help_and_refusals_do_not_load_torch(tmp_path):
    code = """
import json, sys
from vitclinic.cli import main
loaded = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["vitclinic", *words]
    try:
        main()
    except SystemExit:
        pass
    loaded += [(words, name) for name in ("torch", "timm", "scipy", "plotly") if name in sys.modules]
    if loaded:
        sys.exit(f"{loaded} was loaded")
"""
    command = [sys.executable, "-c", code, json.dumps(WITHOUT_TORCH)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_messages_of_the_library_name_no_flags_of_the_command_line():
    """What Python raises names an option as both ways in have it: `budget`. A whole command may stand in a message."""
    root = Path(vitclinic_package.__file__).parent
    found = []
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and "cli" not in file.relative_to(root).parts:
                texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
                found += [(file.name, t) for t in texts if re.search(r"(?<!train )--[a-z]", str(t))]
    assert not found


def test_the_version_is_printed():
    import vitclinic

    assert vitclinic.__version__ in vitclinic_output("--version")


def vitclinic_output(*arguments):
    return vitclinic(*arguments).stdout


@pytest.mark.parametrize(
    ("given", "count"), [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)]
)
def test_threads_wait_shortly_unless_the_user_says_otherwise(given, count, monkeypatch, capsys):
    from vitclinic.cli import main

    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["vitclinic", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert os.environ.get("GOMP_SPINCOUNT") == count


def test_lists_are_plain_when_piped_and_json_when_asked():
    names = vitclinic_output("list", "models", "vit_tiny*").splitlines()
    assert "vit_tiny_fitted" in names
    assert "vit_tiny_patch16_224" in names
    rows = json.loads(vitclinic_output("list", "recipes", "--json"))
    assert {"name", "about", "command", "time", "expect", "scale"} == set(rows[0])
    assert "digits" in vitclinic_output("list", "datasets")
    (row,) = json.loads(vitclinic_output("list", "treatments", "spatial_smoothing", "--json"))
    assert row["fits"] == "networks with stages of convolutional blocks, each in an nn.Sequential"
    assert row["options"] == {}
    (row,) = json.loads(vitclinic_output("list", "treatments", "sam", "--json"))
    assert row["fits"] == "any network"
    assert row["options"]["rho"] == {"default": 0.1, "description": "length of the ascent; 0 is the plain step"}
    assert "\trho=0.1, adaptive=False" in vitclinic_output("list", "treatments", "sam")
    rows = json.loads(vitclinic_output("list", "probes", "--json"))
    assert all(isinstance(row["needs"], list) and isinstance(row["options"], dict) for row in rows)


@pytest.fixture
def recipe(tmp_path):
    from tests.training.conftest import TINY

    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, "out": str(tmp_path / "run")}))
    return str(path)


def test_ctrl_c_before_the_first_step_is_told(recipe, monkeypatch, capsys):
    from vitclinic import training
    from vitclinic.cli import main

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", interrupted)
    monkeypatch.setattr(sys, "argv", ["vitclinic", "train", recipe])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 130
    assert "interrupted; a run that had begun goes on" in told
    assert "vitclinic train --resume RUN" in told


def test_training_prints_results_and_where_they_are(recipe, tmp_path):
    done = vitclinic("train", recipe)
    assert done.returncode == 0, done.stderr
    assert "val accuracy" in done.stdout
    assert "95% interval" in done.stdout
    assert f'vitclinic.load_model("{tmp_path / "run"}")' in done.stdout
    commands = f"  vitclinic predict {tmp_path / 'run'} IMAGES\n  vitclinic examine {tmp_path / 'run'}\n"
    assert f"next:\n{commands}" in done.stdout
    assert "\x1b" not in done.stdout  # no colours, no progress bar in a pipe


def test_quiet_is_quiet(recipe):
    done = vitclinic("train", recipe, "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train"], 2, "error: Say what to train on: a recipe, such as shapes"),
        (["train", "nothing"], 2, "error: There is no recipe 'nothing'"),
        (["train", "/tmp"], 2, "write data=/tmp"),
        (["train", "digits", "device=abacus"], 2, "there is no device 'abacus'"),
        (["train", "digits", "shapes"], 2, "error: One recipe at a time"),
        (["train", "digits", "optimzer.lr=1"], 2, "Did you mean 'optimizer'?"),
        (["train", "digits", "model=vit_tny"], 2, "error: There is no model 'vit_tny'"),
        (["train", "data=/no/such/place"], 3, "error: There is no data at '/no/such/place'"),
        (["train", "--resume", "/no/run"], 4, "error: '/no/run' is not a run directory"),
        (["train", "digits", "out=/proc/x", "steps=1"], 4, "error: Cannot write '/proc/x"),
        (["train", "digits", "--resume", "x"], 2, "remove 'digits'"),
        (["examine", "resnet18", "--data", "digits"], 2, "error: 'resnet18' is not a target: write timm:resnet18."),
        (["anatomy", "resnet18"], 2, "error: 'resnet18' is not a target: write timm:resnet18."),
        (["anatomy", "timm:resnet188"], 2, "error: There is no model 'resnet188'. Did you mean 'resnet18'?"),
        (["anatomy", "nets:build"], 2, "error: 'nets:build' is not a target: No module named 'nets'"),
        (["list", "nonsense"], 2, "recipes"),
    ],
)
def test_mistakes_are_one_sentence_and_an_exit_code(arguments, code, message, tmp_path, monkeypatch, capsys):
    from vitclinic.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vitclinic", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []  # a mistake leaves nothing behind


def test_a_divergence_has_its_own_exit_code(recipe):
    words = ["optimizer=sgd", "optimizer.lr=1e4", "clip=null", "steps=60", "schedule=constant"]
    done = vitclinic("train", recipe, *words)
    assert done.returncode == 5
    assert "diverged" in done.stdout
    assert "recorded in" in done.stdout


def test_names_of_users_are_not_markup(tmp_path, picture):
    root = tmp_path / "[red]set[/red]"
    for name in ["[bold]a", "b"]:
        (root / name).mkdir(parents=True)
        for number in range(10):
            picture(number, (8, 8)).save(root / name / f"{number}.png")
    done = vitclinic("train", f"data={root}", "steps=1", "model.depth=1", f"out={tmp_path / '[i]run'}")
    assert done.returncode == 0, done.stderr
    assert "[red]set[/red]" in done.stdout
    assert "[i]run" in done.stdout
