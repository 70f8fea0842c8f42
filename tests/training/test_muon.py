"""Muon against its formula written out with a singular value decomposition, and in all that a run can combine."""

import copy
import math

import pytest
import torch
from timm.optim.muon import Muon as TimmMuon
from torch import nn

from tests.treatments.test_sam import Explode
from vitclinic._core.callback import Callback
from vitclinic._core.distributed import ALONE
from vitclinic._core.errors import RecipeError
from vitclinic.data import open_data
from vitclinic.models import Normalized, create_model
from vitclinic.tasks import Classification
from vitclinic.training import build_recipe, resume, train
from vitclinic.training.muon import Muon, orthogonalize
from vitclinic.training.network import Learner
from vitclinic.training.optimizer import OptimizerConfig, build_optimizer
from vitclinic.training.trainer import Trainer
from vitclinic.treatments import SAM, Objective, treat


def polynomial(values):
    """Five times a s + b s^3 + c s^5, of each singular value on its own."""
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return values


def by_svd(matrix):
    """U p(S / |S|) V^T, by another route than products of matrices."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ torch.diag(polynomial(s / s.square().sum().sqrt())) @ v


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# The formula


@pytest.mark.parametrize("shape", [(12, 12), (5, 30), (40, 7), (2, 2)])
def test_orthogonalize_is_its_polynomial_of_the_singular_values(shape):
    matrix = draw(*shape)
    assert torch.allclose(orthogonalize(matrix), by_svd(matrix), atol=1e-12)
    assert torch.allclose(orthogonalize(1e-3 * matrix), by_svd(matrix), atol=1e-12)
    assert torch.allclose(orthogonalize(matrix.float()).double(), by_svd(matrix), atol=1e-5)


def test_orthogonalize_comes_near_the_orthogonal_factor():
    """Singular values from 1/500 of the norm on end near 1, so that the result is U V^T to a third."""
    shares = torch.logspace(0, -2.5, 20, dtype=torch.float64)
    shares = shares / shares.norm()
    u, v = (torch.linalg.qr(draw(n, 20, seed=n)).Q for n in (20, 50))
    found = orthogonalize(u @ torch.diag(7.0 * shares) @ v.T)
    values = torch.linalg.svdvals(found)
    assert 1 / 500 < shares.min() < 1 / 450
    assert 0.68 < values.min() < values.max() < 1.21
    assert torch.linalg.matrix_norm(found - u @ v.T, 2) < 0.33


def test_a_matrix_of_zeros_and_one_of_rank_one_stay_finite():
    assert torch.equal(orthogonalize(torch.zeros(3, 4)), torch.zeros(3, 4))
    found = orthogonalize(torch.ones(6, 3, dtype=torch.float64))
    assert torch.allclose(found, torch.full((6, 3), polynomial(1.0) / math.sqrt(18), dtype=torch.float64), atol=1e-12)


def test_steps_are_those_of_the_formula_written_out():
    """A matrix and a kernel, with momentum, weight decay and a changing learning rate; the rest is torch's AdamW."""
    start = {"matrix": draw(6, 4), "kernel": draw(5, 2, 3, 3, seed=1), "bias": draw(6, seed=2)}
    ours = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    matrices = [{"params": [ours["matrix"], ours["kernel"]], "weight_decay": 0.3}]
    optimizer = Muon(matrices, [{"params": [ours["bias"]], "weight_decay": 0.2}], lr=0.01, betas=(0.8, 0.9))
    peer = nn.Parameter(start["bias"].clone())
    adamw = torch.optim.AdamW([peer], lr=0.01, betas=(0.8, 0.9), weight_decay=0.2)
    expected = {name: value.reshape(len(value), -1).clone() for name, value in start.items() if name != "bias"}
    gathered = {name: torch.zeros_like(value) for name, value in expected.items()}
    for number, lr in enumerate([0.01, 0.02, 0.005]):
        gradients = {name: draw(*p.shape, seed=10 + number) for name, p in ours.items()}
        for group in [*optimizer.param_groups, *adamw.param_groups]:
            group["lr"] = lr
        for name, parameter in [*ours.items(), ("bias", peer)]:
            parameter.grad = gradients[name].clone()
        optimizer.step()
        adamw.step()
        for name, w in expected.items():
            g = gradients[name].reshape(w.shape)
            gathered[name] = 0.95 * gathered[name] + g
            update = by_svd(g + 0.95 * gathered[name])
            expected[name] = (1 - lr * 0.3) * w - lr * 0.2 * math.sqrt(max(w.shape)) * update
    for name, w in expected.items():
        assert torch.allclose(ours[name].reshape(w.shape), w, atol=1e-12), name
        assert ours[name].shape == start[name].shape
    assert torch.equal(ours["bias"], peer)


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (24, 4, 3, 3)])
def test_an_update_is_about_as_large_as_adamw_s(shape):
    """0.2 times the learning rate: the root mean square that Liu et al. 2025 found AdamW's updates to have."""
    parameter = nn.Parameter(torch.zeros(shape))
    optimizer = Muon([{"params": [parameter]}], [{"params": []}], lr=0.5)
    parameter.grad = draw(*shape, dtype=torch.float32)
    optimizer.step()
    assert parameter.detach().square().mean().sqrt() == pytest.approx(0.2 * 0.5, rel=0.15)


