"""The rule by which studies end: comparisons, intervals, and how often it errs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vitclinic._core.errors import RecipeError
from vitclinic._core.statistics import sign_flip_test
from vitclinic.experiments.study.expectations import Expectation
from vitclinic.experiments.study.schema import parse_study
from vitclinic.experiments.study.verdicts import compare_seed, judge, slope


def study_of(*expectations, measures=None, arms=("a", "b", "c"), **fields):
    return parse_study(
        {
            "claim": "T1",
            "title": "a test",
            "paper": "none",
            "source": "none",
            "base": {"data": "digits"},
            "arms": {arm: {} for arm in arms},
            "measures": measures or {"x": {"result": "test.accuracy"}, "diverged": {"result": "diverged"}},
            "expectations": list(expectations),
            **fields,
        },
        "T1",
    )


def values_of(measure="x", **arms):
    return {arm: {seed: {measure: value} for seed, value in enumerate(numbers)} for arm, numbers in arms.items()}


HIGHER = {"says": "a is above b", "measure": "x", "greater": ["a", "b"]}


def test_a_comparison_is_the_paired_t_interval():
    a, b = [0.5, 0.7, 0.6, 0.9, 0.8], [0.4, 0.5, 0.6, 0.7, 0.6]
    verdict = judge(study_of(HIGHER), values_of(a=a, b=b), range(5))
    expected = stats.ttest_rel(a, b).confidence_interval(0.95)
    (found,) = verdict.comparisons
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert str(verdict) == "reproduced"


def test_several_comparisons_share_the_five_per_cent():
    a, b = [0.5, 0.7, 0.6, 0.9, 0.8], [0.4, 0.5, 0.6, 0.7, 0.6]
    verdict = judge(study_of(HIGHER, HIGHER | {"says": "again"}), values_of(a=a, b=b), range(5))
    expected = stats.ttest_rel(a, b).confidence_interval(0.975)
    assert [found.low for found in verdict.comparisons] == pytest.approx([expected.low] * 2)


@pytest.mark.parametrize(
    ("a", "b", "word"),
    [
        ([3, 3.1, 3.2, 3.1, 3], [1, 1, 1, 1, 1.1], "reproduced"),
        ([1, 1, 1, 1, 1.1], [3, 3.1, 3.2, 3.1, 3], "not reproduced"),
        ([1, 2, 3, 2, 1], [2, 1, 2, 2, 1.5], "undecided"),
    ],
)
def test_the_side_of_the_interval_is_the_verdict(a, b, word):
    assert judge(study_of(HIGHER), values_of(a=a, b=b), range(5)).word == word


def test_one_comparison_on_the_other_side_refutes_and_an_undecided_one_withholds():
    values = values_of(a=[3, 3.1, 3.2, 3.1, 3], b=[1, 1, 1, 1, 1.1], c=[3, 3.2, 3.1, 3.0, 3.1])
    opposite = {"says": "b is above a", "measure": "x", "greater": ["b", "a"]}
    open_one = {"says": "a is above c", "measure": "x", "greater": ["a", "c"]}
    assert judge(study_of(HIGHER, opposite), values, range(5)).word == "not reproduced"
    assert judge(study_of(HIGHER, open_one), values, range(5)).word == "undecided"


def test_fewer_than_five_seeds_are_exploratory_also_if_some_have_no_number():
    values = values_of(a=[3, 3.1, 3.2, 3.1, math.nan], b=[1, 1, 1, 1, 1.1])
    verdict = judge(study_of(HIGHER), values, range(5))
    assert str(verdict) == "reproduced (exploratory)"
    assert (verdict.comparisons[0].seeds, verdict.comparisons[0].missing) == (4, 1)


def test_without_numbers_nothing_is_decided():
    verdict = judge(study_of(HIGHER), {}, range(5))
    assert verdict.word == "undecided"
    assert verdict.comparisons[0].missing == 5


def test_a_verdict_on_survivors_is_exploratory_however_many_there_are():
    values = values_of(a=[3, 3.1, 3.2, 3.1, 3.3, 3.0, math.nan], b=[1, 1, 1, 1, 1.1, 1.2, 1])
    assert str(judge(study_of(HIGHER), values, range(7))) == "reproduced (exploratory)"


@pytest.mark.parametrize(
    "expected",
    [
        {"less": [["b", "a"], 0.01]},
        {"greater": ["a", 0.05]},
        {"grows": {300: "a", 1000: "b", 3000: "c"}},
        {"falls": {0.05: "a", 0.5: "b", 2: "c"}},
        {"greater": [["a", "b"], ["b", "c"]]},
    ],
)
def test_numbers_that_are_all_the_same_decide_nothing(expected):
    """As those of runs that all diverged, for which chance stands: what differs is rounding."""
    values = values_of(a=[0.1] * 5, b=[0.1] * 5, c=[0.1] * 5)
    verdict = judge(study_of({"says": "it does", "measure": "x", **expected}), values, range(5))
    assert verdict.word == "undecided"
    assert math.isnan(verdict.comparisons[0].low)


@pytest.mark.parametrize("seeds", range(5, 11))
def test_on_null_tables_of_crashes_fewer_than_five_in_a_hundred_verdicts_are_wrong(seeds):
    """All tables of two arms that crash alike and independently, at any rate, weighted by how likely they are."""
    asked = study_of({"says": "a crashes more", "measure": "diverged", "greater": ["a", "b"]})

    def wrong(lost, gained):
        a = [1.0] * lost + [0.0] * (seeds - lost)
        b = [0.0] * lost + [1.0] * gained + [0.0] * (seeds - lost - gained)
        return judge(asked, values_of("diverged", a=a, b=b), range(seeds)).word != "undecided"

    tables = [(lost, gained) for lost in range(seeds + 1) for gained in range(seeds + 1 - lost) if wrong(lost, gained)]
    for rate in np.linspace(0.02, 0.98, 49):
        q = rate * (1 - rate)
        shares = [
            stats.multinomial.pmf([lost, gained, seeds - lost - gained], seeds, [q, q, 1 - 2 * q])
            for lost, gained in tables
        ]
        assert sum(shares) < 0.05


@pytest.mark.parametrize(
    ("expected", "sentence"),
    [
        ({"greater": [2, 1]}, "compare two different things"),
        ({"greater": ["a", "a"]}, "compare two different things"),
        ({"greater": ["a", 7]}, "has the number 7: '7' is the arm"),
        ({"greater": ["a", math.inf]}, "finite"),
        ({"grows": {}}, "at least two numbers"),
        ({"grows": {math.inf: "a", 1: "b"}}, "finite"),
        ({"grows": {1: 0.5, 2: "b"}}, "string"),
        ({"grows": {1: "a", 2: "b"}, "than": -math.inf}, "finite"),
        ({"measure": "diverged", "greater": ["a", 0.5]}, "compares two arms, or one with 0"),
        ({"measure": "diverged", "greater": [["a", "b"], ["b", "c"]]}, "compares two arms, or one with 0"),
        ({"measure": "diverged", "grows": {1: "a", 2: "b"}}, "compares two arms, or one with 0"),
    ],
)
def test_what_compares_nothing_is_refused(expected, sentence):
    with pytest.raises(RecipeError, match=sentence):
        study_of({"says": "it does", "measure": "x", **expected}, arms=("a", "b", "c", "7"))


def test_crashes_are_counted_in_pairs_and_judged_by_their_signs():
    crash = {"says": "b crashes less", "measure": "diverged", "less": ["b", "a"]}
    always = judge(study_of(crash), values_of("diverged", a=[1.0] * 6, b=[0.0] * 6), range(6))
    assert (always.word, always.comparisons[0].p) == ("reproduced", 2 / 2**6)
    assert always.comparisons[0].low < -0.5 < always.comparisons[0].high < 0  # six runs are no certainty
    five = judge(study_of(crash), values_of("diverged", a=[1.0] * 5, b=[0.0] * 5), range(5))
    assert (five.word, five.comparisons[0].p) == ("undecided", 2 / 2**5)
    never = judge(study_of(crash), values_of("diverged", a=[0.0] * 6, b=[0.0] * 6), range(6))
    assert never.word == "undecided"


TAU = {"tau": {"probe": "sharpness", "value": "lambda_max", "over_units": "trend"}}


def test_a_trend_that_every_seed_shows_alike_is_decided_by_its_signs():
    falls = study_of({"says": "it falls", "measure": "tau", "less": ["a", 0]}, measures=TAU, arms=("a",))
    verdict = judge(falls, values_of("tau", a=[-1.0] * 6), range(6))
    assert (verdict.word, verdict.comparisons[0].p, verdict.comparisons[0].test) == ("reproduced", 2 / 2**6, "signs")
    assert judge(falls, values_of("tau", a=[1.0] * 6), range(6)).word == "not reproduced"
    assert judge(falls, values_of("tau", a=[-1.0] * 5 + [1.0]), range(6)).word == "undecided"


def test_the_permutation_of_signs_is_scipy_s():
    numbers = [0.3, -0.1, 0.4, 0.2, 0.2, 0.5, -0.05]
    expected = stats.permutation_test((numbers,), np.sum, permutation_type="samples", n_resamples=math.inf).pvalue
    assert sign_flip_test(numbers) == pytest.approx(expected)


NLL = {"x": {"result": "test.accuracy"}, "nll": {"result": "train.loss"}}


def in_regime(*conditions, a, b):
    """Judge a above b, where their losses are given."""
    asked = study_of(HIGHER, measures=NLL, arms=("a", "b"), conditions=list(conditions))
    values = {
        arm: {seed: {"x": number + seed / 100, "nll": loss} for seed, loss in enumerate(losses)}
        for arm, number, losses in (("a", 3, a), ("b", 1 + 0.01 * len(b), b))
    }
    values["a"][0]["x"] += 0.3
    return judge(asked, values, range(5))


def test_outside_of_its_regime_a_claim_is_not_testable_and_the_condition_says_why():
    fitted = {"says": "nothing is interpolated", "measure": "nll", "least": 0.05}
    inside = in_regime(fitted, a=[0.4] * 5, b=[0.5] * 5)
    assert inside.word == "reproduced"
    assert [one.holds for one in inside.conditions] == [True]
    outside = in_regime(fitted, a=[0.4] * 5, b=[0.5, 0.5, 0.004, 0.5, 0.5])
    assert outside.word == "not testable here"
    assert outside.conditions[0].found == "nll 0.004 of b, seed 2, where at least 0.05 is asked"
    assert outside.comparisons[0].status == "as claimed"  # it is still told


def test_a_run_without_the_number_of_a_condition_does_not_meet_it():
    least = {"says": "it learned", "measure": "nll", "most": 1.0, "arms": ["a"]}
    assert in_regime(least, a=[0.4] * 4 + [math.nan], b=[9.0] * 5).word == "not testable here"
    assert in_regime(least, a=[0.4] * 5, b=[9.0] * 5).word == "reproduced"


def test_losses_that_should_match_are_compared_by_their_ratio():
    match = {"says": "losses match", "measure": "nll", "match": ["a", "b"], "within": 2}
    assert in_regime(match, a=[0.5] * 5, b=[0.3] * 5).word == "reproduced"
    verdict = in_regime(match, a=[0.5] * 5, b=[0.3, 0.3, 0.2, 0.3, 0.3])
    assert verdict.word == "not testable here"
    assert "a factor of 2.5 between a and b, seed 2" in verdict.conditions[0].found


@pytest.mark.parametrize(
    ("condition", "sentence"),
    [
        ({}, "give bounds"),
        ({"least": 1, "match": ["a", "b"], "within": 2}, "give bounds"),
        ({"match": ["a", "b"]}, "go together"),
        ({"least": 1, "arms": ["d"]}, "names 'd', which does not exist"),
        ({"measure": "y", "least": 1}, "names 'y', which does not exist"),
    ],
)
def test_a_condition_that_says_nothing_is_refused(condition, sentence):
    with pytest.raises(RecipeError, match=sentence):
        study_of(HIGHER, conditions=[{"says": "so", "measure": "x", **condition}])


def ladder_study():
    rates = [0.001, 0.002, 0.004]
    return study_of(
        {"says": "b learns at a higher rate", "measure": "learns", "greater": ["b", "a"]},
        measures={"learns": {"result": "learns"}},
        arms=(),
        ladders={"a": {"values": rates}, "b": {"values": rates, "changes": {"clip": None}}},
        paper_scale={"ladders": {"a": [1, 2, 4], "b": [1, 2, 4]}},
    )


def climbed(a, b):
    """The numbers of runs whose ladders end after so many rungs."""
    return {
        f"{name}, rung {rung}": {seed: {"learns": float(rung <= top)} for seed, top in enumerate(tops)}
        for name, tops in (("a", a), ("b", b))
        for rung in (1, 2, 3)
    }


def test_a_ladder_is_judged_by_the_largest_rate_that_still_learns():
    asked = ladder_study()
    assert [recipe.optimizer.lr for recipe in asked.recipes().values()] == [0.001, 0.002, 0.004] * 2
    assert [recipe.optimizer.lr for recipe in asked.recipes(scale="paper").values()] == [1, 2, 4] * 2
    verdict = judge(asked, climbed([1, 1, 1, 2, 1, 1], [3, 2, 3, 3, 2, 3]), range(6))
    assert verdict.comparisons[0].numbers == {0: 2, 1: 1, 2: 2, 3: 1, 4: 1, 5: 2}
    assert (verdict.word, verdict.comparisons[0].p) == ("reproduced", 2 / 2**6)
    none = judge(asked, climbed([0] * 6, [1] * 6), range(6))
    assert none.comparisons[0].mean == 1  # one step below the first rung


def test_terms_are_arms_numbers_and_differences():
    values = values_of(a=[5.0], b=[2.0], c=[1.5])
    expected = Expectation(says="", measure="x", greater=[["a", "b"], ["b", "c"]])
    assert compare_seed(expected, values, 0) == 2.5
    assert compare_seed(Expectation(says="", measure="x", less=["a", 4.0]), values, 0) == 1.0


@given(
    exponent=st.floats(-3, 3),
    scale=st.floats(0.01, 100),
    at=st.lists(st.integers(1, 64), min_size=2, max_size=6, unique=True),
)
def test_the_exponent_of_a_power_law_is_found(exponent, scale, at):
    assert slope(at, [scale * x**exponent for x in at], power=True) == pytest.approx(exponent, abs=1e-6)


def test_a_slope_is_numpy_s():
    random = np.random.default_rng(0)
    at, y = [1.0, 3.0, 6.0, 12.0], random.normal(size=4)
    assert slope(at, y) == pytest.approx(np.polyfit(np.log2(at), y, 1)[0])


def test_on_null_data_intervals_cover_and_fewer_than_five_in_a_hundred_verdicts_are_wrong():
    random = np.random.default_rng(0)
    trials, wrong, covered = 2000, 0, 0
    one, two = study_of(HIGHER), study_of(HIGHER, {"says": "c", "measure": "x", "greater": ["c", "b"]})
    for _ in range(trials):
        common = random.normal(size=5)  # what a seed does to all arms
        values = values_of(**{arm: common + random.normal(size=5) for arm in "abc"})
        (found,) = judge(one, values, range(5)).comparisons
        covered += found.low <= 0 <= found.high
        wrong += judge(two, values, range(5)).word != "undecided"
    assert covered / trials == pytest.approx(0.95, abs=3 * math.sqrt(0.05 * 0.95 / trials))
    assert wrong / trials < 0.05


def test_a_reproduced_verdict_is_a_false_positive_at_half_the_rate():
    random = np.random.default_rng(1)
    trials = 2000
    verdicts = [
        judge(study_of(HIGHER), values_of(a=random.normal(size=5), b=random.normal(size=5)), range(5)).word
        for _ in range(trials)
    ]
    assert verdicts.count("reproduced") / trials < 0.025 + 3 * math.sqrt(0.025 * 0.975 / trials)
