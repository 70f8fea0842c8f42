"""Shared by all tests: a cache of their own, one thread and fixed draws (results that depend on nothing
else), small pictures.

MKL computes erfinv, which initial weights are drawn with, and sums in an order of the processor's own: `MKL_CBWR` makes
them the same on all, and is read when torch is imported."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image

settings.register_profile("deterministic", derandomize=True, print_blob=False)
settings.load_profile("deterministic")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["VITCLINIC_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _forget_modules_of_the_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Unload what a test imported from a file that it wrote, so that no later test finds a module of that name."""
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    written = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(written):
            del sys.modules[name]


@pytest.fixture
def ends_soon() -> Iterator[None]:
    """Fails a test that waits, as for a pipe that nobody writes to."""

    def ring(number: int, frame: object) -> None:
        pytest.fail("it waits")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def picture() -> Callable[..., Image.Image]:
    """Makes an image of noise: `picture(seed, size=(width, height), mode="RGB")`."""

    def make(seed: int = 0, size: tuple[int, int] = (16, 12), mode: str = "RGB") -> Image.Image:
        values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        return Image.fromarray(values).convert(mode)

    return make


@pytest.fixture
def photo_folder(tmp_path: Path, picture: Callable[..., Image.Image]) -> Path:
    """Two classes with 20 images each of different sizes."""
    root = tmp_path / "photos"
    for label, name in enumerate(["cat", "dog"]):
        (root / name).mkdir(parents=True)
        for number in range(20):
            picture(100 * label + number, (20 + number, 24)).save(root / name / f"{number}.png")
    return root
