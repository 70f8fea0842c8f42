"""`init`: a run starts from weights of a run, a library or a file, and computes what their network computes."""

import json

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

from tests.rows import drop_timing
from tests.training.test_resume import killed_and_resumed
from vitclinic._core.errors import ModelError, RecipeError
from vitclinic.data import open_data
from vitclinic.training import Run, build_recipe, load_model, plan_run, resume, train
from vitclinic.training.init import read_initial_weights, settle
from vitclinic.training.network import build_network

VIT = {"patch_size": 16, "embed_dim": 24, "depth": 2, "num_heads": 2}


def start(source, size=96, **changes):
    """The network of a run that would start from `source`, on three-channel images, with what was loaded."""
    recipe = build_recipe({"init": str(source), "data": {"source": "shapes:60"}, **changes}, [f"model.img_size={size}"])
    init = read_initial_weights(recipe)
    recipe, notices = settle(recipe, init)
    data = open_data(recipe.data, size=recipe.image_size, channels=recipe.model.in_chans)
    network, loaded = build_network(recipe, data, init)
    return network.eval(), loaded, notices


def images(size):
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def normalize(x, mean, std):
    return (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


def timm_vit(**keywords):
    torch.manual_seed(1)
    network = timm.models.VisionTransformer(**({"num_classes": 5} | VIT | keywords)).eval()
    torch.nn.init.normal_(network.pos_embed)
    return network


@pytest.mark.parametrize("changed", [{}, {"patch_size": 8}], ids=["another size", "other patches"])
@torch.no_grad()
def test_timm_from_224_to_96_pixels_and_to_another_patch_grid(tmp_path, changed):
    network = timm_vit()
    torch.save({"state_dict": {f"module.{k}": v for k, v in network.state_dict().items()}}, tmp_path / "w.pth")
    query = "&".join(f"{key}={value}" for key, value in {**VIT, "num_classes": 5}.items())
    source = f"timm:vit_tiny_patch16_224?{query}@{tmp_path}/w.pth"
    model = {"model": {"name": "vit_tiny_patch16_224", **VIT, **changed}} if changed else {}
    ours, loaded, notices = start(source, **model)
    theirs = timm_vit(img_size=96, num_classes=0, **changed)
    state = {k: v for k, v in network.state_dict().items() if not k.startswith("head")}
    theirs.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(state, theirs))
    x = images(96)
    found = ours.backbone.forward_features(normalize(x, [0.5] * 3, [0.5] * 3))
    torch.testing.assert_close(found, theirs.forward_features(normalize(x, [0.5] * 3, [0.5] * 3)), atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.mean.flatten(), torch.full((3,), 0.5))
    assert "pos_embed" in loaded.resampled
    assert set(loaded.found.drawn) == {"head.weight", "head.bias"}  # 5 classes there, 10 here
    assert "its head is new, for 10 classes" in loaded.notices[0]
    assert notices == ([] if changed else [f"the network is that of {source}: vit_tiny_patch16_224"])


@torch.no_grad()
def test_a_swin_has_its_tables_of_relative_positions_resampled(tmp_path):
    small = {"patch_size": 4, "embed_dim": 16, "depths": (2,), "num_heads": (2,), "num_classes": 3}
    torch.manual_seed(1)
    before = timm.models.SwinTransformer(img_size=56, window_size=7, **small)
    table = before.layers[0].blocks[0].attn.relative_position_bias_table
    torch.nn.init.normal_(table)
    torch.save(before.state_dict(), tmp_path / "w.pth")
    model = {"name": "swin_tiny_patch4_window7_224", **{k: v for k, v in small.items() if k != "num_classes"}}
    model = {**model, "depths": [2], "num_heads": [2], "window_size": 4}
    ours, loaded, _ = start(tmp_path / "w.pth", 32, model=model)
    theirs = timm.models.SwinTransformer(img_size=32, window_size=4, **small).eval()
    theirs.load_state_dict(timm.models.swin_transformer.checkpoint_filter_fn(before.state_dict(), theirs))
    x = images(32)
    torch.testing.assert_close(ours.backbone.forward_features(x), theirs.forward_features(x), atol=1e-5, rtol=0)
    assert any("relative_position_bias_table" in name for name in loaded.resampled)


