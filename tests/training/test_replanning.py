"""A run with max_time, whose number of steps follows the speed of the machine."""

import copy
import shutil
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitclinic import Callback
from vitclinic._core.distributed import ALONE
from vitclinic.data import open_data
from vitclinic.training import build_recipe, resume, train
from vitclinic.training.replanning import Course, Timekeeper
from vitclinic.training.trainer import Trainer


@given(st.integers(2, 500), st.lists(st.tuples(st.integers(1, 50), st.integers(1, 300)), max_size=5))
def test_a_bent_plan_does_not_jump_and_ends_where_it_was_to_end(planned, changes):
    course, step = Course(planned), 0
    for further, left in changes:
        step += further
        if step >= course.total:
            break
        before = course(step)
        course.bend(step, step + left)
        assert course(step) == pytest.approx(before)
    places = [course(step) for step in range(course.total + 1)]
    assert places == sorted(places)
    assert places[-1] == pytest.approx(planned)


def test_without_a_new_plan_a_step_is_its_own_place():
    assert [Course(10)(step) for step in range(11)] == list(range(11))


def test_the_steps_left_are_those_that_there_is_time_for(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    keeper = Timekeeper(100.0)
    now[0] = 10.0
    assert keeper.is_due(10, 90)  # a tenth of the time
    assert keeper.plan(10, 90, reserve=10.0) is None  # 1 s a step, 80 s left
    now[0] = 50.0  # 4 s a step: somebody else is there
    assert keeper.plan(20, 90, reserve=10.0) == 30
    now[0] = 51.0
    assert not keeper.is_due(21, 30)
    assert keeper.is_due(29, 30)  # the last chance to go on
    now[0] = 99.0
    assert keeper.plan(28, 30, reserve=10.0) == 29  # late: one more, with the validation of the end


@pytest.mark.parametrize("steps", [3, 10**6])
def test_a_run_makes_the_steps_that_it_has_time_for_whatever_was_measured(tiny, monkeypatch, steps):
    monkeypatch.setattr("vitclinic.training.launch.total_steps", lambda *_: steps)
    recipe = tiny(max_time="1s", workers=0)
    del recipe["steps"]
    began = time.monotonic()
    run = train(recipe)
    assert run.status["status"] == "finished"
    assert 3 < run.status["step"] == run.status["total_steps"] < 10**6
    assert time.monotonic() - began < 20  # generous: others use this machine, too
    rates = [row["lr"] for row in run.metrics if row["kind"] == "train"]
    assert rates[-1] < 0.5 * max(rates)  # the schedule came to its end


@pytest.mark.parametrize("kept", ["last", "previous"])
def test_a_stopped_run_that_was_planned_anew_resumes_to_the_same_bits(tiny, monkeypatch, tmp_path, kept):
    """Schedule and sizes are laid over the first plan, also from a checkpoint before there was another."""
    monkeypatch.setattr("vitclinic.training.launch.total_steps", lambda *_: 40)
    plans = {5: 15, 9: 18}
    monkeypatch.setattr(Timekeeper, "is_due", lambda keeper, step, total: step in plans)
    monkeypatch.setattr(Timekeeper, "plan", lambda keeper, step, total, reserve: plans[step])

    class Stop(Callback):
        def on_step(self, trainer):
            if trainer.step == 7:
                raise KeyboardInterrupt

    recipe = tiny(max_time="1h", workers=0, checkpoint={"every": "2 steps"}, late_drop_path=0.5)
    recipe |= {"model": {**recipe["model"], "depth": 2, "drop_path_rate": 0.1}}
    del recipe["steps"]
    whole = train({**recipe, "out": str(tmp_path / "whole")})
    with pytest.raises(KeyboardInterrupt):
        train({**recipe, "out": str(tmp_path / "cut")}, callbacks=[Stop()])
    if kept == "previous":
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / "last")
        monkeypatch.setattr(Timekeeper, "is_due", lambda keeper, step, total: step in plans)
    cut = resume(tmp_path / "cut")
    assert whole.status["step"] == cut.status["step"] == 18
    rates = [[row["lr"] for row in run.metrics if row["kind"] == "train"] for run in (whole, cut)]
    assert rates[0] == rates[1]
    one, two = (run.checkpoints.read_model("last") for run in (whole, cut))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_first_step_and_cheaper_ones_say_nothing_of_the_pace(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    keeper = Timekeeper(100.0)
    now[0] = 30.0  # workers started
    assert not keeper.is_due(1, 100)
    for step in (2, 3):
        now[0] += 1.0
        assert not keeper.is_due(step, 100)  # too few
    now[0] += 5.0
    assert keeper.is_due(4, 100)
    assert keeper.plan(4, 100, reserve=0.0) == 4 + int(63 / (7 / 3))
    now[0] += 20.0
    keeper.restart(10)  # until here, images were smaller
    now[0] += 9.0
    assert keeper.is_due(13, 31)
    assert keeper.plan(13, 31, reserve=0.0) == 13 + int(34 / 3)


def test_a_resumed_run_goes_on_with_the_new_plan(tiny):
    recipe = build_recipe(tiny(steps=20, workers=0) | {"steps": None, "max_time": "1h"})
    dataset = open_data(recipe.data)

    def trainer():
        return Trainer(recipe, dataset, 20, ALONE, torch.device("cpu"))

    whole = trainer()
    for _ in range(3):
        whole.advance()
    whole.plan_anew(6)
    model, state = copy.deepcopy((whole.network.state_dict(), whole.state_dict()))
    resumed = trainer()
    resumed.load_state_dict(model, state)
    for each in (whole, resumed):
        while each.step < each.total_steps:
            row = each.advance()
        assert (each.step, row["lr"]) == (6, whole.rate(5))
    for ours, theirs in zip(whole.parameters, resumed.parameters, strict=True):
        assert torch.equal(ours, theirs)
