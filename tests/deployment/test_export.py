"""export: what other libraries open gives the same logits; what cannot be expressed is one sentence."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import timm
import torch
from PIL import Image

import vitclinic
from tests.deployment.conftest import TINY
from vitclinic._core.errors import ModelError, RecipeError, RunError
from vitclinic._core.io import write_errors
from vitclinic.deployment.export import check_same_logits
from vitclinic.training import load_model

SWIN = {
    "name": "swin_tiny_patch4_window7_224",
    **{"patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]},
}
NETWORKS = {
    "vit": (TINY, []),
    "swin": (SWIN, []),
    "resnet": ({"name": "resnet10t"}, []),
    "alternet": ({"name": "alternet18"}, []),
    "hybrid": ({"name": "hybrid_vit", "embed_dim": 32, "num_heads": 2}, []),
    "treated vit": (TINY, ["sequence_pooling", "conv_stem", "context_broadcasting", "talking_heads"]),
    "treated swin": (SWIN, ["context_broadcasting", "talking_heads"]),
    "treated resnet": ({"name": "resnet10t"}, ["spatial_smoothing"]),
    "treated alternet": ({"name": "alternet18"}, ["spatial_smoothing", "talking_heads"]),
}


def train(folder, model, treatments, **changes):
    usual = {"data": {"source": "shapes:60", "augment": "none"}, "steps": 1, "batch_size": 16, "workers": 0}
    return vitclinic.train(model=model, treatments=treatments, out=folder, **(usual | changes))


def test_a_timm_folder_loads_in_timm_alone_and_in_transformers_offline(run, monkeypatch):
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = vitclinic.export(run, "hf")
    network = load_model(run.path)
    x = torch.rand(3, 3, *run.spec.img_size)
    normalized = (x - network.mean) / network.std
    with torch.no_grad():
        wanted = network(x)
        assert (
            timm.create_model(f"local-dir:{folder}", pretrained=True).eval()(normalized) - wanted
        ).abs().max() < 1e-4
        theirs = AutoModelForImageClassification.from_pretrained(folder).eval()
        assert (theirs(pixel_values=normalized).logits - wanted).abs().max() < 1e-4
    assert theirs.config.id2label == {0: "cat", 1: "dog"}
    assert AutoImageProcessor.from_pretrained(folder) is not None
    card = (folder / "README.md").read_text()
    for part in ("## Data", "14 train", "## Recipe", "patch_size: 8", "accuracy on 16 test images", "95% interval"):
        assert part in card
    assert str(run.path.parent) not in card  # no folders of this machine


@pytest.mark.parametrize(
    "name", ["vit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("swin", "resnet", "alternet"))]
)
def test_treatments_of_training_alone_leave_a_network_of_timm_and_transformers(name, tmp_path, monkeypatch):
    from transformers import AutoModelForImageClassification

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = train(tmp_path / "run", NETWORKS[name][0], ["sam"])
    network, loaded = load_model(run.path), timm.create_model(f"local-dir:{vitclinic.export(run, 'timm')}", True)
    theirs = AutoModelForImageClassification.from_pretrained(vitclinic.export(run, "hf")).eval()
    x = torch.rand(3, 3, 32, 32)
    normalized = (x - network.mean) / network.std
    with torch.no_grad():
        assert (loaded.eval()(normalized) - network(x)).abs().max() < 1e-4
        assert (theirs(pixel_values=normalized).logits - network(x)).abs().max() < 1e-4


def test_what_timm_cannot_build_is_one_sentence_and_leaves_nothing(tmp_path):
    run = train(tmp_path / "run", TINY, ["context_broadcasting", "talking_heads"])
    with pytest.raises(
        ModelError, match=r"with context_broadcasting, talking_heads, is a network that timm cannot build"
    ):
        vitclinic.export(run, "timm")
    assert list((run.path / "export").iterdir()) == []


def test_a_treatment_that_hardly_shows_yet_is_no_timm_network(tmp_path):
    """After one step attention is nearly uniform: logits agree to 1e-4 with and without the uniform head."""
    run = train(tmp_path / "run", SWIN, ["uniform_heads"])
    with pytest.raises(ModelError, match="is a network that timm cannot build"):
        vitclinic.export(run, "timm")


def test_an_export_with_other_logits_is_refused():
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    x = torch.rand(5, 3, 2, 2)
    check_same_logits(network, x, lambda images: network(images) + 5e-5, "it")
    with pytest.raises(ModelError, match="does not give its logits"):
        check_same_logits(network, x, lambda images: network(images) + 2e-4, "it")


def test_an_unknown_form_and_a_folder_of_others_are_refused(run, tmp_path):
    with pytest.raises(RecipeError, match="choose timm, hf, onnx or torch-export"):
        vitclinic.export(run, "tflite")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(RecipeError, match="other things in it"):
        vitclinic.export(run, "timm", tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()


def files_in(folder):
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_a_stranger_with_a_config_is_left_as_it_was(run, tmp_path, monkeypatch):
    repository = tmp_path / "repo"
    (repository / ".git").mkdir(parents=True)
    for name in ("config.json", "thesis.tex", ".git/HEAD"):
        (repository / name).write_text("{}")
    (repository / "README.md").write_text("# Another network of mine\n")
    monkeypatch.chdir(repository)
    before = files_in(repository)
    for out in (repository, ".", ""):
        for form in ("timm", "hf"):
            with pytest.raises(RecipeError, match="other things in it"):
                vitclinic.export(run, form, out)
    assert files_in(repository) == before
    assert [file.name for file in tmp_path.iterdir()] == ["repo"]


def test_an_earlier_export_is_renewed_and_what_lies_beside_it_stays(run, tmp_path):
    folder = vitclinic.export(run, "timm", tmp_path / "net")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")
    (folder / "model.safetensors").write_bytes(b"")
    assert vitclinic.export(run, "timm", folder) == folder
    assert timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert (folder / ".git" / "HEAD").read_text() == "ref"
    assert [file.name for file in tmp_path.iterdir()] == ["net"]


@pytest.mark.parametrize("form", ["onnx", "torch-export"])
def test_a_file_of_the_users_is_not_overwritten(form, run, tmp_path):
    mine = tmp_path / "model"
    mine.write_text("my thesis")
    with pytest.raises(RecipeError, match="not an earlier export"):
        vitclinic.export(run, form, mine)
    assert mine.read_text() == "my thesis"
    with pytest.raises(RecipeError, match="is a folder, and an export"):
        vitclinic.export(run, form, tmp_path)
    mine.unlink()
    vitclinic.export(run, form, mine)
    assert vitclinic.export(run, form, mine) == mine  # its own it may
    with pytest.raises(RecipeError, match="is a file, and an export"):
        vitclinic.export(run, "timm", mine)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_programs_give_the_same_logits_for_any_number_of_images(name, tmp_path):
    """`export` compares 1, 2 and 5 images; here other numbers, read by the libraries themselves."""
    import onnxruntime

    run = train(tmp_path / "run", *NETWORKS[name])
    network = load_model(run.path)
    x = torch.rand(7, 3, 32, 32)
    session = onnxruntime.InferenceSession(vitclinic.export(run, "onnx"))
    program = torch.export.load(vitclinic.export(run, "torch-export")).module()
    with torch.no_grad():
        wanted = network(x)
        assert (torch.from_numpy(session.run(None, {"images": x.numpy()})[0]) - wanted).abs().max() < 1e-4
        assert (program(x) - wanted).abs().max() < 1e-4
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == list(network.classes)
    if not NETWORKS[name][1]:
        assert vitclinic.export(run, "timm").is_dir()
    else:
        with pytest.raises(ModelError, match="is a network that timm cannot build"):
            vitclinic.export(run, "timm")


class StandIn(BaseHTTPRequestHandler):
    """As much of the hub as a small push needs; it keeps what it is sent."""

    sent: list[tuple[str, str]]

    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.sent.append((self.path, text))
        address = f"http://{self.headers['Host']}/me/net"
        answer = {"url": address, "commitUrl": f"{address}/commit/1", "commitOid": "1", "hookOutput": ""}
        if "preupload" in self.path:
            files = json.loads(text)["files"]
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        self._answer(answer)

    def do_GET(self):
        self._answer({"id": "me/net", "modelId": "me/net", "sha": "0", "siblings": [], "tags": []})

    def _answer(self, value):
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants, hf_api

    server = HTTPServer(("127.0.0.1", 0), StandIn)
    StandIn.sent = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(hf_api, "ENDPOINT", address, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "not a token")
    yield StandIn.sent
    server.shutdown()
    server.server_close()


def test_pushing_sends_the_folder_and_nothing_else_does(run, hub, tmp_path):
    folder = vitclinic.export(run, "timm", tmp_path / "net")
    assert hub == []
    assert vitclinic.push_to_hub(folder, "me/net").endswith("/me/net/commit/1")
    commit = next(text for path, text in hub if "/commit/" in path)
    paths = {json.loads(line)["value"].get("path") for line in commit.splitlines()} - {None}
    assert paths == {"README.md", "config.json", "model.safetensors"}
    assert json.loads(next(text for path, text in hub if path.endswith("/create")))["visibility"] == "private"
    with pytest.raises(RecipeError, match="not an exported folder"):
        vitclinic.push_to_hub(tmp_path, "me/net")


def test_a_hub_that_cannot_be_reached_is_one_sentence(run, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    folder = vitclinic.export(run, "timm", tmp_path / "net")
    with pytest.raises(RunError, match="'me/net' was not sent"):
        vitclinic.push_to_hub(folder, "me/net")


def test_the_command_says_where(run, tmp_path, monkeypatch, capsys):
    from vitclinic.cli import main

    words = ["export", str(run.path), "--to", "timm", "-o", str(tmp_path / "net"), "--json"]
    monkeypatch.setattr(sys, "argv", ["vitclinic", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(tmp_path / "net")


@pytest.mark.parametrize(("task", "form"), [("vqa", "onnx"), ("segmentation", "timm")])
def test_a_task_that_a_form_has_no_place_for_is_one_sentence(task, form, tmp_path):
    common = {"steps": 1, "batch_size": 8, "workers": 0, "out": tmp_path / "run"}
    run = vitclinic.train(data="scenes:24", task=task, model=TINY, **common)
    with pytest.raises(ModelError, match=rf"was trained for {task}, which has no export to {form}"):
        vitclinic.export(run, form)


def test_a_folder_or_nothing_in_the_place_of_a_file_is_a_mistake(run, tmp_path, command):
    for out, said in ((tmp_path, "is a folder"), ("", "it is empty")):
        code, _, error = command("export", run.path, "--to", "onnx", "-o", out)
        assert code == 2
        assert said in error
        assert "Errno" not in error


def test_a_folder_in_the_way_of_a_file_is_told_without_a_number(tmp_path):
    told = pytest.raises(RunError, match=r"it is a folder\. Files written so far are intact; choose another")
    with told as error, write_errors(tmp_path):
        tmp_path.write_text("x")
    assert "space" not in str(error.value)


def test_the_card_of_a_run_with_initial_weights_has_no_folder_of_this_machine(run, tmp_path):
    secret = tmp_path / "a secret client"
    secret.mkdir()
    weights = vitclinic.export(run, "timm", secret / "timm") / "model.safetensors"
    plain = {"data": run.recipe.plain()["data"], "model": TINY, "init": str(weights), "steps": 1, "batch_size": 8}
    started = vitclinic.train({**plain, "workers": 0}, out=tmp_path / "run")
    card = (vitclinic.export(started, "timm") / "README.md").read_text()
    assert "source: model.safetensors" in card
    assert "client" not in card


def test_the_card_has_names_as_text_and_what_a_user_of_the_logits_needs(tmp_path, capfd):
    data = tmp_path / "photos"
    for split in ("train", "test"):
        for name in ("<img src=x onerror=alert(1)>", "a *b* [c](d)"):
            (data / split / name).mkdir(parents=True)
            for number in range(8):
                Image.new("RGB", (32, 32), (number * 20, 0, 9)).save(data / split / name / f"{number}.png")
    run = train(tmp_path / "run", TINY, [], **{"data": {"source": str(data), "augment": "none"}, "batch_size": 4})
    temperature = vitclinic.predict(run, data / "test").temperature
    card = (vitclinic.export(run, "hf") / "README.md").read_text()
    assert "<img" not in card
    assert "&lt;img src=x onerror=alert(1)&gt;" in card.replace("\\", "")
    assert r"a \*b\* \[c\](d)" in card
    assert "center crop of 32 x 32" in card
    assert "mean 0." in card
    assert f"divided by {temperature:.4g}" in card
    assert "Loading weights" not in capfd.readouterr().err
