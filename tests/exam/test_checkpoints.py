"""Checkpoints as people have them, written by the tools that people use, become the network they were of."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from timm.utils import CheckpointSaver, ModelEmaV3
from torch import nn

import vitclinic
from vitclinic._core.errors import ModelError, RecipeError
from vitclinic.exam.targets import resolve
from vitclinic.models.filling import fill
from vitclinic.models.weights import read_weights, split_key

CPU = torch.device("cpu")
NAME = "vit_tiny_patch16_224"
SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
QUERY = "&".join(f"{key}={value}" for key, value in SMALL.items())
TARGET = f"timm:{NAME}?{QUERY}"


def build(seed: int = 1, **keywords) -> nn.Module:
    torch.manual_seed(seed)
    return timm.models.VisionTransformer(**(SMALL | keywords)).eval()


def same(target: str, network: nn.Module) -> bool:
    found, wanted = resolve(target, CPU).network.backbone.state_dict(), network.state_dict()
    return found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def save_by_timm(folder: Path, network: nn.Module, ema: nn.Module | None = None, **args) -> Path:
    """A checkpoint by timm's own saver, as its training script calls it."""
    saver = CheckpointSaver(
        network,
        torch.optim.AdamW(network.parameters()),
        args=argparse.Namespace(**({"model": NAME, "lr": 0.1, "opt_betas": None} | args)),
        model_ema=ema,
        checkpoint_dir=str(folder),
        recovery_dir=str(folder),
    )
    saver.save_checkpoint(0, 12.5)
    return folder / "last.pth.tar"


def test_a_checkpoint_of_timms_own_saver(tmp_path):
    network = build()
    file = save_by_timm(tmp_path, network)
    assert same(f"{TARGET}@{file}", network)
    assert same(f"timm:?{QUERY}@{file}", network)  # the file says which network it is of


def test_timms_options_say_how_the_network_was_built(tmp_path):
    torch.manual_seed(1)
    network = timm.create_model("test_vit", num_classes=7, img_size=32).eval()
    file = save_by_timm(
        tmp_path, network, model="test_vit", num_classes=7, img_size=32, mean=[0.1, 0.2, 0.3], std=[1.0, 1.0, 1.0]
    )
    target = resolve(f"timm:@{file}", CPU)
    assert target.network.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert target.size == (32, 32)
    assert same(f"timm:@{file}", network)
    assert same(f"timm:test_vit@{file}", network)


def test_averaged_weights_are_told_and_the_others_can_be_had(tmp_path, caplog):
    network, averaged = build(1), build(2)
    file = save_by_timm(tmp_path, network, ModelEmaV3(averaged))
    assert same(f"{TARGET}@{file}", averaged)
    assert (
        f"'{file}' has several weights; 'state_dict_ema' are taken. For the others, write last.pth.tar#state_dict."
        in caplog.text
    )
    caplog.clear()
    assert same(f"{TARGET}@{file}#state_dict", network)
    assert same(f"{TARGET}@{file}#state_dict_ema", averaged)
    assert not caplog.text
    with pytest.raises(ModelError, match="has no weights 'ema'; it has state_dict, state_dict_ema"):
        resolve(f"{TARGET}@{file}#ema", CPU)


def test_a_files_own_name_may_hold_a_sharp(tmp_path):
    torch.save(build().state_dict(), tmp_path / "run#3.pth")
    assert split_key(f"{tmp_path}/run#3.pth") == (tmp_path / "run#3.pth", None)
    assert same(f"{TARGET}@{tmp_path}/run#3.pth", build())


def lightning(state):
    """What Lightning's Trainer writes: names behind the module's attribute, and its own books."""
    return {
        "epoch": 3,
        "global_step": 100,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {f"model.{key}": value for key, value in state.items()} | {"criterion.weight": torch.ones(5)},
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 4}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'acc'}": {"best_model_score": torch.tensor(0.5)}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}],
        "lr_schedulers": [],
        "hyper_parameters": {"lr": 0.1},
    }


def swa(state):
    """What torch.optim.swa_utils.AveragedModel has, as in torchvision's reference training."""
    averaged = {f"module.{key}": value for key, value in state.items()} | {"n_averaged": torch.tensor(7)}
    return {"model_ema": averaged, "args": argparse.Namespace(model="vit_b_16"), "epoch": 3}


def prefixed(prefix):
    return lambda state: {f"{prefix}{key}": value for key, value in state.items()}


WRITERS = {
    "lightning": lightning,
    "averaged model": swa,
    "module.backbone.": prefixed("module.backbone."),
    "any prefix": prefixed("student.encoder.net."),
    "compiled": prefixed("_orig_mod."),
    "compiled in parallel": prefixed("module._orig_mod."),
    "compiled blocks": lambda state: {key.replace("blocks.", "blocks._orig_mod."): v for key, v in state.items()},
    "under another key": lambda state: {"net": state, "optimizer": {"state": {}, "param_groups": []}},
}


