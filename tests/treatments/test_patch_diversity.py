"""The treatment patch_diversity: what it reads, what it changes, and runs that use it."""

import copy
import gc
import weakref

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from tests.anatomy.networks import NETWORKS, shaken, tiny_vit
from tests.anatomy.token_orders import SIDE, OrderedViT
from tests.treatments.test_contract import ONE_EACH, TOKENS
from vitclinic._core.callback import Callback
from vitclinic._core.distributed import ALONE
from vitclinic._core.errors import RecipeError, TreatmentError
from vitclinic.anatomy.families import recognise
from vitclinic.data import Augment, Batch, DataConfig, ImageSpec, open_data
from vitclinic.tasks import Classification
from vitclinic.training import load_model, resume, train
from vitclinic.training.network import Learner
from vitclinic.training.overrides import build_recipe
from vitclinic.training.trainer import Trainer
from vitclinic.treatments import (
    PatchDiversity,
    contrastive_loss,
    cosine_loss,
    mixing_loss,
    parse_treatments,
)

FITTING = [name for family in TOKENS for name in ONE_EACH.get(family, []) if name in NETWORKS]
NAMES = {"patch_cosine", "patch_contrastive", "patch_mixing"}


def swin(**keywords):
    small = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2)}
    return timm.models.SwinTransformer(num_classes=5, **(small | keywords))


def treatment(**options):
    return parse_treatments([{"patch_diversity": options}])[0]


def seen(network, images, labels):
    """A step's named losses in a loop of one's own, at the defaults."""
    torch.manual_seed(3)
    diversity = PatchDiversity(network, classes=5)
    mixed, targets, patch_targets = diversity.mix(images, labels)
    output = network.train()(mixed)
    logits = getattr(output, "logits", output)
    losses = diversity(patch_targets)
    return diversity, patch_targets, {"task": F.cross_entropy(logits, targets), **losses}


