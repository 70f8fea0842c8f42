"""watch: runs as they are written, damaged ones too; a server that answers this machine's user and nobody else."""

import http.client
import json
import os
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image

import vitclinic
from vitclinic._core.errors import RunError
from vitclinic.experiments.watch.curves import Curves
from vitclinic.experiments.watch.reading import WatchedFolder, find_runs, identify, stamp
from vitclinic.experiments.watch.server import WatchServer, serve
from vitclinic.training import build_recipe

HOSTILE = "<img src=x onerror=alert(1)>"


def row(step, kind="train", **values):
    common = {"kind": kind, "step": step, "epoch": step // 10, "loss": 2 / step, "losses": {"nll": 2 / step}}
    speed = {"timing": {"images_per_second": 100.0}}
    return {**common, "lr": 1e-3, "grad_norm": 0.5 if kind == "train" else None, **speed, **values}


def write_run(folder, rows=(), status="running", lr=1e-3, **fields):
    folder.mkdir(parents=True)
    recipe = f"model: {{name: vit_tiny}}\ndata: {{source: shapes}}\noptimizer: {{lr: {lr}}}\nbatch_size: 50\nout: x\n"
    (folder / "recipe.yaml").write_text(recipe)
    started = {"started": "2026-01-01T00:00:00Z"}
    (folder / "status.json").write_text(
        json.dumps({"status": status, "step": 0, "total_steps": 100} | started | fields)
    )
    append(folder, rows)
    return folder


def append(folder, rows):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in rows))


def only_run(folder):
    (found,) = WatchedFolder(folder).table()["runs"]
    return found


def test_a_running_run_says_how_far_it_is_and_how_long_it_takes(tmp_path):
    """0.5 s a step, and 1 s of validation for every 20 steps, for the 60 steps that are left."""
    scores = [row(step, "val", accuracy=0.25, accuracy_low=0.2, count=100) for step in (20, 40)]
    rows = sorted([*(row(step) for step in range(1, 41)), *scores], key=lambda one: one["step"])
    found = only_run(write_run(tmp_path / "a", rows).parent)
    assert (found["name"], found["status"], found["step"], found["total_steps"]) == ("a", "running", 40, 100)
    assert found["seconds_left"] == pytest.approx(60 * (0.5 + 2 / 39))
    assert found["scores"] == {"val accuracy": 0.25, "val loss": 0.05, "train loss": 0.05}
    assert found["images_per_second"] == 100.0
    assert found["silent"] < 60


def test_a_finished_run_has_its_results_and_no_time_left(tmp_path):
    results = {"val": {"accuracy": 0.5, "accuracy_low": 0.4, "count": 10}, "test": {"accuracy": 0.25}}
    found = only_run(write_run(tmp_path / "a", [row(100)], "finished", results=results).parent)
    assert found["scores"] == {"val accuracy": 0.5, "test accuracy": 0.25}
    assert found["seconds_left"] is None
    assert found["silent"] is None


def test_the_table_has_the_keys_in_which_runs_differ(tmp_path):
    for number, lr in enumerate((1e-3, 1e-2)):
        write_run(tmp_path / "deep" / "er" / str(number), lr=lr)
    runs = WatchedFolder(tmp_path).table()["runs"]
    assert [(run["name"], run["keys"]) for run in runs] == [
        ("deep/er/0", {"optimizer.lr": 0.001}),
        ("deep/er/1", {"optimizer.lr": 0.01}),
    ]


def test_rows_that_are_appended_are_read_and_a_line_that_is_being_written_is_not(tmp_path):
    run = write_run(tmp_path / "a", [row(1), row(2)])
    folder, name = WatchedFolder(tmp_path), identify((tmp_path / "a").resolve())
    assert folder.curves(name)["panels"]["loss"]["train"]["step"] == [1, 2]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(3))[:20])
    assert folder.curves(name)["panels"]["loss"]["train"]["step"] == [1, 2]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(3))[20:] + "\n" + json.dumps(row(3, "val", accuracy=0.5)) + "\n")
    panels = folder.curves(name)["panels"]
    assert panels["loss"]["train"]["mean"] == pytest.approx([2, 1, 2 / 3], rel=1e-5)
    assert list(panels) == ["loss", "accuracy", "gradient norm", "learning rate"]
    assert panels["accuracy"] == {"val": {"step": [3], "mean": [0.5], "low": [0.5], "high": [0.5]}}
    assert panels["gradient norm"]["train"]["mean"] == [0.5] * 3


def test_a_resumed_run_begins_again_where_its_file_was_cut(tmp_path):
    run = write_run(tmp_path / "a", [row(step) for step in range(1, 6)])
    folder, name = WatchedFolder(tmp_path), identify((tmp_path / "a").resolve())
    assert len(folder.curves(name)["panels"]["loss"]["train"]["step"]) == 5
    (run / "new").write_text(json.dumps(row(1)) + "\n" + json.dumps(row(2)) + "\n")
    (run / "new").replace(run / "metrics.jsonl")
    assert folder.curves(name)["panels"]["loss"]["train"]["step"] == [1, 2]


