"""Arms that begin with the weights of another arm, seed by seed."""

import pytest

from vitclinic._core.errors import RecipeError
from vitclinic.experiments.study.conduct import study
from vitclinic.experiments.study.costs import plan_study
from vitclinic.experiments.study.schema import parse_study
from vitclinic.training import Run
from vitclinic.training.init import read_initial_weights

TINY = {"name": "vit_tiny_fitted", "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
PLAIN = {
    "claim": "mine",
    "title": "what was trained before is better",
    "paper": "chen2022",
    "source": "none",
    "base": {"model": TINY, "data": {"source": "digits", "limit": 60}, "steps": 2, "batch_size": 20, "workers": 0},
    "arms": {"first": {}, "other": {"steps": 3}, "second": {"steps": 1}, "third": {"steps": 1}},
    "starts": {"second": "first", "third": "other"},
    "measures": {"accuracy": {"result": "test.accuracy"}},
    "expectations": [{"says": "it is", "measure": "accuracy", "greater": ["second", "first"]}],
}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"starts": {"second": "frist"}}, "starts names 'frist', which does not exist. Did you mean 'first'"),
        ({"starts": {"second": "first", "third": "second"}}, "starts from 'second', which starts from another"),
        ({"arms": {**PLAIN["arms"], "second": {"init": "runs/a"}}}, "the arm 'second' has both init and a start"),
        ({"arms": {**PLAIN["arms"], "first": {"target": "timm:test_vit"}}}, "'first', a target, which is not trained"),
    ],
)
def test_what_does_not_fit_is_one_sentence(changes, sentence):
    with pytest.raises(RecipeError, match=sentence):
        parse_study({**PLAIN, **changes}, "mine")


def test_arms_that_differ_in_their_start_alone_are_two_runs():
    assert plan_study(parse_study(PLAIN, "mine"), seeds=1).runs == 4
    alike = {**PLAIN, "starts": {"second": "first", "third": "first"}}
    assert plan_study(parse_study(alike, "mine"), seeds=1).runs == 3


def test_a_target_takes_the_place_of_no_start():
    with pytest.raises(RecipeError, match="The arm 'first' of mine starts from another or is one's start"):
        parse_study(PLAIN, "mine").with_targets({"first": "timm:test_vit"})


def test_an_arm_keeps_the_data_that_it_names():
    arms = {**PLAIN["arms"], "second": {"steps": 1, "data": {"source": "shapes:100", "limit": None}}}
    recipes = parse_study({**PLAIN, "arms": arms}, "mine").recipes(data="elsewhere")
    assert {arm: recipe.data.source for arm, recipe in recipes.items()} == {
        "first": "elsewhere",
        "other": "elsewhere",
        "second": "shapes:100",
        "third": "elsewhere",
    }


@pytest.mark.slow
def test_each_seed_begins_with_the_last_weights_of_its_own(tmp_path):
    found = study(parse_study(PLAIN, "mine"), seeds=2, out=tmp_path)
    assert not found.failures
    pool = tmp_path / "pool"
    digests = set()
    for arm, other in PLAIN["starts"].items():
        for seed in range(2):
            run, before = (Run(pool / found.runs[name][seed]) for name in (arm, other))
            digests.add(run.recipe.init.digest)
            assert run.recipe.init.source == f"{before.path}@last"
            assert read_initial_weights(run.recipe).digest == run.recipe.init.digest
    assert len(digests) == 4
    again = study(parse_study(PLAIN, "mine"), seeds=2, out=tmp_path)
    assert again.runs == found.runs
