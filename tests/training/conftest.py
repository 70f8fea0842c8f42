"""A network and a recipe small enough to train in a second."""

import pytest

TINY = {
    "model": {
        "name": "vit_tiny_fitted",
        "patch_size": 2,
        "embed_dim": 32,
        "depth": 1,
        "num_heads": 2,
        "class_token": False,
        "global_pool": "avg",
    },
    "data": {"source": "digits", "limit": 200, "augment": "none"},
    "optimizer": {"lr": 0.005},
    "batch_size": 40,
    "steps": 6,
}


@pytest.fixture
def tiny(tmp_path):
    """Makes a recipe as plain data: `tiny(steps=3, **{"data": {...}})`; it writes to the test's own folder."""

    def make(**changes):
        return {**TINY, "out": str(tmp_path / "run"), **changes}

    return make