def test_a_large_file_is_read_in_several_looks(tmp_path, monkeypatch):
    monkeypatch.setattr("vitclinic.experiments.watch.curves.CHUNK", 1000)
    run = write_run(tmp_path / "a", [row(step) for step in range(1, 51)])
    curves, looks = Curves(run / "metrics.jsonl"), 1
    while not curves.read(stamp(curves.path)):
        looks += 1
    assert looks > 5
    assert curves.panels()["loss"]["train"]["step"] == list(range(1, 51))


DAMAGED = {
    "recipe.yaml": ["", "{", "a: &a [*a]", "- 1", "\x00", "x" * 100],
    "status.json": ["", "{", "[]", '{"status": 3}', '{"status": "running", "step": "x", "total_steps": []}'],
    "metrics.jsonl": [
        *("{", "[]\n", "null\n", '{"kind": 1, "step": 1}\n', '{"kind": "train", "step": 1, "loss": {}, "timing": 3}\n'),
        f'{{"kind": "train", "step": 1{"0" * 400}, "loss": 1{"0" * 400}}}\n',
        '{"kind": "val", "step": 1, "loss": NaN, "accuracy": Infinity, "count": "x"}\n',
        '{"kind": "val", "step": 1, "count": 3, "timing": {"images_per_second": 0}}\n',
        '{"kind": "train", "step": 1, "loss": 1.0, "timing": {"images_per_second": "fast"}}\n',
        "\x00\xff" * 100 + "\n",
    ],
}


@pytest.mark.parametrize(("file", "content"), [(file, text) for file, texts in DAMAGED.items() for text in texts])
def test_a_damaged_run_is_shown_beside_the_others(file, content, tmp_path):
    write_run(tmp_path / "well", [row(1)])
    (write_run(tmp_path / "bad", [row(1)]) / file).write_text(content, encoding="latin-1")
    folder = WatchedFolder(tmp_path)
    table = folder.table()
    assert {run["name"] for run in table["runs"]} == {"well", "bad"}
    json.dumps([table, *(folder.curves(run["id"]) for run in table["runs"])], allow_nan=False)


def test_links_are_not_followed_and_pipes_not_waited_for(tmp_path):
    outside = write_run(tmp_path / "outside" / "secret", [row(1)])
    runs = tmp_path / "runs"
    inside = write_run(runs / "a", [row(1)])
    (runs / "link").symlink_to(outside, target_is_directory=True)
    for file in ("metrics.jsonl", "status.json"):
        (inside / file).unlink()
    (inside / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    os.mkfifo(inside / "status.json")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (inside / "samples.png").symlink_to(tmp_path / "picture.png")
    folder = WatchedFolder(runs)
    found = only_run(runs)
    assert (found["name"], found["status"], found["step"], found["samples"]) == ("a", "unknown", 0, 0)
    assert folder.curves(found["id"])["panels"] == {"loss": {}}
    assert folder.samples(found["id"]) is None
    assert list(find_runs(runs)) == [inside]


@pytest.fixture
def served(tmp_path):
    """A folder with a run of a hostile name, its server and a way to ask it."""
    run = write_run(tmp_path / "runs" / HOSTILE, [row(1), row(2)])
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(run / "samples.png")
    (tmp_path / "secret.txt").write_text("secret")
    with WatchServer(tmp_path / "runs", port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.02}).start()

        def ask(path, method="GET", host=None, **headers):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
            connection.putrequest(method, path, skip_host=True)
            if host is None or host:
                connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            return answer, content

        yield server, ask
        server.shutdown()


def test_the_page_its_scripts_and_its_runs_are_served(served):
    server, ask = served
    assert server.server_address[0] == "127.0.0.1"
    answer, page = ask("/")
    assert answer.status == 200
    assert "default-src 'none'" in answer.getheader("Content-Security-Policy")
    assert b"http" not in page.replace(b"http-equiv", b"")  # nothing from elsewhere
    assert len(ask("/plotly.js")[1]) > 1_000_000
    assert ask("/watch.js")[0].status == 200
    (run,) = json.loads(ask("/runs")[1])["runs"]
    assert run["name"] == HOSTILE
    assert json.loads(ask(f"/runs/{run['id']}/curves")[1])["panels"]["loss"]["train"]["step"] == [1, 2]
    assert ask(f"/runs/{run['id']}/samples.png")[0].getheader("Content-Type") == "image/png"
    answer, content = ask("/runs", "HEAD")
    assert (answer.status, content) == (200, b"")


def test_the_folder_s_name_is_escaped(tmp_path):
    with WatchServer(tmp_path / HOSTILE, port=0) as server:
        _, _, page = server.answer("/")
    assert HOSTILE.encode() not in page
    assert b"&lt;img src=x" in page