@pytest.mark.parametrize("order", ["columns", "class last"])
def test_the_order_of_tokens_changes_nothing(order):
    images = torch.rand(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    found = [seen(OrderedViT(each), images, torch.arange(3)) for each in ("plain", order)]
    for name, value in found[0][2].items():
        torch.testing.assert_close(found[1][2][name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", FITTING)
def test_it_works_with_its_defaults_on_every_family_it_claims(name):
    network = shaken(NETWORKS[name]())
    core, family = recognise(network)
    images = torch.rand(4, *family.input_size(core), generator=torch.Generator().manual_seed(1))
    diversity, patch_targets, losses = seen(network, images, torch.arange(4))
    hierarchical = any(kind in family.name for kind in ("Swin", "PiT", "VOLO"))
    assert set(losses) - {"task"} == NAMES - ({"patch_contrastive"} if hierarchical else set())
    assert patch_targets.shape[1] == diversity.patches.grid[0] * diversity.patches.grid[1]
    sum(losses.values()).backward()
    assert all(value.isfinite() for value in losses.values())
    assert all(p.grad.isfinite().all() for p in diversity.parameters())
    assert not any(key.startswith("objectives") for key in network.state_dict())


@pytest.mark.parametrize(
    ("keywords", "prefix"),
    [
        ({}, 1),
        ({"reg_tokens": 3}, 4),
        ({"class_token": False, "global_pool": "avg", "fc_norm": False}, 0),
        ({"dynamic_img_size": True, "reg_tokens": 2, "no_embed_class": True}, 3),
    ],
)
def test_it_reads_the_embedding_before_positions_and_the_final_norm_without_prefix_tokens(keywords, prefix):
    network = shaken(tiny_vit(**keywords)).double()
    images = torch.rand(4, 3, 32, 48, dtype=torch.float64)
    diversity, patch_targets, losses = seen(network, images, torch.arange(4))
    torch.manual_seed(3)
    head = nn.Linear(24, 5).double()
    head.load_state_dict(diversity.objectives["patch_mixing"].head.state_dict())
    mixed = _mixed_again(network, diversity, images)
    first = network.patch_embed(mixed)
    first = first.flatten(1, 2) if first.ndim == 4 else first
    last = network.forward_features(mixed)[:, prefix:]
    assert last.shape == (4, 24, 24)
    assert torch.allclose(losses["patch_cosine"], cosine_loss(last))
    assert torch.allclose(losses["patch_contrastive"], contrastive_loss(first, last))
    assert torch.allclose(losses["patch_mixing"], mixing_loss(head(last), patch_targets))


def _mixed_again(network, diversity, images):
    diversity.remove()
    torch.manual_seed(3)
    again = PatchDiversity(network, classes=5)
    mixed, _, _ = again.mix(images, torch.arange(len(images)))
    again.remove()
    return mixed


def test_without_a_norm_of_its_tokens_a_network_is_read_behind_its_last_block():
    network = shaken(tiny_vit(class_token=False, global_pool="avg"))
    assert isinstance(network.norm, nn.Identity)
    diversity = PatchDiversity(network, 5, contrastive=0, mixing=0)
    images = torch.rand(2, 3, 32, 48)
    state = network.blocks(network._pos_embed(network.patch_embed(images)))
    network.train()(images)
    assert torch.allclose(diversity()["patch_cosine"], cosine_loss(state))


def test_weights_scale_the_losses_and_zero_switches_them_off():
    network = shaken(tiny_vit())
    images = torch.rand(2, 3, 32, 48)
    other = copy.deepcopy(network)
    twice, once = PatchDiversity(network, 5, cosine=2, mixing=0), PatchDiversity(other, 5, contrastive=0, mixing=0)
    network.train()(images)
    other.train()(images)
    assert twice()["patch_cosine"].item() == pytest.approx(2 * once()["patch_cosine"].item())
    assert not list(once.parameters())


def test_normalised_vectors_are_an_option():
    network, other = shaken(tiny_vit()), shaken(tiny_vit())
    raw = PatchDiversity(network, 5, cosine=0, mixing=0)
    normal = PatchDiversity(other, 5, cosine=0, mixing=0, normalise=True)
    images = torch.rand(2, 3, 32, 48)
    network.train()(images)
    other.train()(images)
    assert raw()["patch_contrastive"] != normal()["patch_contrastive"]


def test_nothing_is_kept_between_steps_nor_of_other_passes():
    network = shaken(tiny_vit())
    diversity = PatchDiversity(network, 5, mixing=0)
    readers = [objective.reader for objective in diversity.objectives.values()]
    images = torch.rand(2, 3, 32, 48)
    network.eval()(images)
    with torch.no_grad():
        network.train()(images)
    assert not any(reader._held for reader in readers)
    network(images)
    held = [weakref.ref(tensor) for reader in readers for tensor in reader._held.values()]
    sum(diversity().values()).backward()
    gc.collect()
    assert len(held) == 3
    assert not any(reference() is not None for reference in held)
    with pytest.raises(TreatmentError, match="call the network in training mode, with gradients, before"):
        diversity()


def test_averaged_copies_made_before_have_no_hooks():
    network = tiny_vit()
    copied = copy.deepcopy(network)
    diversity = PatchDiversity(network, 5)
    assert sum(len(module._forward_hooks) for module in copied.modules()) == 0
    diversity.remove()
    assert sum(len(module._forward_hooks) for module in network.modules()) == 0


def test_a_network_has_its_losses_once():
    network = tiny_vit()
    first = PatchDiversity(network, 5)
    with pytest.raises(TreatmentError, match=r"already has patch losses: remove\(\) them"):
        PatchDiversity(network, 5)
    first.remove()
    PatchDiversity(network, 5).remove()


def test_a_compiled_task_computes_the_same_and_is_compiled_once():
    network = shaken(tiny_vit())
    objectives = treatment().objectives(network, ImageSpec(5, 3, (32, 48)))
    task = Learner(network, Classification(), objectives).train()
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(task, backend=backend)
    for _ in range(3):
        images, shares = torch.rand(2, 3, 32, 48), torch.rand(2, 24, 5).softmax(-1)
        batch = Batch(images, shares.mean(1), torch.arange(2), torch.arange(2), shares)
        plain, fast = task(batch), compiled(batch)
        assert {*plain} == {*NAMES, "task"}
        assert all(torch.allclose(plain[name], fast[name]) for name in plain)
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_swin_has_cosine_and_mixing_on_its_last_grid_and_no_contrastive():
    network = swin()
    diversity = PatchDiversity(network, 5)
    assert set(diversity.objectives) == {"patch_cosine", "patch_mixing"}
    assert diversity.patches.cell == (4, 4)  # 2 pixels a patch, merged once
    network.train()(torch.rand(2, 3, 32, 32))
    with pytest.raises(TreatmentError, match="this batch has none"):
        diversity()
    with pytest.raises(TreatmentError, match="contrastive loss does not apply to a network that merges patches"):
        PatchDiversity(swin(), 5, contrastive=1)


@pytest.mark.parametrize(
    ("network", "size", "options", "message"),
    [
        (lambda: swin(img_size=16, depths=(1,) * 4, num_heads=(2,) * 4), (16, 16), {}, "this network has one"),
        (lambda: swin(img_size=36, depths=(1,) * 3, num_heads=(2,) * 3), (36, 36), {}, "36 x 36 .* 5 x 5 last"),
        (lambda: timm.create_model("resnet18"), (32, 32), {}, "does not fit ResNet: it needs patches on a grid"),
        (lambda: nn.Flatten(), (32, 32), {}, "does not fit Flatten: it needs patches"),
    ],
)
def test_networks_that_it_does_not_fit(network, size, options, message):
    with pytest.raises(TreatmentError, match=message):
        PatchDiversity(network(), 5, size, **options)


def test_grids_that_do_not_divide_do_not_matter_to_the_cosine():
    network = swin(img_size=36, depths=(1,) * 3, num_heads=(2,) * 3)
    assert set(PatchDiversity(network, 5, mixing=0).objectives) == {"patch_cosine"}


def test_mistaken_options_are_sentences():
    with pytest.raises(RecipeError, match="Did you mean 'cosine'"):
        PatchDiversity(tiny_vit(), 5, cosin=1)
    with pytest.raises(RecipeError, match="greater than or equal to 0"):
        PatchDiversity(tiny_vit(), 5, mixing=-1)


def test_patches_dropped_in_training_are_a_sentence():
    network = tiny_vit(patch_drop_rate=0.5)
    diversity = PatchDiversity(network, 5, cosine=0, mixing=0)
    network.train()(torch.rand(2, 3, 32, 48))
    with pytest.raises(TreatmentError, match="of 24 patches, 12 are left: train without dropping patches"):
        diversity()


def test_augmentation_becomes_cutmix_on_patch_borders():
    spec = ImageSpec(5, 3, (32, 48))
    light, strong = Augment(level="light").resolve(), Augment(level="deit", mix_probability=0.7).resolve()
    changed = treatment().augmentation(strong, tiny_vit(), spec)
    assert (changed.mixup, changed.cutmix, changed.cutmix_cell, changed.repeats) == (0, 1.0, 8, 1)
    assert changed.mix_probability == 0.7
    assert (changed.randaugment, changed.erasing, changed.smoothing) == (strong.randaugment, 0.25, 0.1)
    assert treatment(cutmix=0.3, probability=0.5).augmentation(light, tiny_vit(), spec) == light.model_copy(
        update={"cutmix": 0.3, "cutmix_cell": 8, "mix_probability": 0.5}
    )
    assert treatment(mixing=0).augmentation(strong, tiny_vit(), spec) == strong
    wide = tiny_vit(patch_size=(8, 4))
    assert treatment().augmentation(light, wide, spec).cutmix_cell == [8, 4]
    assert treatment().locate(wide, spec).grid == (4, 12)


MODEL = {"name": "vit_tiny_fitted", "patch_size": 2, "embed_dim": 32, "depth": 1, "num_heads": 2}
DIGITS = {"source": "digits", "limit": 200, "augment": "light"}


def recipe(tmp_path, **changes):
    plain = {"model": MODEL, "data": DIGITS, "optimizer": {"lr": 0.005}, "batch_size": 40, "steps": 6, "workers": 0}
    return {**plain, "treatments": ["patch_diversity"], "out": str(tmp_path / "run"), **changes}


@pytest.mark.parametrize(
    ("level", "notice"),
    [
        ("light", "cutmix is 1 instead of 0, cutmix_cell is 2 instead of off"),
        (
            "deit",
            "mixup is 0 instead of 0.8, cutmix_cell is 2 instead of off, repeats is 1 instead of 3",
        ),
    ],
)
def test_the_run_says_what_it_changes(tmp_path, level, notice):
    plain = build_recipe(recipe(tmp_path, data={**DIGITS, "augment": level}), [])
    trainer = Trainer(plain, open_data(DataConfig(**DIGITS)), 6, ALONE, torch.device("cpu"))
    assert trainer.notices == [f"patch_diversity overrides the recipe's data.augment: {notice}"]


def test_a_run_saves_and_loads_back_without_the_mixing_head(tmp_path):
    run = train(recipe(tmp_path))
    row = run.metrics[0]
    assert set(row["losses"]) == {"task", *NAMES}
    model, state = run.checkpoints.read("last")
    assert state["objectives"]["patch_mixing.head.weight"].shape == (10, 32)
    assert state["objectives"]["patch_mixing.head.bias"].abs().sum() > 0
    assert not any("head" in name and "backbone" not in name for name in model)
    network = load_model(run.path, "last")
    assert all(torch.equal(value, model[name]) for name, value in network.state_dict().items())
    assert sum(len(module._forward_hooks) for module in network.modules()) == 0


@pytest.mark.parametrize("changes", [{}, {"ema": 0.9, "accumulate": 2, "precision": "bf16"}])
def test_an_interrupted_run_resumes_exactly(tmp_path, changes):
    class Stop(Callback):
        def on_step(self, trainer):
            if trainer.step == 5:
                raise RuntimeError("power cut")

    model = {**MODEL, "drop_path_rate": 0.3, "proj_drop_rate": 0.2}
    plain = recipe(tmp_path, model=model, checkpoint="3 steps", **changes)
    whole = train({**plain, "out": str(tmp_path / "whole")})
    torch.rand(17)  # the mixing head is drawn from the seed, not from wherever the generator stands
    with pytest.raises(RuntimeError):
        train(plain, callbacks=[Stop()])
    resumed = resume(plain["out"])
    expected, found = whole.checkpoints.read("last"), resumed.checkpoints.read("last")
    for name, value in expected[0].items():
        assert torch.equal(value, found[0][name]), name
    for name, value in expected[1]["objectives"].items():
        assert torch.equal(value, found[1]["objectives"][name]), name


def test_a_run_of_a_swin(tmp_path):
    model = {
        "name": "swin_tiny_patch4_window7_224",
        "patch_size": 1,
        "window_size": 2,
        "embed_dim": 12,
        "depths": [1, 1],
        "num_heads": [2, 2],
    }
    run = train(recipe(tmp_path, model=model, steps=2))
    assert set(run.metrics[0]["losses"]) == {"task", "patch_cosine", "patch_mixing"}
    with pytest.raises(TreatmentError, match="leave contrastive out"):
        train(
            recipe(
                tmp_path, model=model, out=str(tmp_path / "no"), treatments=[{"patch_diversity": {"contrastive": 1}}]
            )
        )
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cosine": 0.0, "contrastive": 0.0, "mixing": 0.0}, "the weights of all three losses are 0"),
        ({"normalise": True, "contrastive": 0.0}, "'normalise' is only for the contrastive loss, whose weight is 0"),
        ({"cutmix": 0.5, "mixing": 0.0}, "'cutmix' is only for the mixing loss, whose weight is 0"),
        ({"probability": 0.0, "mixing": 0.0}, "'probability' is only for the mixing loss, whose weight is 0"),
        ({"cosine": float("inf")}, "cosine': input should be a finite number"),
    ],
)
def test_an_option_that_means_nothing_is_a_sentence(options, sentence):
    with pytest.raises(RecipeError, match=sentence):
        parse_treatments([{"patch_diversity": options}])


def test_nothing_is_left_of_the_contrastive_loss_where_patches_are_merged():
    network = NETWORKS["swin, not square, padded"]()
    for options in ({"cosine": 0, "mixing": 0}, {"normalise": True}):
        with pytest.raises(TreatmentError, match=r"the contrastive loss.*merges patches"):
            PatchDiversity(network, 5, **options)
