"""Trackers: each gets every number of every row, a resumed run goes on in the same one, none can end a training."""

import logging
import os
import signal
import struct
import sys
import time
import types

import pytest

import vitclinic
from vitclinic._core.errors import MissingExtraError, RecipeError, RunError
from vitclinic.training import resume
from vitclinic.training.recipe import LoggingConfig
from vitclinic.training.sinks import make_sinks, name_numbers

MODEL = {"name": "vit_tiny_patch16_224", "patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 1}


class Stop(vitclinic.Callback):
    """Interrupts a run after two steps, as Ctrl-C does."""

    def on_step(self, trainer):
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGINT)


def train(folder, logging, callbacks=()):
    common = {"model": MODEL, "steps": 4, "batch_size": 8, "workers": 0, "test": False}
    data = {"source": "shapes:40", "augment": "none"}
    return vitclinic.train(data=data, out=folder, logging=logging, callbacks=callbacks, **common)


def expected(run):
    """Every number by its name and step."""
    return {(name, row["step"]): value for row in run.metrics for name, value in name_numbers(row).items()}


def test_tensorboard_has_every_number(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(tmp_path / "run", {"tensorboard": True})
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    found = {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}
    assert found == pytest.approx(expected(run), rel=1e-6)


def test_mlflow_has_every_number_and_a_resumed_run_is_the_same(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = train(tmp_path / "run", {"mlflow": "shapes"}, callbacks=[Stop()])
    client = MlflowClient()
    number = client.get_experiment_by_name("shapes").experiment_id
    assert client.search_runs([number])[0].info.status == "KILLED"
    run = resume(run.path)
    (stored,) = client.search_runs([number])
    assert stored.info.status == "FINISHED"
    assert stored.data.params["model.embed_dim"] == "16"
    history = {name: client.get_metric_history(stored.info.run_id, name) for name in stored.data.metrics}
    found = {(name, metric.step): metric.value for name, metrics in history.items() for metric in metrics}
    assert found == pytest.approx(expected(run))


def read_records(content, block=2**15):
    """Yield the records of a log in LevelDB's format, in which W&B keeps what is to be sent, behind a header."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        if block - at % block < 7:  # no header fits into the rest of a block
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_weights_and_biases_is_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = train(tmp_path / "run", {"wandb": "shapes"})
    (file,) = (run.path / "wandb").glob("offline-run-*/run-*.wandb")
    wanted, patience = expected(run), time.monotonic() + 30
    while len(found := read_history(file)) < len(wanted) and time.monotonic() < patience:
        time.sleep(0.2)  # a process of W&B's own writes the file
    assert found == pytest.approx(wanted)


def read_history(file):
    from wandb.proto.wandb_internal_pb2 import Record

    found = {}
    for data in read_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        items = {(item.key or "/".join(item.nested_key)): item.value_json for item in record.history.item}
        if items:
            step = int(items["_step"])
            found |= {(name, step): float(value) for name, value in items.items() if not name.startswith("_")}
    return found


@pytest.fixture
def trackio(monkeypatch):
    """A stand-in with the documented interface: init(project, name, config, resume, embed), log(metrics, step), finish.

    The package itself brings a web server, which is too much to install for a test.
    """

    class Run:
        def __init__(self):
            self.logged, self.finished = [], False

        def log(self, metrics, step=None):
            self.logged.append((step, metrics))

        def finish(self):
            self.finished = True

    module = types.ModuleType("trackio")
    module.__spec__ = types.SimpleNamespace(name="trackio")
    module.started = []

    def init(project, name=None, *, config=None, resume="never", embed=True):
        print("* Trackio greets")
        module.started.append((project, name, resume, Run()))
        return module.started[-1][-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


def test_trackio_has_every_number_and_keeps_standard_output_clean(tmp_path, trackio, capsys):
    run = train(tmp_path / "run", {"trackio": "shapes"})
    ((project, name, way, tracked),) = trackio.started
    assert (project, way) == ("shapes", "allow")
    assert name.startswith("run-")
    assert {(key, step): value for step, row in tracked.logged for key, value in row.items()} == expected(run)
    assert tracked.finished
    assert capsys.readouterr().out == ""


def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(tmp_path, trackio, caplog):
    def fail(self, metrics, step=None):
        raise OSError("no route to host")

    original = trackio.init

    def init(*arguments, **options):
        run = original(*arguments, **options)
        run.log = types.MethodType(fail, run)
        return run

    trackio.init = init
    with caplog.at_level(logging.WARNING):
        run = train(tmp_path / "run", {"trackio": "shapes"})
    assert run.status["status"] == "finished"
    assert [record.message for record in caplog.records if "trackio" in record.message] == [
        "logging.trackio has failed (no route to host); the run goes on without it."
    ]


def test_a_tracker_that_cannot_be_opened_is_one_sentence(tmp_path, trackio):
    def init(*arguments, **options):
        raise ValueError("Not logged in.\nmore")

    trackio.init = init
    with pytest.raises(RunError, match=r"^logging.trackio cannot be used: Not logged in\.$"):
        train(tmp_path / "run", {"trackio": "shapes"})


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_missing_package_is_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.setattr("vitclinic.training.sinks.find_spec", lambda package: None)
    config = LoggingConfig(**{name: True if name == "tensorboard" else "shapes"})
    with pytest.raises(MissingExtraError, match=rf"logging.{name} needs an extra: pip install 'vitclinic\[{name}\]'"):
        make_sinks(config, tmp_path)


def test_an_empty_project_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"logging\.wandb"):
        train(tmp_path / "run", {"wandb": ""})
