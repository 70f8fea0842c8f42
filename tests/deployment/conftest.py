"""Folders of images with train and test splits, and a run trained on one for a moment."""

import sys

import numpy as np
import pytest
from PIL import Image

import vitclinic

TINY = {"name": "vit_tiny_patch16_224", "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}


def write_photos(root, sizes, suffix="png", count=8):
    """Two classes, each brighter in a channel of its own, in train and test folders."""
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        for label, name in enumerate(("cat", "dog")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                width, height = sizes[number % len(sizes)]
                pixels = random.integers(0, 200, (height // 4, width // 4, 3), dtype=np.uint8)
                pixels[..., label] += 55
                Image.fromarray(pixels).resize((width, height)).save(folder / f"{number}.{suffix}")
    return root


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run on photographs of 32 pixels a side."""
    folder = tmp_path_factory.mktemp("deployed")
    data = write_photos(folder / "photos", [(48, 40), (36, 60)])
    recipe = {"data": {"source": str(data), "augment": "none"}, "model": TINY, "steps": 12, "batch_size": 8}
    return vitclinic.train(recipe, overrides={"optimizer.lr": 3e-3, "workers": 0}, out=folder / "run")


@pytest.fixture
def command(monkeypatch, capsys):
    def call(*words):
        from vitclinic.cli import main

        monkeypatch.setattr(sys, "argv", ["vitclinic", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return call
