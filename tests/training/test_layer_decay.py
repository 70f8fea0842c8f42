"""Learning rates by depth, the head's own, and frozen units."""

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay

from vitclinic._core.distributed import Distributed
from vitclinic._core.errors import RecipeError
from vitclinic.anatomy import Anatomy
from vitclinic.data import ImageSpec, open_data
from vitclinic.models import Normalized
from vitclinic.training import build_recipe
from vitclinic.training.layer_decay import freeze_units, parameter_levels, rate_scales
from vitclinic.training.trainer import Trainer

CPU = torch.device("cpu")


def make_trainer(recipe):
    recipe = build_recipe(recipe)
    return Trainer(recipe, open_data(recipe.data), 6, Distributed(), CPU)


def rates(trainer):
    named = {id(parameter): name for name, parameter in trainer.network.named_parameters()}
    return {named[id(p)]: group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}


def test_levels_are_those_of_timm_but_for_the_last_norm():
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, init_values=1e-5)
    levels = parameter_levels(Anatomy.of(network))
    theirs = {}
    for group in param_groups_layer_decay(network, layer_decay=0.7):
        theirs |= {id(parameter): group["lr_scale"] for parameter in group["params"]}
    for name, parameter in network.named_parameters():
        if not name.startswith("norm."):  # timm counts it with the last block; BEiT and MAE with the head, as we do
            assert 0.7 ** (4 - levels[id(parameter)]) == pytest.approx(theirs[id(parameter)]), name
    assert levels[id(network.norm.weight)] == 4


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "swin_tiny_patch4_window7_224"])
def test_levels_rise_from_the_stem_to_the_head_in_any_network(name):
    keywords = {"img_size": 32, "window_size": 4, "depths": (1, 1), "embed_dim": 16, "num_heads": (1, 2)}
    network = timm.create_model(name, **keywords if name.startswith("swin") else {}).eval()
    levels = parameter_levels(Anatomy.of(network, torch.rand(1, 3, 32, 32)))
    found = [levels[id(parameter)] for parameter in network.parameters()]
    assert set(found) == set(range(max(found) + 1))
    assert found == sorted(found)
    assert found[0] == 0
    assert levels[id(network.get_classifier().weight)] == max(found)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_groups_of_a_run_and_their_steps(tiny, optimizer):
    trainer = make_trainer(
        tiny(layer_decay=0.5, head_lr=0.02, optimizer={"name": optimizer, "lr": 0.004}, schedule="constant")
    )
    found = rates(trainer)
    assert len(found) == len(list(trainer.network.parameters()))
    assert found["backbone.patch_embed.proj.weight"] == pytest.approx(0.001)
    assert found["backbone.blocks.0.attn.qkv.weight"] == pytest.approx(0.002)
    assert found["backbone.head.weight"] == pytest.approx(0.02)
    trainer.advance()
    for name, rate in rates(trainer).items():  # the schedule multiplies each by the same factor
        assert rate / found[name] == pytest.approx(trainer.rate(0) / 0.004), name


def test_defaults_change_nothing(tiny):
    plain, given = build_recipe(tiny()), build_recipe(tiny(layer_decay=1.0, freeze=[], init={}))
    assert plain.digest("d") == given.digest("d")
    assert all("lr_scale" not in group for group in make_trainer(tiny()).optimizer.param_groups)


def test_frozen_units_keep_their_weights_and_others_do_not(tiny):
    trainer = make_trainer(tiny(freeze=["stem", "blocks.0.msa"], treatments=["sam"]))
    before = {name: value.clone() for name, value in trainer.network.state_dict().items()}
    trainer.advance()
    changed = {name for name, value in trainer.network.state_dict().items() if not torch.equal(value, before[name])}
    assert not any("patch_embed" in name or ".attn." in name or ".norm1." in name for name in changed)
    assert {"backbone.blocks.0.mlp.fc1.weight", "backbone.head.weight"} <= changed


def test_of_a_frozen_backbone_only_the_classifier_is_trained_and_batch_norms_keep_their_statistics(tiny):
    model = {"name": "test_resnet", "in_chans": 1}
    trainer = make_trainer(tiny(model=model, freeze="backbone"))
    before = {name: value.clone() for name, value in trainer.network.state_dict().items()}
    trainer.advance()
    changed = {name for name, value in trainer.network.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"backbone.fc.weight", "backbone.fc.bias"}


def test_names_that_are_not_there_and_nothing_left_are_one_sentence(tiny):
    with pytest.raises(RecipeError, match=r"no unit or block 'blocks\.0\.mas'\. Did you mean 'blocks\.0\.msa'"):
        make_trainer(tiny(freeze="blocks.0.mas"))
    with pytest.raises(RecipeError, match="leaves nothing to train"):
        make_trainer(tiny(freeze=["backbone", "head"]))
    with pytest.raises(RecipeError, match="layer_decay"):
        build_recipe(tiny(layer_decay=1.5))


def test_a_network_of_no_family_has_levels_too():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = torch.nn.Conv2d(3, 8, 4, 4)
            self.mix = torch.nn.ModuleList(torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
            self.head = torch.nn.Linear(8, 10)

        def forward(self, x):
            x = self.stem(x)
            for mix in self.mix:
                x = x + mix(x).relu()
            return self.head(x.mean((2, 3)))

    network = Normalized(Net(), [0.5] * 3, [0.5] * 3)
    recipe = build_recipe({"layer_decay": 0.5, "freeze": ["stem"], "data": "digits"})
    scales = rate_scales(recipe, network, ImageSpec(10, 3, (16, 16)))
    assert scales[id(network.backbone.head.weight)] == 1
    assert scales[id(network.backbone.stem.weight)] < scales[id(network.backbone.mix[1].weight)] < 1
    freeze_units(recipe, network, ImageSpec(10, 3, (16, 16)))
    assert [name for name, p in network.named_parameters() if not p.requires_grad] == [
        "backbone.stem.weight",
        "backbone.stem.bias",
    ]