def test_timm_s_steps_are_the_same_up_to_its_bfloat16():
    shapes = [(24, 16), (16, 40), (12, 4, 3, 3)]
    ours = [nn.Parameter(draw(*shape, dtype=torch.float32)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = Muon([{"params": ours, "weight_decay": 0.1}], [{"params": []}], lr=0.02)
    peer = TimmMuon(theirs, lr=0.02, weight_decay=0.1, nesterov=True, ns_coefficients="original")
    before = [p.detach().clone() for p in ours]
    for number in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = draw(*one.shape, seed=20 + number, dtype=torch.float32)
            other.grad = one.grad.clone()
        optimizer.step()
        peer.step()
    for w, one, other in zip(before, ours, theirs, strict=True):
        assert (one - other).norm() < 0.02 * (one - w).norm()


def test_a_parameter_without_gradient_stays():
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = Muon([{"params": [parameter], "weight_decay": 0.5}], [{"params": []}], lr=0.1)
    optimizer.step()
    assert torch.equal(parameter, torch.ones(2, 2))
    assert not optimizer.state


def test_a_closure_makes_the_gradients():
    layer = nn.Linear(3, 3)
    optimizer = Muon([{"params": [layer.weight]}], [{"params": [layer.bias]}], lr=0.1)
    before = layer.weight.detach().clone()

    def closure():
        loss = layer(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert not torch.equal(layer.weight, before)


# What it trains


class Plain(nn.Module):
    """Nobody's network, without timm's conventions: patches are unfolded, the head is a part like any other."""

    def __init__(self):
        super().__init__()
        self.patches, self.table = nn.Linear(12, 8), nn.Embedding(4, 8)
        self.hidden, self.grouped = nn.Linear(8, 8), nn.Conv1d(8, 8, 3, groups=2)
        self.narrow, self.last = nn.Linear(8, 1), nn.Linear(8, 5)


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}
BLOCK = {f"blocks.0.{name}.weight" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}


def stem():
    network = create_model("vit_tiny_patch16_224", **VIT)
    network.backbone = treat(network.backbone, "conv_stem")
    return network


def trained_by_muon(network, **objectives):
    config = OptimizerConfig(name="muon", weight_decay=0.3)
    learner = Learner(network, Classification(), objectives)
    groups = build_optimizer(config, learner, network).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.3, 0][: len(groups)]
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in learner.parameters() if p.requires_grad)
    chosen = {id(p) for p in groups[0]["params"]}
    return {name for name, p in network.backbone.named_parameters() if id(p) in chosen}


def test_a_vit_s_blocks_but_neither_stem_head_tokens_nor_positions():
    assert trained_by_muon(create_model("vit_tiny_patch16_224", **VIT, reg_tokens=2)) == BLOCK
    assert trained_by_muon(create_model("deit_tiny_distilled_patch16_224", **VIT)) == BLOCK


def test_a_stem_s_convolutions_but_the_first():
    network = stem()
    found = trained_by_muon(network)
    kernels = [name for name, p in network.backbone.named_parameters() if p.ndim == 4]
    assert found == BLOCK | set(kernels[1:])
    assert len(kernels) > 2


def test_kernels_of_a_resnet():
    network = create_model("resnet18", channels=[4, 4, 8, 8])
    kernels = {name for name, p in network.backbone.named_parameters() if p.ndim == 4}
    assert trained_by_muon(network) == kernels - {"conv1.weight"}


def test_not_a_depthwise_kernel_which_is_no_matrix():
    found = trained_by_muon(create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)))
    assert "stages.0.blocks.0.mlp.fc1.weight" in found
    assert "stages.1.downsample.1.weight" in found
    assert not [name for name in found if "conv_dw" in name or "stem" in name or "head" in name]