@torch.no_grad()
def test_torchvision(tmp_path):
    torch.manual_seed(1)
    network = torchvision.models.resnet18(num_classes=3)
    torch.save({"model": network.state_dict()}, tmp_path / "w.pth")
    ours, loaded, _ = start(f"torchvision:resnet18?num_classes=3@{tmp_path}/w.pth")
    x = normalize(images(96), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    ours.backbone.fc = network.fc
    torch.testing.assert_close(ours(images(96)), network.eval()(x), atol=1e-5, rtol=0)
    assert loaded.found.drawn == ("fc.weight", "fc.bias")


@pytest.mark.slow
@torch.no_grad()
def test_torchvisions_vit_at_another_size(tmp_path):
    torch.manual_seed(1)
    network = torchvision.models.vit_b_16(num_classes=10)
    torch.nn.init.normal_(network.encoder.pos_embedding)
    torch.save(network.state_dict(), tmp_path / "w.pth")
    ours, loaded, _ = start(f"torchvision:vit_b_16?num_classes=10@{tmp_path}/w.pth")
    theirs = torchvision.models.vit_b_16(num_classes=10, image_size=96).eval()
    resample = torchvision.models.vision_transformer.interpolate_embeddings
    theirs.load_state_dict(resample(96, 16, network.state_dict()))
    x = normalize(images(96), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    torch.testing.assert_close(ours(images(96)), theirs(x), atol=1e-5, rtol=0)
    assert loaded.found.head


@pytest.mark.parametrize("kind", ["ViT", "Dinov2"])
@torch.no_grad()
def test_hugging_face_headless_or_not_from_224_to_96_pixels(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=224, patch_size=16
    )
    network = getattr(transformers, f"{kind}Model")(config).eval()
    torch.nn.init.normal_(network.embeddings.position_embeddings)
    network.save_pretrained(tmp_path / "net")
    ours, loaded, notices = start(f"hf:{tmp_path}/net")
    inner = getattr(ours.backbone, kind.lower())
    x = normalize(images(96), [0.5] * 3, [0.5] * 3)
    options = {"interpolate_pos_encoding": True} if kind == "ViT" else {}
    theirs = network(x, **options).last_hidden_state
    torch.testing.assert_close(inner(x).last_hidden_state, theirs, atol=1e-5, rtol=0)
    assert ours(images(96)).shape == (2, 10)
    assert f"{kind.lower()}.embeddings.position_embeddings" in loaded.resampled
    assert all(name.startswith("classifier.") for name in loaded.found.drawn)
    assert notices[0].endswith(f": hf:{kind.lower()}")


def test_a_run_starts_another_with_its_network_treatments_and_normalization(tiny, tmp_path):
    first = train(tiny(treatments=["talking_heads", "sam"], out=str(tmp_path / "first")))
    other = tiny(init=f"{first.path}@last", out=str(tmp_path / "second"), steps=1, optimizer={"lr": 1e-30})
    other["data"] = {"source": "digits", "limit": 100, "augment": "none"}
    del other["model"]
    second = train(other)
    assert second.recipe.model == first.recipe.model
    assert [treatment.name for treatment in second.recipe.treatments] == ["talking_heads"]
    before, after = load_model(first.path, "last").state_dict(), load_model(second.path).state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())  # the same classes: with the head
    stored = json.loads((second.path / "init.json").read_text())
    assert stored["digest"] == second.recipe.init.digest
    assert stored["drawn"] == []


def test_a_run_of_other_classes_or_another_digest(tiny, tmp_path):
    first = train(tiny(out=str(tmp_path / "first")))
    recipe = build_recipe(tiny(init=str(first.path)))
    init = read_initial_weights(recipe)
    data = open_data(recipe.data)
    _, loaded = build_network(recipe, data, init)
    assert loaded.found.head
    renamed = type(data)(data.name, tuple(f"no {name}" for name in data.classes), *list(vars(data).values())[2:8])
    _, loaded = build_network(recipe, renamed, init)
    assert set(loaded.found.drawn) == {"head.weight", "head.bias"}
    settled = settle(recipe, init)[0]
    moved = settled.model_copy(update={"init": settled.init.model_copy(update={"source": "elsewhere"})})
    assert settled.digest("d") == moved.digest("d") != recipe.digest("d")
    (first.path / "checkpoints" / "best").rename(first.path / "checkpoints" / "epoch-1")
    changed = {name: value + 1 for name, value in first.checkpoints.read_model("last").items()}
    first.checkpoints.save(["best"], changed, {})
    with pytest.raises(RecipeError, match="they have changed"):
        read_initial_weights(settled)


def test_what_does_not_fit_is_one_sentence(tiny, tmp_path):
    torch.save(timm_vit().state_dict(), tmp_path / "w.pth")
    with pytest.raises(ModelError, match=r"\d+% of the network's parameters, and half is the least: \S+ .*choose"):
        start(tmp_path / "w.pth", model={"name": "resnet18"})
    (tmp_path / "w.txt").write_text("weights")
    with pytest.raises(ModelError, match="is a text file, not weights"):
        start(tmp_path / "w.txt")
    with pytest.raises(RecipeError, match="neither a run directory nor a file of weights"):
        start(tmp_path / "nothing")
    grey = {"data": {"source": "digits"}, "model": {"name": "vit_tiny_patch16_224", **VIT, "patch_size": 16}}
    with pytest.raises(ModelError, match=r"are for images of 3 channels, and the data has 1; set model\.in_chans=3"):
        start(tmp_path / "w.pth", **grey)
    with pytest.raises(RecipeError, match=r"Give init or model\.pretrained, not both"):
        build_recipe({"init": "timm:resnet18", "model": {"name": "resnet18", "pretrained": True}})


def test_what_did_not_load_is_listed(tmp_path):
    state = timm_vit(img_size=32).state_dict()
    del state["blocks.0.norm1.weight"]
    save_file({**state, "extra.weight": torch.ones(1)}, tmp_path / "w.safetensors")
    _, loaded, _ = start(tmp_path / "w.safetensors", 32, model={"name": "vit_tiny_patch16_224", **VIT})
    assert f"not in {tmp_path}/w.safetensors, so drawn at random: blocks.0.norm1.weight" in loaded.notices
    assert f"not used of {tmp_path}/w.safetensors: extra.weight" in loaded.notices


HARD = {
    "data": {"source": "digits", "limit": 200, "augment": "deit"},
    "steps": 40,
    "ema": 0.9,
    "checkpoint": {"every": "9 steps", "keep_epochs": [3]},
    "workers": 0,
    "layer_decay": 0.7,
    "head_lr": 0.01,
    "freeze": ["stem"],
}


def test_killed_and_resumed_without_the_weights_it_began_with(tiny, tmp_path):
    first = train(tiny(out=str(tmp_path / "first")))
    hard = {**HARD, "init": str(first.path)}
    whole = train(tiny(**hard, out=str(tmp_path / "whole")))
    aside = tmp_path / "aside"

    class Hidden(list):
        def __iter__(self):
            yield 14
            first.path.rename(aside)

    killed = killed_and_resumed(tiny, tmp_path, Hidden(), hard)
    assert drop_timing(whole.metrics) == drop_timing(killed.metrics)
    for name in ("last", "best"):
        one, other = whole.checkpoints.read(name), killed.checkpoints.read(name)
        assert all(torch.equal(value, other[0][key]) for key, value in one[0].items())
    assert whole.status["digest"] == killed.status["digest"]
    stem = "backbone.patch_embed.proj.weight"
    assert torch.equal(killed.checkpoints.read_model("last")[stem], Run(aside).checkpoints.read_model("best")[stem])


def test_a_run_killed_before_its_first_step_needs_its_weights_again(tiny, tmp_path):
    first = train(tiny(out=str(tmp_path / "first")))
    run = train(tiny(init=str(first.path), out=str(tmp_path / "second")))
    weights = run.checkpoints.read_model("last")
    for checkpoint in run.checkpoints.folder.iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    run.write_status("interrupted", step=0)
    (tmp_path / "first").rename(tmp_path / "moved")
    with pytest.raises(RecipeError, match="neither a run directory"):
        resume(run.path)
    (tmp_path / "moved").rename(tmp_path / "first")
    again = resume(run.path).checkpoints.read_model("last")
    assert all(torch.equal(value, again[name]) for name, value in weights.items())


def test_a_dry_run_shows_what_would_load_and_needs_no_published_weights(tiny, tmp_path):
    first = train(tiny(out=str(tmp_path / "first")))
    model = tiny()["model"]
    plan = plan_run(tiny(model={"img_size": 12}, init=str(first.path), layer_decay=0.5, freeze="stem"))
    assert plan.recipe.model.keywords["embed_dim"] == model["embed_dim"]
    assert any("pos_embed is resampled from [1, 16, 32] to [1, 36, 32]" in note for note in plan.notes)
    assert plan.trainable < plan.parameters
    assert sorted({group.lr for group in plan.optimizer}) == pytest.approx([0.00125, 0.0025, 0.005])
    away = plan_run({"init": "timm:test_vit", "data": "shapes:60", "model": {"img_size": 32}})
    assert away.recipe.model.name == "test_vit"
    assert any("There are no pretrained weights for timm:test_vit here" in note for note in away.notes)