BESIDE = {
    "an accuracy": lambda state: {"state_dict": state, "best_acc1": torch.tensor(76.1)},
    "a random state": lambda state: {"model": state, "torch_rng_state": torch.get_rng_state()},
    "an epoch": lambda state: {"model_state_dict": state, "epoch": torch.tensor(3), "loss": torch.tensor(0.3)},
    "a counter": lambda state: {"net": state, "averaging": {"n_averaged": torch.tensor(3)}},
    "in another": lambda state: {"checkpoint": {"model": state, "epoch": 3}, "optimizer": {"state": {}}},
}


@pytest.mark.parametrize("writer", BESIDE)
def test_tensors_beside_a_state_dict_do_not_make_one(writer, tmp_path):
    network = build()
    torch.save(BESIDE[writer](network.state_dict()), tmp_path / "w.ckpt")
    assert same(f"{TARGET}@{tmp_path}/w.ckpt", network)


@pytest.mark.parametrize("writer", WRITERS)
def test_names_with_a_prefix_and_tensors_beside(writer, tmp_path):
    network = build()
    torch.save(WRITERS[writer](network.state_dict()), tmp_path / "w.ckpt")
    assert same(f"{TARGET}@{tmp_path}/w.ckpt", network)


def test_two_state_dicts_without_a_known_name_are_asked_about(tmp_path):
    torch.save({"student": build(1).state_dict(), "teacher": build(2).state_dict()}, tmp_path / "w.pth")
    with pytest.raises(ModelError, match=r"several state dicts \(student, teacher\); write FILE#student"):
        resolve(f"{TARGET}@{tmp_path}/w.pth", CPU)
    assert same(f"{TARGET}@{tmp_path}/w.pth#teacher", build(2))


def test_a_network_and_its_average_side_by_side_are_asked_about(tmp_path):
    both = prefixed("model.")(build(1).state_dict()) | prefixed("average.module.")(build(2).state_dict())
    torch.save({"state_dict": both, "epoch": 3}, tmp_path / "w.ckpt")
    with pytest.raises(ModelError, match=r"2 times\. Write w.ckpt#model or w.ckpt#average.module\."):
        resolve(f"{TARGET}@{tmp_path}/w.ckpt", CPU)
    assert same(f"{TARGET}@{tmp_path}/w.ckpt#model", build(1))
    assert same(f"{TARGET}@{tmp_path}/w.ckpt#average", build(2))


def test_a_classifier_with_a_tensor_too_many_does_not_fit(tmp_path):
    torch.save(build().state_dict() | {"head.scale": torch.ones(5)}, tmp_path / "w.pth")
    with pytest.raises(ModelError, match=r"it has head\.scale, which the network does not"):
        resolve(f"{TARGET}@{tmp_path}/w.pth", CPU)


def test_integers_in_the_place_of_weights_do_not_fit(tmp_path):
    state = {key: (value * 100).to(torch.int8) for key, value in build().state_dict().items()}
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(ModelError, match="do not fit: cls_token holds integers in the file, such as those of a quant"):
        resolve(f"{TARGET}@{tmp_path}/w.pth", CPU)


def test_position_embeddings_are_resampled_and_told(tmp_path, caplog):
    large = build(img_size=32)
    torch.save(large.state_dict(), tmp_path / "w.pth")
    found = resolve(f"{TARGET}@{tmp_path}/w.pth", CPU).network.backbone
    assert "pos_embed is resampled from [1, 65, 24] to [1, 17, 24]" in caplog.text
    expected = timm.layers.resample_abs_pos_embed(large.pos_embed, (4, 4), num_prefix_tokens=1)
    torch.testing.assert_close(found.pos_embed, expected)
    assert torch.equal(found.blocks[1].mlp.fc1.weight, large.blocks[1].mlp.fc1.weight)
    with pytest.raises(
        ModelError, match=r"pos_embed is \[1, 65, 24\] in the file and \[1, 5, 24\] in the network, and 1 more"
    ):
        resolve(f"{TARGET.replace('patch_size=4', 'patch_size=8')}@{tmp_path}/w.pth", CPU)  # other patches do not fit


def test_position_embeddings_of_torchvision(tmp_path, caplog):
    def torchvision_vit(side):
        return torchvision.models.VisionTransformer(side, 8, 1, 2, 16, 32, num_classes=3)

    torch.manual_seed(1)
    torch.save(torchvision_vit(16).state_dict(), tmp_path / "w.pth")
    network = torchvision_vit(24)
    assert fill(network, read_weights(tmp_path / "w.pth")) == ()
    assert "encoder.pos_embedding is resampled from [1, 5, 16] to [1, 10, 16]" in caplog.text
    assert torch.equal(network.heads.head.weight, torch.load(tmp_path / "w.pth")["heads.head.weight"])


def test_a_file_of_another_architecture_is_told(tmp_path, caplog):
    file = save_by_timm(tmp_path, build(), model="deit_tiny_patch16_224")
    resolve(f"{TARGET}@{file}", CPU)
    assert f"'{file}' says that its weights are of timm:deit_tiny_patch16_224, not of timm:{NAME}." in caplog.text
    with pytest.raises(ModelError, match=r"do not fit: it lacks .*\. The file is of 'deit_tiny_patch16_224'\."):
        resolve(f"timm:resnet18@{file}", CPU)
    torch.save({"state_dict": build().state_dict(), "arch": "visiontransformer"}, tmp_path / "w.pth")
    with pytest.raises(RecipeError, match="does not say which network it is of"):
        resolve(f"timm:@{tmp_path}/w.pth", CPU)


