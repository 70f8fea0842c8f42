"""A recipe is trained once, whoever asks for it."""

import json
import os

import pytest

from tests.reports.made_studies import stored
from tests.rows import drop_timing
from vitclinic._core.callback import Callback
from vitclinic._core.errors import RunError
from vitclinic.experiments.runner import Pool, drop_weights
from vitclinic.experiments.study.store import keep_result, report_studies
from vitclinic.reports.study_result import read_result
from vitclinic.training import build_recipe

from .networks import tiny


class Counter(Callback):
    def __init__(self, stop_at=None):
        self.steps, self.stop_at = 0, stop_at

    def on_step(self, trainer):
        self.steps += 1
        if trainer.step == self.stop_at:
            raise RuntimeError("power cut")


def test_an_ended_run_is_found_and_not_trained_again(tmp_path):
    pool, counter = Pool(tmp_path), Counter()
    first = pool.train(tiny(), [counter])
    again = Pool(tmp_path).train(tiny(), [counter])
    assert counter.steps == 6
    assert again.path == first.path
    assert pool.find(tiny()).path == first.path


def test_what_changes_the_numbers_is_another_run_and_what_does_not_is_the_same(tmp_path):
    pool = Pool(tmp_path)
    assert pool.path(tiny()) == pool.path(tiny(workers=1, logging={"every": 3}, out="elsewhere"))
    assert len({pool.path(tiny(**c)) for c in ({}, {"seed": 1}, {"steps": 7}, {"treatments": ["sam"]})}) == 4


def test_a_run_that_was_cut_off_goes_on_to_the_same_numbers(tmp_path):
    whole = Pool(tmp_path / "whole").train(tiny())
    pool, counter = Pool(tmp_path / "cut"), Counter()
    with pytest.raises(RuntimeError):
        pool.train(tiny(), [Counter(stop_at=5)])
    assert pool.find(tiny()) is None
    resumed = pool.train(tiny(), [counter])
    assert counter.steps == 2  # from the checkpoint at step 4
    assert drop_timing(resumed.metrics) == drop_timing(whole.metrics)
    assert resumed.results == whole.results


def test_a_divergence_is_a_result_and_not_tried_again(tmp_path):
    recipe = tiny(optimizer={"name": "sgd", "lr": 1e9}, schedule={"warmup": 0}, clip=None)
    pool, counter = Pool(tmp_path), Counter()
    assert pool.train(recipe).status["status"] == "diverged"
    assert pool.train(recipe, [counter]).status["status"] == "diverged"
    assert counter.steps == 0


def test_a_run_is_the_same_one_wherever_its_data_lies(tmp_path, photo_folder):
    def recipe(source):
        return build_recipe({**tiny().plain(), "data": {"source": str(source), "augment": "none"}, "batch_size": 8})

    pool = Pool(tmp_path / "pool")
    with pytest.raises(RuntimeError):
        pool.train(recipe(photo_folder), [Counter(stop_at=3)])
    moved = photo_folder.rename(tmp_path / "1e5")  # a name that YAML would take for a number
    assert pool.train(recipe(moved)).status["status"] == "finished"


def test_a_run_without_its_weights_is_still_found(tmp_path):
    pool = Pool(tmp_path)
    run = pool.train(tiny())
    results = run.results
    drop_weights(run)
    assert not list(run.path.rglob("*.safetensors"))
    assert pool.find(tiny()).results == results


@pytest.mark.parametrize("content", ["[" * 200_000, "[]", '{"study": 1, "runs": []}', ""])
def test_what_is_no_result_is_replaced_by_one(tmp_path, content):
    (tmp_path / "C6.json").write_text(content)
    keep_result(tmp_path / "C6.json", stored())
    assert read_result(tmp_path / "C6.json").claim == "C6"


def test_a_pipe_in_place_of_a_result_is_not_waited_for(tmp_path, ends_soon):
    os.mkfifo(tmp_path / "C6.json")
    with pytest.raises(RunError, match="it is a device or a pipe"):
        keep_result(tmp_path / "C6.json", stored())


def test_the_result_of_another_study_with_the_same_claim_is_kept(tmp_path, caplog):
    first = stored()
    second = stored(study={**first["study"], "arms": {"other": {}}})
    for plain in (first, second):
        keep_result(tmp_path / "C6.json", plain)
    kept = sorted(file.name for file in tmp_path.glob("*.json"))
    assert len(kept) == 2
    assert "which is 'C6+" in caplog.text
    assert json.loads((tmp_path / kept[0]).read_text())["study"] == json.loads(json.dumps(first["study"]))
    assert json.loads((tmp_path / "C6.json").read_text())["study"]["arms"] == {"other": {}}


@pytest.mark.parametrize(("old", "new"), [("AdamW", "AdamX"), ("0.4", "0.9")])
def test_a_changed_result_is_not_shown(tmp_path, old, new):
    keep_result(tmp_path / "C6.json", stored())
    file = tmp_path / "C6.json"
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(RunError, match="was changed since it was written; run the study again"):
        read_result(file)
    assert report_studies(tmp_path).exists()