@pytest.mark.parametrize(
    "path",
    [
        *("/../secret.txt", "/runs/../../secret.txt", "/..%2fsecret.txt", "/runs/%2e%2e/curves", "//etc/passwd"),
        *("/etc/passwd", "/runs/0000000000000000/curves", "/runs/0000000000000000/samples.png", "/runs/", "/x"),
        *("http://127.0.0.1/runs/../../secret.txt", "/templates/watch.js", "/runs/..././x", "/%00"),
    ],
)
def test_no_path_leads_out(served, path):
    answer, content = served[1](path)
    assert answer.status == 404
    assert b"secret" not in content


@pytest.mark.parametrize("host", ["evil.example", "evil.example:6160", "127.0.0.1.evil.example", "localhost@evil", ""])
def test_names_of_other_hosts_are_refused(served, host):
    for path in ("/", "/runs", "/plotly.js"):
        answer, content = served[1](path, host=host)
        assert answer.status == 421
        assert b"onerror" not in content


def test_this_machine_s_names_are_not(served):
    server, ask = served
    for host in (f"localhost:{server.server_port}", "127.0.0.1", "LOCALHOST:1"):
        assert ask("/runs", host=host)[0].status == 200


def test_other_pages_may_not_ask(served):
    assert served[1]("/runs", Origin="http://evil.example")[0].status == 403
    assert served[1]("/runs", Origin="null")[0].status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE", "BREW"])
def test_other_methods_are_refused_and_change_nothing(served, method):
    server, ask = served
    before = sorted(path.stat().st_mtime_ns for path in server.folder.root.rglob("*"))
    answer, _ = ask("/runs", method)
    assert (answer.status, answer.getheader("Allow")) == (405, "GET, HEAD")
    assert sorted(path.stat().st_mtime_ns for path in server.folder.root.rglob("*")) == before


def test_a_port_that_is_taken_is_one_sentence(served):
    with pytest.raises(RunError, match="cannot be used"):
        WatchServer(served[0].folder.root, port=served[0].server_port)


def test_the_command_prints_the_table_once(tmp_path, monkeypatch, capsys):
    from vitclinic.cli import main

    write_run(tmp_path / "runs" / "a", [row(1)])
    for words, code in ((["watch", str(tmp_path / "runs"), "--json"], 0), (["watch", str(tmp_path / "none")], 4)):
        monkeypatch.setattr(sys, "argv", ["vitclinic", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
        printed = capsys.readouterr()
        if code == 0:
            assert json.loads(printed.out)["runs"][0]["name"] == "a"
        else:
            assert "is not a folder" in printed.err


class Seen(vitclinic.Callback):
    """Keeps what the network is called with at the first step."""

    inputs = None

    def on_train_start(self, trainer):
        trainer.network.register_forward_pre_hook(self.note)

    def note(self, module, inputs):
        self.inputs = inputs[0].detach().clone() if self.inputs is None else self.inputs


def test_samples_are_what_the_network_saw(tmp_path):
    model = {"name": "vit_tiny_patch16_224", "patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 1}
    common = {"model": model, "steps": 1, "batch_size": 8, "workers": 0, "logging": {"samples": 3}}
    run = vitclinic.train(data="shapes:40", out=tmp_path / "run", callbacks=[seen := Seen()], **common)
    wanted = (255 * seen.inputs[:3]).round().byte().permute(0, 2, 3, 1).numpy()
    picture = np.asarray(Image.open(run.path / "samples.png"))
    assert picture.shape == (64, 3 * 64 + 2 * 2, 3)
    for place, image in enumerate(wanted):
        assert (picture[::2, 66 * place : 66 * place + 64 : 2] == image).all()
    found = only_run(tmp_path)
    assert found["status"] == "finished"
    assert {"val accuracy", "test accuracy"} <= found["scores"].keys()
    assert found["samples"] > 0


@pytest.mark.slow
def test_the_page_beside_a_training_ends_with_it(tmp_path):
    from vitclinic.experiments.watch.server import watch_beside

    write_run(tmp_path / "a", [row(1)])
    with watch_beside(tmp_path) as address:
        port = int(address.rstrip("/").rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/runs")
        assert len(json.loads(connection.getresponse().read())["runs"]) == 1
        connection.close()
    time.sleep(0.2)
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection("127.0.0.1", port, timeout=2).connect()


@pytest.mark.parametrize(
    ("changes", "samples"),
    [
        (["logging.tensorboard=true"], True),
        (["logging={tensorboard: true}"], True),
        (["logging.samples=0"], False),
        (["logging={samples: 3}"], False),
    ],
)
def test_a_watched_training_shows_samples_unless_it_says_how_many(changes, samples, tmp_path):
    from vitclinic.cli.train import _watched

    changes = [*changes, f"out={tmp_path}/a"]
    with _watched(True, "shapes", changes, None, True) as given:
        assert [change for change in given if change not in changes] == ["logging.samples=8"] * samples
        assert build_recipe("shapes", given).logging.tensorboard == ("tensorboard" in changes[0])


def test_ctrl_c_ends_the_page_also_while_its_address_is_printed(tmp_path):
    def stop(address):
        raise KeyboardInterrupt

    assert serve(tmp_path, 0, stop) is None
