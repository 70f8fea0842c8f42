"""From a time to a number of steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitclinic.training import build_recipe, train
from vitclinic.training.budget import Cost

COUNTS = {"train": 100, "val": 20, "test": 30}


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
