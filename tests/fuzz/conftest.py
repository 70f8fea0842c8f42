"""The small world in which faults are tried: data, a recipe, a study, weights and runs."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The folder of a world of this module's own, which becomes the current one."""
    from tests.fuzz.world import build

    before = os.getcwd(), dict(os.environ)
    build(tmp_path_factory.mktemp("fuzz") / "world")
    yield Path.cwd()
    os.chdir(before[0])
    os.environ.clear()
    os.environ.update(before[1])
