"""The import direction of ARCHITECTURE.md, and a public surface that is really there."""

import subprocess
import sys
from pathlib import Path

import vitclinic

ROOT = Path(__file__).parent.parent


def test_the_import_direction_holds():
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


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
