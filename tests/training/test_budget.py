"""From a time to a number of steps."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitclinic._core.distributed import ALONE
from vitclinic.training import budget, build_recipe, load_model, train
from vitclinic.training.budget import Cost, fit_size

COUNTS = {"train": 100, "val": 20, "test": 30}
CPU = torch.device("cpu")


@given(
    st.floats(0.01, 5), st.floats(0, 0.1), st.floats(0, 200), st.sampled_from([1, 3, "7 steps", "100%"]), st.booleans()
)
def test_the_steps_fit_and_one_more_does_not(step, image, budget, every, test):
    check_steps(Cost(step, image), budget, build_recipe({"batch_size": 10, "validation": every, "test": test}))


@given(
    st.lists(st.floats(0.01, 5), min_size=2, max_size=4),
    st.floats(0, 0.1),
    st.floats(0, 200),
    st.sampled_from(["70%", 2, "30 steps", "100%"]),
)
def test_the_steps_fit_if_they_are_cheaper_at_smaller_sizes(steps, image, budget, until):
    *smaller, full = sorted(steps)
    resizing = {"start": 0.5, "stages": len(smaller), "until": until}
    recipe = build_recipe({"batch_size": 10, "progressive_resizing": resizing})
    check_steps(Cost(full, image, smaller=smaller), budget, recipe)


def check_steps(cost, budget, recipe):
    steps = cost.steps_within(budget, recipe, COUNTS)
    assert steps == 0 or cost.seconds(steps, recipe, COUNTS) <= budget
    assert cost.seconds(steps + 1, recipe, COUNTS) > budget


@pytest.mark.parametrize(("every", "test"), [(1, True), ("4 steps", False), ("50%", True)])
def test_the_scored_images_are_those_that_a_run_scores(tiny, every, test):
    run = train(tiny(steps=10, validation=every, test=test))
    scored = sum(row["count"] for row in run.metrics if row["kind"] in ("val", "test"))
    recipe, counts = run.recipe, run.data_facts["counts"]
    assert Cost(0.0, 1.0).seconds(10, recipe, counts) == scored


def test_a_step_costs_what_its_size_costs():
    recipe = build_recipe({"batch_size": 10, "test": False, "progressive_resizing": {"start": 0.5, "stages": 2}})
    assert Cost(9.0, 0.0, smaller=(1.0, 4.0)).seconds(20, recipe, COUNTS) == 7 * 1 + 7 * 4 + 6 * 9


def test_without_test_the_images_of_test_stay_unread(tiny):
    run = train(tiny(test=False))
    assert run.status["status"] == "finished"
    assert list(run.results) == ["val"]
    assert {row["kind"] for row in run.metrics} == {"train", "val"}


AUTO = {"model": {"name": "hybrid_vit", "size": "auto"}, "data": "digits", "batch_size": 60}


@pytest.mark.parametrize(("images", "size"), [(1500, "tiny"), (20_000, "small"), (300_000, "base")])
def test_without_a_time_the_size_follows_the_number_of_images(images, size):
    dataset = SimpleNamespace(train=range(images))
    recipe, (notice,) = fit_size(build_recipe(AUTO, epochs=2), dataset, ALONE, CPU)
    assert recipe.model.keywords == {"size": size}
    assert notice == f"model.size is {size}, for {images:,} training images"


@pytest.mark.parametrize(("steps", "size"), [(1, "tiny"), (300, "tiny"), (1200, "small"), (10**6, "base")])
def test_within_a_time_the_largest_size_is_taken_that_sees_the_images_often_enough(monkeypatch, steps, size):
    costs = {"tiny": steps}
    monkeypatch.setattr(budget, "total_steps", lambda recipe, *_: costs[recipe.model.keywords["size"]])
    dataset = SimpleNamespace(train=range(1000))
    recipe, (notice,) = fit_size(build_recipe(AUTO, max_time="10s"), dataset, ALONE, CPU)
    assert recipe.model.keywords == {"size": size}
    assert notice.startswith(f"model.size is {size}: 10s allow about ")


def test_a_named_size_stays_and_a_run_records_the_one_it_took(tmp_path):
    named = build_recipe({**AUTO, "model": {"name": "hybrid_vit", "size": "base"}})
    assert fit_size(named, None, ALONE, CPU) == (named, [])
    run = train(AUTO, steps=1, test=False, out=tmp_path / "run")
    assert run.recipe.model.keywords == {"size": "tiny"}
    assert load_model(run.path)(torch.rand(1, 1, 8, 8)).shape == (1, 10)