def test_a_file_without_a_classifier(tmp_path, caplog):
    encoder = build(num_classes=0)
    torch.save({"teacher": prefixed("backbone.")(encoder.state_dict())}, tmp_path / "dino.pth")
    target = resolve(f"{TARGET}@{tmp_path}/dino.pth", CPU)
    assert target.drawn == ("head.weight", "head.bias")
    assert "It is drawn at random (head.weight, head.bias)" in caplog.text
    exam = vitclinic.examine(
        f"{TARGET}@{tmp_path}/dino.pth", "shapes:60", limit=8, probes=["accuracy", "norms"], out=tmp_path
    )
    assert exam["accuracy"].status == "does_not_apply"
    assert "the classifier was drawn at random" in exam["accuracy"].reason
    assert exam["norms"].status == "ok"
    without = TARGET.replace("num_classes=5", "num_classes=0")
    assert same(f"{without}@{tmp_path}/dino.pth", encoder)
    torch.save(build().state_dict(), tmp_path / "whole.pth")  # a classifier that an encoder has no use for
    assert resolve(f"{without}@{tmp_path}/whole.pth", CPU).drawn == ()


def test_published_weights_with_another_number_of_classes(tmp_path, monkeypatch, caplog):
    torch.manual_seed(3)
    network = timm.create_model("test_vit")
    stored = tmp_path / "models--timm--test_vit.r160_in1k"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("abc")
    (stored / "snapshots" / "abc").mkdir(parents=True)
    save_file(network.state_dict(), stored / "snapshots" / "abc" / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("vitclinic.models.libraries._is_offline", lambda: True)
    assert resolve("timm:test_vit", CPU).drawn == ()
    assert resolve("timm:test_vit?num_classes=0", CPU).drawn == ()
    with caplog.at_level(logging.WARNING):
        assert resolve("timm:test_vit?num_classes=5", CPU).drawn == ("head.weight", "head.bias")
    assert "have no classifier of this size" in caplog.text


def test_a_hugging_face_encoder_has_a_drawn_classifier(tmp_path, caplog):
    hf = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = hf.ViTConfig(**small, image_size=16, patch_size=8, num_labels=3)
    hf.ViTModel(config).save_pretrained(tmp_path / "encoder")
    hf.ViTForImageClassification(config).save_pretrained(tmp_path / "classifier")
    assert resolve(f"hf:{tmp_path}/classifier", CPU).drawn == ()
    assert resolve(f"hf:{tmp_path}/encoder", CPU).drawn == ("classifier.bias", "classifier.weight")
    other = f"hf:{tmp_path}/classifier?num_labels=5&ignore_mismatched_sizes=true"
    assert resolve(other, CPU).drawn == ("classifier.bias", "classifier.weight")


def test_our_own_network_without_published_weights_says_so():
    with pytest.raises(ModelError, match="has no published weights"):
        resolve("timm:vit_tiny_fitted?img_size=16", CPU)


def write_zip_cut_short(file):
    torch.save(build().state_dict(), file)
    file.write_bytes(file.read_bytes()[:-200])


FILES = {
    "empty": (lambda file: file.write_bytes(b""), "is empty"),
    "text": (
        lambda file: file.write_text("epoch,loss\n1,0.5\n"),
        "is a text file, not weights; it begins with 'epoch,loss'",
    ),
    "lfs": (
        lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\noid"),
        "begins with 'version https",
    ),
    "bytes": (lambda file: file.write_bytes(b"\x00\x01\x02junk"), "is not a torch checkpoint, or is damaged"),
    "pickle": (lambda file: file.write_bytes(b"\x80\x02junk"), "is not a torch checkpoint, or is damaged"),
    "cut short": (write_zip_cut_short, "is not a torch checkpoint, or is damaged"),
    "list": (lambda file: torch.save([1, 2], file), "holds a list, not named tensors"),
    "module": (lambda file: torch.save(build(), file), "holds Python objects (timm.layers.attention.Attention and "),
    "numpy": (
        lambda file: torch.save({"state_dict": build().state_dict(), "best": np.float64(0.5)}, file),
        "torch.save(network.state_dict(), FILE)",
    ),
    "old format": (
        lambda file: torch.save({"x": Path("a")}, file, _use_new_zipfile_serialization=False),
        "holds Python objects (pathlib",
    ),
}


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("kind", FILES)
def test_what_is_no_checkpoint_is_a_sentence(kind, suffix, tmp_path):
    write, message = FILES[kind]
    file = tmp_path / f"w{suffix}"
    write(file)
    with pytest.raises(ModelError) as caught:
        resolve(f"{TARGET}@{file}", CPU)
    assert str(caught.value).startswith(f"'{file}' ")
    if suffix == ".pth" or kind in ("empty", "text", "lfs"):
        assert message in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert "\n" not in str(caught.value)
