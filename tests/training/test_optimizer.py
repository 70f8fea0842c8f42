import pytest
import torch

from vitclinic.models import create_model
from vitclinic.tasks import Classification
from vitclinic.training.network import Learner
from vitclinic.training.optimizer import OptimizerConfig, build_optimizer, weight_decay_parameters
from vitclinic.treatments import Objective


def names(network, parameters):
    ids = {id(p) for p in parameters}
    return {name for name, p in network.backbone.named_parameters() if id(p) in ids}


def test_biases_norms_and_tokens_are_not_decayed():
    network = create_model("vit_tiny_patch16_224", depth=1, reg_tokens=2)
    decayed = names(network, weight_decay_parameters(network))
    assert decayed == {
        "patch_embed.proj.weight",
        "blocks.0.attn.qkv.weight",
        "blocks.0.attn.proj.weight",
        "blocks.0.mlp.fc1.weight",
        "blocks.0.mlp.fc2.weight",
        "head.weight",
    }


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "deit_tiny_distilled_patch16_224", "resnet18"])
def test_agrees_with_timm_s_own_grouping(name):
    from timm.optim import param_groups_weight_decay

    network = create_model(name)
    listed = getattr(network.backbone, "no_weight_decay", set)()
    groups = param_groups_weight_decay(network.backbone, 0.1, no_weight_decay_list=listed)
    theirs = names(network, next(g["params"] for g in groups if g["weight_decay"] > 0))
    ours = names(network, weight_decay_parameters(network))
    assert ours <= theirs
    assert all("token" in name or "embed" in name or "relative_position" in name for name in theirs - ours)


def test_an_objective_s_parameters_are_trained_too():
    class Extra(Objective):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(3, 3)

    network = create_model("resnet18", channels=[4, 4, 8, 8])
    task = Learner(network, Classification(), {"extra": Extra()})
    optimizer = build_optimizer(OptimizerConfig(weight_decay=0.3), task, network)
    held = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert held[id(task.objectives["extra"].head.weight)] == 0.3
    assert held[id(task.objectives["extra"].head.bias)] == 0
    assert len(held) == len(list(task.parameters()))


def test_rmsprop_has_the_recipe_s_momentum_and_weight_decay():
    network = create_model("resnet18", channels=[4, 4, 8, 8])
    config = OptimizerConfig(name="rmsprop", lr=0.05, weight_decay=1e-6, momentum=0.8)
    optimizer = build_optimizer(config, Learner(network, Classification(), {}), network)
    assert isinstance(optimizer, torch.optim.RMSprop)
    assert [(g["momentum"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (0.8, 0.05, 1e-6),
        (0.8, 0.05, 0),
    ]


def test_frozen_parameters_are_left_out():
    network = create_model("resnet18", channels=[4, 4, 8, 8])
    network.backbone.conv1.weight.requires_grad_(False)
    optimizer = build_optimizer(OptimizerConfig(), Learner(network, Classification(), {}), network)
    assert id(network.backbone.conv1.weight) not in {id(p) for g in optimizer.param_groups for p in g["params"]}


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "muon"])
def test_each_optimizer_lowers_a_loss(name):
    network = create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=8, depth=1, num_heads=2)
    optimizer = build_optimizer(OptimizerConfig(name=name, lr=0.02), Learner(network, Classification(), {}), network)
    x, y = torch.rand(8, 3, 16, 16), torch.arange(8)
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
