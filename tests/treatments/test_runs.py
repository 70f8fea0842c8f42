"""Treatments in training runs: each alone, and in company, where their seams meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vitclinic._core.callback import Callback
from vitclinic._core.errors import TreatmentError
from vitclinic.training import Recipe, build_recipe, load_model, resume, train
from vitclinic.treatments import known_treatments, treatments_of

VIT = {"name": "vit_tiny_fitted", "patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 2}
CNN = {"name": "resnet18", "layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8], "stem_width": 8}

COMPANY: list[list[Any]] = [
    ["conv_stem", "context_broadcasting", {"sam": {"rho": 0.1}}],
    ["context_broadcasting", "squeeze_excitation"],
    ["context_broadcasting", "patch_diversity"],
    ["conv_stem", "patch_diversity", "sam"],
    ["sam", "adversarial"],
    ["patch_diversity", "adversarial"],
    ["conv_stem", {"sam": {"every": 2, "adaptive": True}}],
    ["gap_head", "local_attention", "context_broadcasting"],
    ["gap_head", "patch_diversity"],
    [{"conv_stem": {"preset": "small"}}, "sequence_pooling", "mimetic_init", "sam"],
    [{"conv_stem": {"preset": "residual"}}, "gap_head", {"mimetic_init": {"kind": "convolution"}}, "patch_diversity"],
    ["uniform_heads", "context_broadcasting"],
    [{"uniform_heads": {"variant": "append"}}, "conv_stem"],
    ["extra_block", "local_attention", "talking_heads"],
    ["ffn_variant", "context_broadcasting"],
    ["relu_activation", "no_softmax"],
    ["gap_head", "registers", "patch_dropout", "sam"],
    ["local_attention", {"context_broadcasting": {"position": "both"}}],
    ["extra_block", "squeeze_excitation", {"uniform_heads": {"variant": "adjust"}}],
]


def recipe(out: Path, treatments: list[Any], **changes: Any) -> Recipe:
    model = CNN if treatments == ["spatial_smoothing"] else VIT
    settings = {
        "model": model,
        "data": {"source": "digits", "limit": 64},
        "treatments": treatments,
        "steps": 4,
        "batch_size": 8,
        "checkpoint": "2 steps",
        "validation": "4 steps",
        "workers": 0,
        "out": str(out),
    }
    return build_recipe(settings | changes)


class Keeper(Callback):
    """The network's weights and outputs at the end of the run."""

    def on_step(self, trainer: Any) -> None:
        if trainer.step == trainer.total_steps:
            self.state = {name: value.clone() for name, value in trainer.network.state_dict().items()}
            self.treated = treatments_of(trainer.network)


class Stopper(Callback):
    def on_step(self, trainer: Any) -> None:
        if trainer.step == 3:
            raise KeyboardInterrupt


def names(treatments: list[Any]) -> list[str]:
    return [entry if isinstance(entry, str) else next(iter(entry)) for entry in treatments]


@pytest.mark.parametrize("treatments", [*([name] for name in known_treatments()), *COMPANY], ids=str)
def test_a_treated_run_resumes_and_loads_back_exactly(tmp_path: Path, treatments: list[Any]) -> None:
    whole, cut = Keeper(), Keeper()
    run = train(recipe(tmp_path / "whole", treatments), callbacks=[whole])
    assert run.status["status"] == "finished"
    with pytest.raises(KeyboardInterrupt):
        train(recipe(tmp_path / "cut", treatments), callbacks=[Stopper()])
    resume(tmp_path / "cut", callbacks=[cut])
    assert cut.state.keys() == whole.state.keys()
    assert all(torch.equal(value, whole.state[name]) for name, value in cut.state.items())

    network = load_model(run.path, "last")
    assert treatments_of(network) == whole.treated
    assert set(whole.treated) <= set(names(treatments))
    assert all(torch.equal(value, whole.state[name]) for name, value in network.state_dict().items())
    with torch.no_grad():
        assert network(torch.rand(2, 1, 8, 8)).isfinite().all()


@pytest.mark.parametrize(
    ("treatments", "model"),
    [
        (["context_broadcasting"], CNN),
        ([{"patch_diversity": {"contrastive": 1.0}}], {"name": "swin_tiny_patch4_window7_224", "img_size": 32}),
        (["talking_heads", "no_softmax"], VIT),
        (["local_attention", "gap_head"], VIT),
        ([{"sam": {"every": 2}}, "adversarial"], VIT),
        (["spatial_smoothing"], VIT),
    ],
    ids=str,
)
def test_what_does_not_fit_is_said_before_anything_is_made(
    tmp_path: Path, treatments: list[Any], model: dict[str, Any]
) -> None:
    small = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 2}
    model = {**model, **small} if "swin" in model["name"] else model
    with pytest.raises(TreatmentError) as caught:
        train(recipe(tmp_path / "run", treatments, model=model))
    assert str(caught.value).count(". ") <= 1
    assert not (tmp_path / "run").exists()


def test_the_order_of_treatments_is_kept(tmp_path: Path) -> None:
    run = train(recipe(tmp_path / "run", ["context_broadcasting", "conv_stem"]))
    assert treatments_of(load_model(run.path)) == ("context_broadcasting", "conv_stem")
    other = build_recipe({**run.recipe.plain(), "treatments": ["conv_stem", "context_broadcasting"]})
    assert other.digest("") != run.recipe.digest("")
