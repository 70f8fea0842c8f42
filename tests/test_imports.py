"""The import direction of ARCHITECTURE.md, and a public surface that is really there."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import grimp
import pytest

import vitclinic
from vitclinic._core import LazyPackage

ROOT = Path(__file__).parent.parent


def test_the_import_direction_holds():
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_modules_with_one_importer_have_a_reason():
    """ARCHITECTURE.md gives one for each, and for none that is not such a module."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.partition("## Modules with one importer")[2].partition("\n## ")[0]
    patterns = [
        name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)
    ]
    graph = grimp.build_graph("vitclinic", cache_dir=None)
    leaves = [module for module in graph.modules if not graph.find_children(module)]
    alone = [
        module.removeprefix("vitclinic.")
        for module in leaves
        if len(graph.find_modules_that_directly_import(module)) == 1
    ]
    assert not [module for module in alone if not any(fnmatch(module, pattern) for pattern in patterns)]
    assert not [pattern for pattern in patterns if not any(fnmatch(module, pattern) for module in alone)]


def test_the_files_that_architecture_names_are_there():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:\w+/)+\w*(?:\.py)?)`", text):
        assert (ROOT / "src" / "vitclinic" / name).exists() or (ROOT / name).exists(), name


PUBLIC = {
    *("examine", "features", "train", "resume", "predict", "export", "push_to_hub", "prescribe", "study", "report"),
    *("transfer", "treat"),
    *("create_model", "load_model", "open_data", "open_study", "build_recipe", "plan_run", "report_studies"),
    *("list_datasets", "list_models", "list_probes", "list_recipes", "list_remedies", "list_studies", "list_tasks"),
    "list_treatments",
    *("Callback", "Dataset", "Exam", "Exams", "Features", "Finding", "Measurement", "Predictions", "Prescription"),
    *("Checkpoint", "Comparison", "Recipe", "Run", "RunPlan", "Study", "StudyResult", "Transfer", "Verdict"),
    *("Answers", "Boxes", "FoundObjects", "Masks", "VitclinicError", "__version__"),
    *("anatomy", "data", "exam", "functional", "models", "probes", "reports", "tasks", "training", "treatments"),
}


def test_the_public_surface_grows_on_purpose():
    assert set(vitclinic.__all__) == set(dir(vitclinic)) == PUBLIC


LAZY = [
    *("", "anatomy", "data", "data.corruptions", "deployment", "exam", "probes", "reports", "tasks", "training"),
    "treatments",
]


@pytest.mark.parametrize("package", LAZY)
def test_every_public_name_is_there(package):
    module = importlib.import_module(f"vitclinic.{package}".rstrip("."))
    assert isinstance(module, LazyPackage)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_importing_vitclinic_and_its_packages_imports_nothing_large():
    packages = ", ".join(f"vitclinic.{package}".rstrip(".") for package in LAZY)
    code = (
        f"import sys, {packages}; sys.exit(any(name in sys.modules for name in ('torch', 'timm', 'numpy', 'plotly')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_subpackages_need_no_import_of_their_own():
    names = "probes.Norms", "treatments.Treatment", "exam.Evidence", "reports.Figure", "training.Run"
    code = f"import vitclinic; print({', '.join(f'vitclinic.{name}.__name__' for name in names)})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "Norms Treatment Evidence Figure Run\n"


@pytest.mark.parametrize(
    "package", ["", *(name for name in sorted(PUBLIC) if isinstance(getattr(vitclinic, name), ModuleType))]
)
def test_public_functions_say_what_they_take(package):
    module = importlib.import_module(f"vitclinic.{package}".rstrip("."))
    functions = [made for name in module.__all__ if inspect.isfunction(made := getattr(module, name))]
    taking = [made for made in functions if inspect.signature(made).parameters]
    assert not [made.__name__ for made in taking if "\nArgs:\n" not in inspect.getdoc(made)]


def test_messages_name_what_is_public():
    """`vitclinic.NAME` or `vitclinic.PACKAGE.NAME`: nothing public lies deeper."""
    files = (ROOT / "src" / "vitclinic").rglob("*.py")
    raised = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Raise)]
    texts = [part.value for node in raised for part in ast.walk(node) if isinstance(part, ast.Constant)]
    named = {name for text in texts for name in re.findall(r"(?<![\w./\[])vitclinic((?:\.[A-Za-z]\w*)+)", str(text))}
    assert {".Callback", ".exam.rule", ".reports.draws"} <= named
    for name in named:
        *packages, attribute = name.split(".")[1:]
        assert len(packages) <= 1, name
        assert attribute in importlib.import_module(".".join(["vitclinic", *packages])).__all__, name


def test_a_function_is_not_hidden_by_the_module_it_is_in():
    code = """
import vitclinic.exam.examine, vitclinic.training.train
from vitclinic.exam import examine
from vitclinic.training import train
assert callable(examine) and callable(train) and vitclinic.exam.examine is examine is vitclinic.examine
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_docstring_examples_run():
    import doctest
    import pkgutil

    tried = 0
    for module in pkgutil.walk_packages(vitclinic.__path__, "vitclinic."):
        if module.name.endswith("__main__"):
            continue
        result = doctest.testmod(importlib.import_module(module.name))
        assert result.failed == 0, module.name
        tried += result.attempted
    assert tried >= 8
