"""The loop against one written out by hand, and what each setting of a recipe does."""

import functools
import json

import pytest
import torch
import torch._dynamo

from vitclinic._core.callback import Callback
from vitclinic.data import TrainingStream, open_data
from vitclinic.data.config import DataConfig
from vitclinic.training import build_recipe, load_model, train
from vitclinic.training.network import build_network


def weights(run, name="last"):
    return run.checkpoints.read_model(name)


def test_equals_a_hand_written_loop_to_the_bit(tiny):
    plain = tiny(steps=8, optimizer={"name": "adamw", "lr": 0.01, "weight_decay": 0.1}, clip=0.5)
    run = train(plain)
    rows = [row for row in run.metrics if row["kind"] == "train"]
    recipe = build_recipe(plain)
    data = open_data(DataConfig(source="digits", limit=200, augment="none"))
    network, _ = build_network(recipe, data)
    exempt = network.backbone.no_weight_decay()
    named = list(network.backbone.named_parameters())
    decayed = [p for n, p in named if p.ndim > 1 and n not in exempt]
    rest = [p for n, p in named if not (p.ndim > 1 and n not in exempt)]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0}])
    stream = TrainingStream(data, recipe.data.augment, recipe.seed)
    from vitclinic.training.schedule import Schedule

    schedule = Schedule(recipe.schedule, 5, 8)
    network.train()
    for step in range(8):
        batch = stream[range(step * 40, (step + 1) * 40)]
        loss = torch.nn.functional.cross_entropy(network(batch.images), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*decayed, *rest], 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * schedule(step)
        optimizer.step()
        assert rows[step]["loss"] == loss.item()
    stored = weights(run)
    assert all(torch.equal(stored[name], value) for name, value in network.state_dict().items())


def test_accumulation_is_the_same_step_in_less_memory(tiny, tmp_path):
    once = train(tiny(precision="fp64"))
    parts = train(tiny(precision="fp64", accumulate=4, out=str(tmp_path / "parts")))
    for name, value in weights(once).items():
        assert torch.allclose(value, weights(parts)[name], atol=1e-12), name


