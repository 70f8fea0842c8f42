"""SAM in the last share of a run: plain steps to the bit before it, SAM's from there on, and what a run then costs."""

import pytest
import torch

from tests.training.conftest import tiny  # noqa: F401
from vitclinic._core.callback import Callback
from vitclinic._core.distributed import ALONE
from vitclinic._core.errors import RecipeError
from vitclinic.data import open_data
from vitclinic.training import budget, build_recipe, resume, train
from vitclinic.training.passes import Passes
from vitclinic.training.trainer import Trainer
from vitclinic.treatments import Treatment, parse_treatments


class Follow(Callback):
    """Notes the weights after every step, and how often the network was called in it."""

    def __init__(self):
        self.weights, self.calls = [], []

    def on_train_start(self, trainer):
        self.count = 0
        trainer.network.register_forward_hook(self._called)

    def _called(self, *_):
        self.count += 1

    def on_step(self, trainer):
        self.weights.append({name: value.clone() for name, value in trainer.network.state_dict().items()})
        self.calls.append(self.count)
        self.count = 0


def followed(plain, out, **changes):
    seen = Follow()
    train({**plain, "validation": "100%", "test": False, "out": str(out), **changes}, callbacks=[seen])
    return seen


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


def count_equal(one, other):
    """The number of steps after which two runs have the same weights, which must be their first ones."""
    equal = [same(a, b) for a, b in zip(one.weights, other.weights, strict=True)]
    assert equal == sorted(equal, reverse=True)
    return sum(equal)


# Which steps


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({"start": 0.6}, [1] * 6 + [2] * 4),
        ({"start": 0.55}, [1] * 6 + [2] * 4),
        ({"start": 0.6, "every": 3}, [1] * 6 + [2, 1, 1, 2]),
        ({"start": 0.8, "m": 20}, [1] * 8 + [4] * 2),
        ({"start": 0.0}, [2] * 10),
        ({"start": 0.96}, [1] * 10),
        ({"start": 0.6, "rho": 0.0}, [1] * 10),
    ],
)
def test_the_last_share_of_the_steps_has_ascents(tiny, tmp_path, options, calls):  # noqa: F811
    seen = followed(tiny(steps=10), tmp_path / "late", treatments=[{"sam": options}])
    assert seen.calls == calls


def test_before_it_a_run_is_the_plain_one_and_after_it_sam_s_to_the_bit(tiny, tmp_path):  # noqa: F811
    """SAM's steps by another way: a trainer of SAM alone, put where the plain run was."""
    plain = tiny(steps=10, accumulate=2, optimizer={"lr": 0.005, "weight_decay": 0.1})
    late = followed(plain, tmp_path / "late", treatments=[{"sam": {"start": 0.6}}])
    never = followed(plain, tmp_path / "plain")
    assert [same(one, other) for one, other in zip(late.weights, never.weights, strict=True)] == [True] * 6 + [
        False
    ] * 4

    def trainer(treatments):
        recipe = build_recipe({**plain, "treatments": treatments})
        return Trainer(recipe, open_data(recipe.data), 10, ALONE, torch.device("cpu"))

    first, second = trainer([]), trainer(["sam"])
    for _ in range(6):
        first.advance()
    second.load_state_dict(first.network.state_dict(), {**first.state_dict(), "rule": second.rules.own.state_dict()})
    for weights in late.weights[6:]:
        second.advance()
        assert same(second.network.state_dict(), weights)


def test_adversarial_training_is_there_from_the_first_step(tiny, tmp_path):  # noqa: F811
    plain = tiny(steps=5)
    late = followed(plain, tmp_path / "both", treatments=[{"sam": {"start": 0.6}}, "adversarial"])
    alone = followed(plain, tmp_path / "alone", treatments=["adversarial"])
    assert late.calls == alone.calls == [2] * 5
    assert [same(one, other) for one, other in zip(late.weights, alone.weights, strict=True)] == [True] * 3 + [
        False
    ] * 2


@pytest.mark.parametrize(
    ("start", "total", "first"), [(0.55, 100, 55), (0.57, 100, 57), (0.29, 100, 29), (1 / 3, 9, 3)]
)
def test_rounding_of_the_share_shifts_no_step(tiny, start, total, first):  # noqa: F811
    recipe = build_recipe(tiny(treatments=[{"sam": {"start": start}}]))
    trainer = Trainer(recipe, open_data(recipe.data), total, ALONE, torch.device("cpu"))
    due = []
    for trainer.step in range(total):
        due.append(trainer.rules.due(trainer.course, trainer.step) is trainer.rules.own)
    assert due.index(True) == first
    assert all(due[first:])


class Stop(Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, trainer):
        if trainer.step == self.step:
            raise RuntimeError("power cut")


@pytest.mark.parametrize("stop", [5, 7, 11])
def test_resuming_before_at_and_after_the_start_gives_the_same_bits(tiny, tmp_path, stop):  # noqa: F811
    model = {**tiny()["model"], "drop_path_rate": 0.5}
    options = {"start": 0.5, "every": 3, "rho": 0.3}
    plain = tiny(treatments=[{"sam": options}], steps=12, accumulate=2, model=model, checkpoint="3 steps")
    whole = train({**plain, "out": str(tmp_path / "whole")})
    with pytest.raises(RuntimeError):
        train(plain, callbacks=[Stop(stop)])
    resumed = resume(plain["out"])
    assert same(whole.checkpoints.read_model("last"), resumed.checkpoints.read_model("last"))
    state, other = (run.checkpoints.read("last")[1]["rule"] for run in (whole, resumed))
    assert state["steps"] == other["steps"] == 6
    assert all(torch.equal(a, b) for a, b in zip(state["direction"], other["direction"], strict=True))


def test_sam_from_the_start_is_the_recipe_that_it_was():
    assert build_recipe({"treatments": ["sam"]}).plain() == {"treatments": ["sam"]}
    assert Treatment.step_rule_start(parse_treatments(["conv_stem"])[0]) == 0


@pytest.mark.parametrize("start", [-0.1, 1.0, 1.5])
def test_mistakes_are_sentences(start):
    with pytest.raises(RecipeError, match=r"'treatments\.sam\.start'"):
        parse_treatments([{"sam": {"start": start}}])


# What it costs


@pytest.mark.parametrize(
    "options",
    [{}, {"start": 0.8}, {"every": 5}, {"every": 2}, {"start": 0.75, "every": 4}, {"start": 0.5, "rho": 0.0}, None],
)
def test_the_measured_cost_of_a_step_is_the_mean_over_the_run(tiny, tmp_path, monkeypatch, options):  # noqa: F811
    """By a clock that only passes move, one second each: against `passes()`, and against a run that is counted."""
    clock = [0.0]
    real = Passes.__call__

    def timed(self, *arguments, **keywords):
        clock[0] += 1.0
        return real(self, *arguments, **keywords)

    def look():
        clock[0] += 1e-9  # a rate is divided by a time
        return clock[0]

    monkeypatch.setattr(Passes, "__call__", timed)
    monkeypatch.setattr(budget.time, "perf_counter", look)
    treatments = [] if options is None else [{"sam": options}]
    recipe = build_recipe(tiny(treatments=treatments, steps=20, validation="100%", test=False))
    cost = budget.measure_cost(recipe, open_data(recipe.data), ALONE, torch.device("cpu"))
    assert cost.step == pytest.approx(max((t.passes() for t in recipe.treatments), default=1.0))
    before = clock[0]
    train(recipe)
    assert 20 * cost.step == pytest.approx(clock[0] - before, abs=1)
