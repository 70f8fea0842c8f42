"""Which arms go on, and how often chance alone is taken for help."""

import numpy as np
import pytest

from vitclinic.experiments.prescribe.arms import Arm, Trials, list_candidates
from vitclinic.experiments.prescribe.plan import Stage
from vitclinic.experiments.prescribe.prescription import Trial, TriedStage, judge_effect, measure_effect
from vitclinic.experiments.prescribe.remedies import find_remedy, treatment_remedy
from vitclinic.training import build_recipe

STAGE = Stage("rung 1", 3, 1, 1.0, 0.0, 100)


def tried(arms, failed=()):
    """{arm: accuracies by seed}."""
    trials = [
        Trial(arm, seed, 10, "finished", value, 1.0, "run")
        for arm, row in arms.items()
        for seed, value in enumerate(row)
    ]
    seeds = range(len(next(iter(arms.values()))))
    return TriedStage(STAGE, seeds, trials, dict.fromkeys(failed, "broke"))


def test_the_best_go_on_and_the_plain_recipe_is_not_among_them():
    rung = tried({"plain": [0.9, 0.9], "a": [0.5, 0.7], "b": [0.65, 0.65], "c": [0.1, 0.2]})
    assert rung.best(2) == ["b", "a"]
    assert rung.arms == ["plain", "b", "a", "c"]


def test_a_tie_is_for_the_likelier_one_and_then_for_the_one_listed_first():
    trials = [Trial(arm, 0, 10, "finished", 0.5, nll, "run") for arm, nll in (("a", 2.0), ("b", 1.0), ("c", 1.0))]
    assert TriedStage(STAGE, [0], trials).best(3) == ["b", "c", "a"]


def test_an_arm_of_which_a_run_failed_is_out():
    assert tried({"plain": [0.5], "a": [0.9], "b": [0.6]}, failed=["a"]).best(2) == ["b"]


@pytest.mark.parametrize("pairs_", [5, 10])
def test_where_nothing_helps_it_is_said_39_times_of_40(pairs_):
    random = np.random.default_rng(pairs_)
    helped = 0
    for _ in range(4000):
        shared = random.normal(0.5, 0.02, pairs_)
        arms = {name: (shared + random.normal(0, 0.01, pairs_)).tolist() for name in ("plain", "winner")}
        helped += judge_effect(measure_effect(tried(arms), "winner")) == "helps"
    assert helped / 4000 == pytest.approx(0.025, abs=0.008)


def test_selecting_the_best_of_many_does_not_touch_that_rate():
    """The arm that selection found best by luck meets the plain recipe on seeds of its own."""
    random = np.random.default_rng(0)
    helped = 0
    for _ in range(1500):
        names = ["plain", *(f"arm {number}" for number in range(16))]
        rung = tried({name: [random.normal(0.5, 0.02)] for name in names})
        (winner,) = rung.best(1)
        final = tried({name: random.normal(0.5, 0.02, 5).tolist() for name in ("plain", winner)})
        helped += judge_effect(measure_effect(final, winner)) == "helps"
    assert helped / 1500 == pytest.approx(0.025, abs=0.012)


def test_a_sure_loss_is_nothing_that_helps():
    assert (
        judge_effect(measure_effect(tried({"plain": [0.5, 0.6, 0.7], "a": [0.4, 0.5, 0.61]}), "a")) == "nothing helped"
    )


def test_candidates_are_what_the_recipe_has_not():
    recipe = build_recipe({"treatments": ["sam"]})
    names = [arm.name for arm in list_candidates(recipe)]
    assert names.index("conv_stem") < names.index("lr x 3") < names.index("context_broadcasting")
    assert not {"sam", "crop and flip", "adamw"} & set(names)  # it has them
    assert len(names) == len(set(names)) >= 20
    early = [find_remedy(entry, recipe) for entry in ("talking_heads", "ema=0.9", "lr / 3")]
    assert [arm.name for arm in list_candidates(recipe, first=early)][:3] == ["talking_heads", "ema=0.9", "lr / 3"]


def test_candidates_that_are_named_are_all_there_are():
    recipe = build_recipe()
    wide = {"wide": {"model.embed_dim": 256}}
    arms = list_candidates(recipe, ["sam", {"sam": {"rho": 0.2}}], ["lr x 3", wide, "gap_head", "lr x 3"])
    assert [arm.name for arm in arms] == ["lr x 3", "wide", "gap_head", "sam", "sam(rho=0.2)"]
    early = [find_remedy(name, recipe) for name in ("sam", "ema")]
    assert [arm.name for arm in list_candidates(recipe, ["gap_head", "sam"], first=early)] == ["sam", "gap_head"]


def test_a_trial_keeps_the_recipe_but_for_its_length_and_its_measures():
    recipe = build_recipe({"epochs": 10, "batch_size": 10, "schedule": {"warmup": "2 epochs"}, "treatments": ["sam"]})
    trials = Trials(recipe, 100, {"train": 100, "val": 50, "test": 50})
    trial = trials.make_recipe(Arm((treatment_remedy("gap_head"),)), 30, 7, test=False)
    assert trial.treatments.written == ["sam", "gap_head"]
    assert (trial.steps, trial.epochs, trial.seed, trial.test) == (30, None, 7, False)
    assert trial.schedule.warmup == "20.00%"  # as 2 epochs of 10
    assert trial.validation.every == "100%"
    changed = {"treatments", "schedule", "epochs", "steps", "validation", "checkpoint", "test", "seed"}
    assert {key for key, value in trial if value != getattr(recipe, key)} == changed
    assert build_recipe(trial.plain()) == trial


def test_a_warm_up_is_the_same_share_of_a_trial_whatever_the_arm_changes():
    recipe = build_recipe({"epochs": 10, "batch_size": 40, "schedule": {"warmup": "2 epochs"}})
    trials = Trials(recipe, 25, {"train": 100, "val": 50, "test": 50})
    for entry, share in (
        ("batch size / 2", "20.00%"),
        ("warm-up 10%", "10.00%"),
        ("schedule.warmup=5 steps", "20.00%"),
    ):
        trial = trials.make_recipe(Arm((find_remedy(entry, recipe),)), 30, 0, test=False)
        assert trial.schedule.warmup == share