def test_ema_is_the_average_it_says(tiny):
    seen = []

    class Watch(Callback):
        def on_step(self, trainer):
            seen.append(trainer.network.state_dict()["backbone.head.weight"].clone())

    recipe = build_recipe(tiny(ema=0.8))
    initial = build_network(recipe, open_data(recipe.data))[0].state_dict()["backbone.head.weight"]
    run = train(recipe, callbacks=[Watch()])
    average = initial
    for number, value in enumerate(seen):  # timm's warm-up: young averages forget faster
        decay = min(0.8, 1 - (1 + number) ** (-2 / 3)) if number else 0.0
        average = decay * average + (1 - decay) * value
    assert torch.allclose(weights(run)["backbone.head.weight"], average, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp64"])
def test_precisions_train(tiny, precision):
    run = train(tiny(precision=precision, steps=12))
    rows = [row for row in run.metrics if row["kind"] == "train"]
    assert run.status["status"] == "finished"
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_fp16_overflow_is_skipped_by_the_scaler(tiny):
    """The first scale, 65536, overflows on purpose: the step is skipped, nothing diverges."""
    from vitclinic._core.distributed import ALONE
    from vitclinic.training.trainer import Trainer

    recipe = build_recipe(tiny(precision="fp16", clip=1.0))
    trainer = Trainer(recipe, open_data(recipe.data), 3, ALONE, torch.device("cpu"))
    trainer.scaler = trainer.passes.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = {k: v.clone() for k, v in trainer.network.state_dict().items()}
    row = trainer.advance()
    assert trainer.scaler.get_scale() < 2.0**40
    assert trainer.divergence.find(row) is None
    assert all(torch.equal(before[k], v) for k, v in trainer.network.state_dict().items())


@pytest.mark.slow
def test_compiled_training_gives_an_ordinary_network(tiny):
    run = train(tiny(compile=True, steps=2))
    assert load_model(run.path)(torch.rand(1, 1, 8, 8)).shape == (1, 10)


@pytest.mark.parametrize("change", [{"loss": "sigmoid"}, {"schedule": "linear"}, {"optimizer": "lamb"}, {"clip": None}])
def test_settings_train(tiny, change):
    run = train(tiny(steps=15, **change))
    rows = [row for row in run.metrics if row["kind"] == "train"]
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_every_row_has_the_promised_keys(tiny):
    run = train(tiny())
    for row in run.metrics:
        assert {"kind", "step", "epoch", "loss", "losses", "lr", "grad_norm", "timing"} <= set(row)
    assert [row["kind"] for row in run.metrics].count("test") == 1
    json.dumps(run.metrics, allow_nan=False)


def test_validation_and_checkpoints_come_when_they_should(tiny):
    run = train(tiny(steps=20, validation={"every": 2}, checkpoint={"every": "7 steps", "keep_epochs": [0, 1, 3]}))
    assert [row["step"] for row in run.metrics if row["kind"] == "val"] == [10, 20]
    assert run.checkpoints.names() == ["best", "epoch-0", "epoch-1", "epoch-3", "last", "previous"]
    assert run.checkpoints.read("previous")[1]["step"] == 14
    assert run.checkpoints.read("epoch-3")[1]["step"] == 15


def test_sparse_logging_writes_fewer_rows_and_the_same_weights(tiny, tmp_path):
    every = train(tiny())
    sparse = train(tiny(logging={"every": 4}, out=str(tmp_path / "sparse")))
    assert len(sparse.metrics) < len(every.metrics)
    assert all(torch.equal(value, weights(sparse)[name]) for name, value in weights(every).items())


def test_the_best_checkpoint_is_the_one_tested(tiny):
    run = train(tiny(steps=30, optimizer={"lr": 0.01}))
    rows = [row for row in run.metrics if row["kind"] == "val"]
    assert run.results["val"]["accuracy"] == max(row["accuracy"] for row in rows)
    from vitclinic._core.distributed import ALONE
    from vitclinic.tasks import Classification

    score = Classification().evaluate(load_model(run.path), open_data(run.recipe.data), "test", ALONE)
    assert {**score, "step": run.results["val"]["step"]} == run.results["test"]


def test_all_images_can_be_trained_on(tiny, tmp_path, picture):
    """Without val the last weights are the result; with val and no test, as ImageNet comes, val is the score."""
    run = train(tiny(data={"source": "digits", "held_out": 0.0, "augment": "none"}, steps=2))
    assert run.data_facts["counts"] == {"train": 1797, "val": 0, "test": 0}
    assert (run.status["status"], run.results) == ("finished", {})
    assert load_model(run.path) is not None
    for split, name in ((split, name) for split in ("train", "val") for name in "ab"):
        (tmp_path / "photos" / split / name).mkdir(parents=True)
        for number in range(5):
            picture(number, (8, 8), "L").save(tmp_path / "photos" / split / name / f"{number}.png")
    data = {"source": str(tmp_path / "photos"), "held_out": 0.0, "augment": "none"}
    run = train(tiny(data=data, steps=2, batch_size=10, out=str(tmp_path / "other")))
    assert run.data_facts["counts"] == {"train": 10, "val": 10, "test": 10}
    assert run.results["test"]["nll"] == run.results["val"]["nll"]


def test_the_network_learns_the_digits(tiny):
    run = train(tiny(steps=200, data={"source": "digits", "augment": "none"}, optimizer={"lr": 0.01}))
    assert run.results["test"]["accuracy"] > 0.7


def test_max_time_stores_the_number_of_steps(tiny):
    plain = tiny(max_time="2s")
    del plain["steps"]
    run = train(plain)
    assert run.status["total_steps"] == run.status["step"] > 5


def test_callbacks_see_epochs_and_the_end(tiny):
    calls = []

    class Watch(Callback):
        def on_train_start(self, trainer):
            calls.append("start")

        def on_epoch(self, trainer, epoch):
            calls.append(epoch)

        def on_train_end(self, status):
            calls.append(status)

    train(tiny(steps=10), callbacks=[Watch()])
    assert calls == ["start", 0, 1, 2, "finished"]


def test_callbacks_hear_of_reading_before_training_starts(tiny, photo_folder):
    calls = []

    class Watch(Callback):
        def on_progress(self, what, done, total):
            calls.append((what, done, total))

        def on_train_start(self, trainer):
            calls.append("start")

    train(tiny(steps=1, model={**tiny()["model"], "img_size": 16}, data=str(photo_folder)), callbacks=[Watch()])
    assert calls[-2:] == [("decoding", 40, 40), "start"]


def test_tensorboard_is_written(tiny):
    pytest.importorskip("tensorboard")
    run = train(tiny(logging={"tensorboard": True}))
    assert list((run.path / "tensorboard").glob("events*"))


def test_golden_losses(tiny):
    """What a refactor must reproduce. Float kernels differ between machines: hence four digits."""
    run = train(tiny(steps=5, data={"source": "digits", "limit": 200, "augment": "deit"}, workers=0))
    losses = [row["loss"] for row in run.metrics if row["kind"] == "train"]
    assert losses == pytest.approx([2.356809, 2.334483, 2.301966, 2.335607, 2.365018], rel=1e-4)


def test_a_compiled_run_after_another_trains_its_own_treatments(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()

    def losses(name, **settings):
        run = train(tiny(steps=2, out=str(tmp_path / name), **settings))
        return [row["loss"] for row in run.metrics if row["kind"] == "train"]

    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):  # as in a new process
        eager = losses("eager", treatments=["context_broadcasting"])
        losses("before", compile=True)
        assert losses("compiled", compile=True, treatments=["context_broadcasting"]) == pytest.approx(eager, abs=1e-5)
