"""A task of one's own: its head, losses, metrics and the number that selects are its, everything else is the loop's."""

import json

import pytest
import torch

from tests.rows import drop_timing
from vitclinic._core import registry
from vitclinic._core.callback import Callback
from vitclinic._core.errors import RecipeError
from vitclinic.tasks import Classification, Metric, Task, known_tasks, parse_task, register
from vitclinic.tasks.task import TASKS
from vitclinic.training import Run, build_recipe, load_model, resume, train


class Brightness(Task):
    """Predict the mean brightness of an image."""

    name = "brightness"
    title = "brightness"
    metrics = (Metric("error"), Metric("squared_error"))
    selects = "error"
    higher_is_better = False
    loss_metric = "squared_error"

    scale: float = 1.0

    def read(self, batch):
        return type(batch)(batch.images, batch.images.mean((1, 2, 3)), batch.indices, batch.keys)

    def num_outputs(self, spec):
        return 1

    def losses(self, outputs, batch):
        return {"squared": self.scale * (outputs[:, 0] - batch.targets).square().mean()}

    def measure(self, outputs, batch):
        off = outputs[:, 0].double() - batch.targets.double()
        return torch.stack([torch.tensor(len(batch)).double(), off.abs().sum(), off.square().sum()])

    def summarize(self, sums):
        count, absolute, squared = sums
        return {"error": absolute / count, "squared_error": squared / count, "count": int(count)}


@pytest.fixture
def brightness(monkeypatch):
    monkeypatch.setattr(TASKS, "_known", dict(TASKS._known))
    return register(Brightness)


def test_a_task_of_ones_own_trains_and_selects_by_its_own_number(tiny, brightness):
    run = train(tiny(task="brightness", steps=20, validation={"every": "4 steps"}, optimizer={"lr": 0.02}))
    rows = [row for row in run.metrics if row["kind"] == "val"]
    status = json.loads((run.path / "status.json").read_text())
    assert status["results"]["val"]["error"] == min(row["error"] for row in rows) < rows[0]["error"]
    assert set(status["results"]["test"]) == {"error", "squared_error", "count", "step"}
    assert all(row["loss"] == row["squared_error"] for row in rows)
    assert {name for row in run.metrics if row["kind"] == "train" for name in row["losses"]} == {"squared"}
    assert load_model(run.path)(torch.rand(2, 1, 8, 8)).shape == (2, 1)


def test_a_task_of_ones_own_resumes_to_the_same_numbers(tiny, brightness, tmp_path):
    class Stop(Callback):
        def on_step(self, trainer):
            if trainer.step == 5:
                raise KeyboardInterrupt

    plain = tiny(task={"name": "brightness", "scale": 2.0}, steps=9, checkpoint={"every": "2 steps"}, ema=0.9)
    whole = train({**plain, "out": str(tmp_path / "whole")})
    with pytest.raises(KeyboardInterrupt):
        train({**plain, "out": str(tmp_path / "cut")}, callbacks=[Stop()])
    cut = resume(tmp_path / "cut")
    assert drop_timing(cut.metrics) == drop_timing(whole.metrics)
    assert cut.results == whole.results
    weights, again = whole.checkpoints.read_model("best"), cut.checkpoints.read_model("best")
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_the_task_is_part_of_the_recipe_and_the_default_one_of_no_digest(brightness):
    plain = build_recipe(None)
    assert plain.task == Classification()
    assert build_recipe({"task": "classification"}).digest("d") == plain.digest("d")
    assert build_recipe({"task": {"name": "classification"}}, ["loss=sigmoid"]).resolved_task.loss.name == "sigmoid"
    other = build_recipe({"task": "brightness"}, ["task.scale=2"])
    assert other.plain() == {"task": {"name": "brightness", "scale": 2.0}}
    assert build_recipe(other.plain()) == other
    assert other.digest("d") != build_recipe({"task": "brightness"}).digest("d") != plain.digest("d")
    assert build_recipe(other.plain(), ["task=classification"]).task == Classification()  # its options go with it


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"task": "brightnes"}, r"^There is no task 'brightnes'. Did you mean 'brightness'\?$"),
        ({"task": {"name": "brightness", "scal": 1}}, r"^Unknown key 'task.scal'. Did you mean 'scale'\?$"),
        ({"task": {"name": "brightness", "scale": "x"}}, r"^'task.scale': .*number \(got 'x'\).$"),
        ({"task": ["brightness"]}, r"^'task': write a name, or \{name: ..., option: value\}"),
        ({"task": "brightness", "loss": "sigmoid"}, "^'loss' is only for the task classification; the options"),
        ({"task": {"loss": "sigmoid"}}, "^Write 'loss' instead of 'task.loss'"),
        (
            {"task": "brightness", "treatments": ["patch_diversity"]},
            "^The treatment patch_diversity is for clas",
        ),
    ],
)
def test_what_does_not_fit_together_is_one_sentence(plain, message, brightness):
    with pytest.raises(RecipeError, match=message):
        build_recipe(plain)


def test_a_head_of_another_size_is_refused(tiny, brightness):
    plain = tiny(task="brightness")
    with pytest.raises(RecipeError, match=r"model.num_classes is 7, but brightness of 10 classes needs 1 outputs"):
        train({**plain, "model": {**plain["model"], "num_classes": 7}})


def test_an_installed_package_adds_a_task(monkeypatch):
    class Point:
        name, value, group, dist = "brightness", "package:Brightness", "vitclinic.tasks", None

        def load(self):
            return Brightness

    monkeypatch.setattr(TASKS, "_known", dict(TASKS._known))
    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()] if group == "vitclinic.tasks" else [])
    registry.load_entry_points.cache_clear()
    try:
        assert known_tasks()["brightness"] is Brightness
        learnt = {"classification", "contrastive", "detection", "dino", "retrieval", "segmentation", "vqa"}
        assert set(known_tasks()) == {"brightness", *learnt}
        assert parse_task({"name": "brightness", "scale": 3.0}).scale == 3
    finally:
        registry.load_entry_points.cache_clear()


def test_ties_do_not_replace_the_best():
    better, same = {"accuracy": 0.6}, {"accuracy": 0.5}
    task = Classification()
    assert task.improves(same, None)
    assert task.improves(better, same)
    assert not task.improves(dict(same), same)


def test_what_is_printed_of_a_run_is_its_tasks_own(tiny, brightness):
    import io

    from rich.console import Console

    from vitclinic.training.display import Display, show_result

    console = Console(file=io.StringIO(), width=120)
    with Display(console) as display:
        run = train(tiny(task="brightness", steps=1), callbacks=[display])
    show_result(Run.open(run.path), console)
    printed = console.file.getvalue()
    assert "; 1 step\n" in printed
    assert "val error 0." in printed
    assert f"next:\n  vitclinic examine {run.path}\n" in printed  # what predict refuses is not named
    assert "squared_error" in printed
    assert "accuracy" not in printed
