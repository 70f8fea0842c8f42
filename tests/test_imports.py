"""The import direction of ARCHITECTURE.md, and a public surface that is really there."""

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import grimp

import vitclinic

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


def test_every_public_name_is_there():
    for name in vitclinic.__all__:
        assert getattr(vitclinic, name) is not None


def test_docstring_examples_run():
    import doctest
    import importlib
    import pkgutil

    tried = 0
    for module in pkgutil.walk_packages(vitclinic.__path__, "vitclinic."):
        if module.name.endswith("__main__"):
            continue
        result = doctest.testmod(importlib.import_module(module.name))
        assert result.failed == 0, module.name
        tried += result.attempted
    assert tried >= 8
