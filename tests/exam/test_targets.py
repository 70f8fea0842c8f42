"""TARGETs: what a user writes becomes a network that takes [0, 1], or one sentence."""

import json
import sys

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

import vitclinic
from vitclinic._core.errors import ModelError, RecipeError, RunError
from vitclinic.exam.targets import resolve

CPU = torch.device("cpu")
SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
QUERY = "&".join(f"{key}={value}" for key, value in SMALL.items())


@pytest.fixture
def weights():
    torch.manual_seed(1)
    network = timm.models.VisionTransformer(**SMALL).eval()
    return network, {name: tensor.clone() for name, tensor in network.state_dict().items()}


def computes_the_same(target, network, mean, std):
    images = torch.rand(2, 3, 16, 16)
    shape = (3, 1, 1)
    normalised = (images - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)
    torch.testing.assert_close(target.network(images), network(normalised))


def test_a_file_that_says_what_it_is(weights, tmp_path):
    network, state = weights
    facts = {
        "timm": "vit_tiny_patch16_224",
        "kwargs": json.dumps(SMALL),
        "mean": "0.1,0.2,0.3",
        "std": "0.4,0.5,0.6",
    }
    save_file(state, tmp_path / "w.safetensors", facts)
    for name in ("vit_tiny_patch16_224", ""):
        target = resolve(f"timm:{name}@{tmp_path}/w.safetensors", CPU)
        assert target.size == (16, 16)
        assert target.channels == 3
        assert not target.network.training
        computes_the_same(target, network, [0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    with pytest.raises(RecipeError, match="weights of timm:vit_tiny_patch16_224, not of timm:resnet18"):
        resolve(f"timm:resnet18@{tmp_path}/w.safetensors", CPU)


@pytest.mark.parametrize("nested", [False, True])
def test_keywords_and_a_torch_checkpoint(weights, tmp_path, nested):
    network, state = weights
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save({"state_dict": wrapped, "epoch": 3} if nested else state, tmp_path / "w.pth")
    target = resolve(f"timm:vit_tiny_patch16_224?{QUERY}@{tmp_path}/w.pth", CPU)
    computes_the_same(target, network, [0.5] * 3, [0.5] * 3)


def test_weights_that_do_not_fit_are_one_sentence(weights, tmp_path):
    _, state = weights
    save_file(state, tmp_path / "w.safetensors", {"note": "patches of four"})
    with pytest.raises(ModelError) as caught:
        resolve(f"timm:vit_tiny_patch16_224?{QUERY}&num_classes=7@{tmp_path}/w.safetensors", CPU)
    assert "head.weight is [5, 24] in the file and [7, 24] in the network, and 1 more" in str(caught.value)
    assert "The file's note: 'patches of four'" in str(caught.value)
    with pytest.raises(RecipeError, match="does not say which network it is of"):
        resolve(f"timm:@{tmp_path}/w.safetensors", CPU)


@pytest.mark.parametrize("facts", [{"kwargs": "{"}, {"mean": "0.5,x,0.5"}, {"kwargs": '{"pretrained": true}'}], ids=str)
def test_metadata_that_cannot_be_meant_are_a_sentence(weights, tmp_path, facts):
    save_file(weights[1], tmp_path / "w.safetensors", {"timm": "test_vit", **facts})
    with pytest.raises(ModelError, match=r"metadata of|cannot be built"):
        resolve(f"timm:@{tmp_path}/w.safetensors", CPU)


class Bomb:
    def __reduce__(self):
        return print, ("unpickled!",)


def test_nothing_but_tensors_is_unpickled(tmp_path, capsys):
    torch.save({"x": Bomb()}, tmp_path / "evil.pth")
    with pytest.raises(ModelError, match="tensors only"):
        resolve(f"timm:resnet18@{tmp_path}/evil.pth", CPU)
    (tmp_path / "junk.safetensors").write_bytes(b"\0junk")
    with pytest.raises(ModelError, match="cannot be read"):
        resolve(f"timm:resnet18@{tmp_path}/junk.safetensors", CPU)
    assert "unpickled!" not in capsys.readouterr().out


def test_random_weights_are_the_same_every_time():
    states = [
        resolve(f"timm:vit_tiny_patch16_224?{QUERY}", CPU, random_weights=True).network.state_dict() for _ in range(2)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_sizes_are_fixed_where_the_network_fixes_them():
    def size(name):
        return resolve(name, CPU, random_weights=True).size

    assert size("timm:test_vit") == (160, 160)
    assert size("timm:test_resnet") is None
    assert size("torchvision:resnet18") is None
    assert size("torchvision:vit_b_16?image_size=32") == (32, 32)


def test_torchvision_with_a_file(tmp_path):
    torch.manual_seed(1)
    network = torchvision.models.resnet18(num_classes=3).eval()
    torch.save(network.state_dict(), tmp_path / "w.pth")
    target = resolve(f"torchvision:resnet18?num_classes=3@{tmp_path}/w.pth", CPU)
    computes_the_same(target, network, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def test_hugging_face_from_a_local_folder(tmp_path):
    hf = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = hf.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        num_labels=10,
    )
    hf.ViTForImageClassification(config).save_pretrained(tmp_path / "net")
    exam = vitclinic.examine(f"hf:{tmp_path}/net", "shapes:60", limit=4, probes=["norms"], out=tmp_path)
    assert exam["norms"].status == "ok", exam["norms"].reason
    assert resolve(f"hf:{tmp_path}/net", CPU).size == (16, 16)
    with pytest.raises(ModelError, match=r"no pretrained weights for hf:.*/none here .* Give a local folder"):
        resolve(f"hf:{tmp_path}/none", CPU)


def test_without_a_network_weights_come_from_the_cache_of_the_hub(tmp_path, monkeypatch):
    torch.manual_seed(3)
    network = timm.create_model("test_vit")
    stored = tmp_path / "models--timm--test_vit.r160_in1k"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("abc")
    (stored / "snapshots" / "abc").mkdir(parents=True)
    save_file(network.state_dict(), stored / "snapshots" / "abc" / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("vitclinic.models.libraries._is_offline", lambda: True)
    found = resolve("timm:test_vit", CPU).network.backbone.state_dict()
    assert all(torch.equal(value, found[key]) for key, value in network.state_dict().items())
    with pytest.raises(ModelError, match=r"its cache has no weights of timm/test_vit2\.r160_in1k"):
        resolve("timm:test_vit2", CPU)


def test_without_weights_the_sentence_says_what_to_do(monkeypatch):
    def offline(name, *, pretrained, **keywords):
        if pretrained:
            raise ConnectionError("Max retries exceeded\nand a page of details")
        return vitclinic.models.create_model(name, **keywords)

    monkeypatch.setattr("vitclinic.models.libraries._is_offline", lambda: False)
    monkeypatch.setattr("vitclinic.models.libraries.create_model", offline)
    with pytest.raises(ModelError) as caught:
        resolve("timm:resnet18", CPU)
    assert str(caught.value) == (
        "There are no pretrained weights for timm:resnet18 here (Max retries exceeded). Give a file"
        " (timm:resnet18@FILE), or examine it at random weights (`random_weights`)."
    )


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\n"
        "def good():\n    return nn.Sequential(nn.Flatten(), nn.Linear(3, 2))\n"
        "def bad():\n    raise ValueError('no')\n"
        "def odd():\n    return 3\n"
    )


@pytest.mark.usefixtures("module")
def test_a_function_of_a_module():
    first, second = (resolve("my_nets:good", CPU).network for _ in range(2))
    assert len(first) == 2
    assert torch.equal(first[1].weight, second[1].weight)  # random weights are the same every time, to be found again


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("my_nets:bad", "'my_nets:bad' raised ValueError: no."),
        ("my_nets:odd", "returned int; expected a torch.nn.Module"),
        ("my_nets:goods", "the module my_nets has no 'goods'"),
        ("no_nets:good", "No module named 'no_nets'"),
        ("tim:resnet18", "Did you mean 'timm:resnet18'?"),
        ("resnet18", "write timm:resnet18."),
        ("nothing", "write a run directory, timm:NAME[@FILE]"),
        (".", "it has no recipe.yaml"),
        ("my_nets.py", "write my_nets:FUNCTION, a function in it that returns a network."),
        ("timm:resnet81", "There is no model 'resnet81'. Did you mean"),
        ("timm:resnet81@x.pth", "There is no file 'x.pth'."),
        ("torchvision:resnet81", "torchvision has no model 'resnet81'. Did you mean 'resnet18'?"),
        ("timm:resnet18@nothing.pth", "There is no file 'nothing.pth'"),
        ("timm:resnet18?depth@x", "'depth' in 'timm:resnet18?depth@x' is not key=value"),
        ("hf:name@file", "without '@'"),
        ("timm:", "'timm:' names no network; write timm:NAME."),
        ("timm:?depth=3", "'timm:?depth=3' names no network; write timm:NAME."),
        ("torchvision:", "'torchvision:' names no network; write torchvision:NAME."),
        ("hf:", "'hf:' names no network; write hf:NAME."),
        ("torchvision:@x.pth", "names no network; write torchvision:NAME@x.pth."),
        ("timm:@missing", "There is no file 'missing'."),
        ("timm:@missing.safetensors", "There is no file 'missing.safetensors'."),
        ("timm:resnet18@", "'timm:resnet18@' names no file of weights after its '@'."),
        ("timm:resnet18?pretrained=true", "'pretrained' in 'timm:resnet18?pretrained=true' is not the network's own"),
        ("torchvision:resnet18?weights=DEFAULT", "'weights' in 'torchvision:resnet18?weights=DEFAULT' is not the"),
        ("timm:resnet18?checkpoint_path=x", "a file's are @FILE, random ones `random_weights`."),
        ("torchvision:resnet18?name=vgg11", "'name' in 'torchvision:resnet18?name=vgg11' is not the network's own"),
    ],
)
def test_mistakes_are_sentences(target, message):
    with pytest.raises(RecipeError) as caught:
        resolve(target, CPU)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("random_weights", [True, False])
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("torchvision:resnet18?foo=1", "torchvision:resnet18 takes no keyword 'foo'."),
        ("torchvision:resnet18?num_classes=x", "torchvision:resnet18 cannot be built with these keywords ("),
        ("torchvision:vit_b_16?image_size=30", "(Input shape indivisible by patch size!)."),
        ("timm:resnet18?foo=1", "'resnet18' does not accept model.foo; remove it."),
        ("timm:vit_tiny_patch16_224?img_size=[32]", "timm:vit_tiny_patch16_224 cannot be built with these keywords ("),
        ("timm:test_resnet?mean=3", "timm:test_resnet cannot be built with these keywords ("),
        ("timm:resnet81", "There is no model 'resnet81'. Did you mean"),
    ],
)
def test_keywords_that_do_not_fit_are_blamed_and_not_the_weights(target, message, random_weights):
    with pytest.raises(ModelError) as caught:
        resolve(target, CPU, random_weights)
    assert message in str(caught.value)
    assert "pretrained" not in str(caught.value)