def test_a_network_of_one_s_own_ends_with_its_head():
    assert trained_by_muon(Normalized(Plain(), [0.5] * 3, [0.5] * 3)) == {"hidden.weight"}


def test_objectives_and_what_is_frozen_are_left_to_others():
    class Extra(Objective):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 3)

    network = create_model("vit_tiny_patch16_224", **VIT)
    network.backbone.blocks[0].mlp.fc1.weight.requires_grad_(False)
    assert trained_by_muon(network, extra=Extra()) == BLOCK - {"blocks.0.mlp.fc1.weight"}


def test_a_network_without_hidden_matrices_is_adamw_s():
    network = Normalized(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), [0.5] * 3, [0.5] * 3)
    assert trained_by_muon(network) == set()


# In a run


@pytest.mark.parametrize("option", [{"momentum": 0.5}, {"nesterov": True}])
def test_an_option_that_would_not_be_used_is_a_sentence(option):
    (name,) = option
    with pytest.raises(RecipeError, match=f"'{name}' is only for sgd"):
        build_recipe({"optimizer": {"name": "muon", **option}})


def test_both_parts_follow_the_schedule(tiny):
    recipe = build_recipe(tiny(optimizer={"name": "muon", "lr": 0.01}, schedule={"warmup": "2 steps"}))
    trainer = Trainer(recipe, open_data(recipe.data), 6, ALONE, torch.device("cpu"))
    for step in range(6):
        trainer.advance()
        assert {group["lr"] for group in trainer.optimizer.param_groups} == {trainer.rate(step)}
        assert trainer.optimizer.adamw.param_groups == trainer.optimizer.param_groups[1:]


class Stop(Callback):
    def on_step(self, trainer):
        if trainer.step == 8:
            raise RuntimeError("power cut")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_precision_accumulation_clipping_and_late_sam_together_resume_to_the_same_bits(tiny, tmp_path, precision):
    plain = tiny(
        optimizer={"name": "muon", "lr": 0.01},
        treatments=[{"sam": {"start": 0.5, "every": 2}}, "conv_stem"],
        precision=precision,
        accumulate=2,
        clip=0.5,
        ema=0.9,
        steps=12,
        checkpoint="5 steps",
        schedule={"warmup": 0},
    )
    whole = train({**plain, "out": str(tmp_path / "whole")})
    with pytest.raises(RuntimeError):
        train(plain, callbacks=[Stop()])
    resumed = resume(plain["out"])
    (model, state), (other, found) = (run.checkpoints.read("last") for run in (whole, resumed))
    assert all(torch.equal(value, other[name]) for name, value in model.items())
    states = state["optimizer"]["state"]
    assert {key for entry in states.values() for key in entry} == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    for index, entry in states.items():
        assert all(torch.equal(value, found["optimizer"]["state"][index][key]) for key, value in entry.items())
    assert state["rule"]["steps"] == found["rule"]["steps"] == 6
    rows = [row for row in whole.metrics if row["kind"] == "train"]
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_gradient_that_is_not_finite_changes_nothing(tiny, precision):
    watch = Explode(0, 3)
    train(tiny(optimizer={"name": "muon", "lr": 0.01}, precision=precision, treatments=["sam"]), callbacks=[watch])
    assert watch.kept == [True, True]


def test_a_copy_and_a_loaded_state_go_on_as_the_original():
    def make():
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        return layer, Muon([{"params": [layer.weight]}], [{"params": [layer.bias]}], lr=0.1)

    def step(layer, optimizer, number):
        def closure():
            loss = (layer(draw(8, 4, seed=number, dtype=torch.float32)) - 1).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    layer, optimizer = make()
    sam = SAM(optimizer, rho=0.1, module=layer)
    step(layer, sam, 0)
    twin = copy.deepcopy(sam)
    assert twin.optimizer.adamw.state is twin.optimizer.state
    other, loaded = make()
    other.load_state_dict(layer.state_dict())
    second = SAM(loaded, rho=0.1, module=other)
    second.load_state_dict(copy.deepcopy(sam.state_dict()))
    for one, its in [(layer, sam), (twin.module, twin), (other, second)]:
        step(one, its, 1)
    for one in (twin.module, other):
        assert torch.equal(layer.weight, one.weight)
        assert torch.equal(layer.bias, one.bias)
