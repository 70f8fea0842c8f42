"""A recipe that trains in a tenth of a second, and a study of such."""

from __future__ import annotations

from typing import Any

from vitclinic.experiments.study.schema import Study, parse_study
from vitclinic.training import Recipe, build_recipe

TINY = {
    "model": {"name": "vit_tiny_fitted", "patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 2},
    "data": {"source": "digits", "limit": 60, "augment": "none"},
    "batch_size": 20,
    "steps": 6,
    "workers": 0,
    "checkpoint": "2 steps",
}


def tiny(**changes: Any) -> Recipe:
    return build_recipe({**TINY, **changes})


def long(seed: int) -> Recipe:
    """One that lasts long enough to be stopped on the way."""
    return tiny(seed=seed, steps=400, checkpoint="100 steps", validation="100%")


STUDY = {
    "claim": "T1",
    "title": "a larger rate learns more",
    "paper": "none",
    "source": "none",
    "base": TINY,
    "arms": {"slow": {"optimizer": {"lr": 1e-5}}, "fast": {"optimizer": {"lr": 1e-2}}},
    "seeds": 2,
    "measures": {
        "accuracy": {"result": "test.accuracy"},
        "norm": {"probe": "norms", "scalar": "weight_norm"},
        "diverged": {"result": "diverged"},
    },
    "expectations": [{"says": "fast weights grow", "measure": "norm", "greater": ["fast", "slow"]}],
}


def tiny_study(**changes: Any) -> Study:
    return parse_study({**STUDY, **changes}, "T1")