def test_keywords_for_which_there_are_no_weights():
    assert (
        resolve("torchvision:resnet18?num_classes=10", CPU, random_weights=True).network.backbone.fc.out_features == 10
    )
    with pytest.raises(
        ModelError, match=r"no pretrained weights for torchvision:resnet18 with these keywords here \(The"
    ):
        resolve("torchvision:resnet18?num_classes=10", CPU)


def test_a_run_is_examined_on_its_own_data_and_keeps_its_exams(tmp_path):
    from tests.training.conftest import TINY

    run = vitclinic.train({**TINY, "out": str(tmp_path / "run"), "checkpoint": {"keep_epochs": [0]}})
    exam = vitclinic.examine(run.path, probes=["norms"], limit=9)
    assert exam["norms"].provenance.images == 9
    assert exam.folder == run.path / "exams"
    assert exam["norms"].status == "ok"
    start = vitclinic.examine(f"{run.path}@epoch-0", probes=["norms"], limit=9)
    assert start["norms"].scalars["weight_norm"] != exam["norms"].scalars["weight_norm"]
    assert vitclinic.examine(run, probes=["norms"], limit=9).reused == {"norms"}
    with pytest.raises(RunError, match="has no checkpoint 'epoch-7'"):
        vitclinic.examine(f"{run.path}@epoch-7", probes=["norms"])
    with pytest.raises(RecipeError, match="leave out `random_weights`"):
        resolve("timm:resnet18@x.pth", CPU, random_weights=True)
