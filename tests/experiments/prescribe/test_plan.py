"""The arithmetic of halving within a budget."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vitclinic.experiments.prescribe.plan import (
    BEST,
    FINAL_SEEDS,
    FINAL_SHARE,
    RESERVE,
    count_affordable,
    count_pairs,
    find_needed_budget,
    halve,
    make_plan,
    shrink,
)

COUNTS = st.integers(1, 40)
SECONDS = st.floats(10, 1e5)
OVERHEAD = st.floats(0, 0.1)
LONGEST = st.floats(0.1, 1e5)


@given(st.integers(2, 200))
def test_every_rung_has_at_most_half_rounded_up_and_the_last_the_best_few(candidates):
    rungs = halve(candidates)
    assert rungs[0] == candidates
    assert all(BEST <= after < before for before, after in itertools.pairwise(rungs))
    assert all(after <= -(-before // 2) for before, after in itertools.pairwise(rungs) if after != BEST)
    assert rungs[-1] <= BEST


@given(COUNTS, SECONDS, OVERHEAD, LONGEST)
def test_a_plan_keeps_the_budget_and_the_final_its_share(candidates, seconds, overhead, longest):
    plan = make_plan(candidates, seconds, overhead, longest)
    final = plan[-1]
    assert sum(stage.planned for stage in plan) <= seconds * (1 - RESERVE) * (1 + 1e-9)
    assert final.arms == 2
    assert FINAL_SEEDS[0] <= final.seeds <= FINAL_SEEDS[1]
    assert all(stage.seconds <= final.seconds + 1e-9 for stage in plan)
    assert final.seconds <= longest
    if candidates > 1 and final.seconds < longest:
        assert final.planned == pytest.approx(FINAL_SHARE * (1 - RESERVE) * seconds)


@given(st.integers(2, 40), SECONDS)
def test_arms_are_the_plain_recipe_singles_and_in_the_end_pairs(candidates, seconds):
    plan, rungs = make_plan(candidates, seconds, 0.0, 1e9), halve(candidates)
    assert [stage.arms for stage in plan[:-2]] == [1 + singles for singles in rungs[:-1]]
    assert plan[-2].arms == 1 + rungs[-1] + count_pairs(rungs[-1])
    trials = [stage.seconds for stage in plan[:-2]]
    assert trials == sorted(trials)  # fewer arms, longer trials


def test_one_candidate_needs_no_selection():
    (final,) = make_plan(1, 1000, 0.0, 1e9)
    assert final.planned == pytest.approx((1 - RESERVE) * 1000)


def test_time_beyond_the_recipe_s_own_length_goes_into_seeds():
    short, final = make_plan(2, 1000, 0.0, 20.0)
    assert (final.seconds, final.seeds) == (20.0, 9)  # 0.4 x 940 / (2 x 20)
    assert (short.seconds, short.seeds) == (20.0, 5)  # and never more than five to select by


@given(COUNTS, SECONDS, OVERHEAD, st.floats(0.3, 3), st.floats(0.3, 2))
def test_stages_only_shrink_and_then_fit(candidates, seconds, overhead, slowness, share):
    plan = make_plan(candidates, seconds, overhead, 1e9)
    assume(min(stage.seconds for stage in plan) >= 0)
    left = share * seconds
    after = shrink(plan, left, slowness)
    assert all(b.seconds <= a.seconds for a, b in zip(plan, after, strict=True))
    assert [(b.arms, b.seeds) for b in after] == [(a.arms, a.seeds) for a in plan]
    expected = max(1, slowness) * sum(stage.planned for stage in plan)
    if expected <= left:
        assert after == plan
    elif left / expected > 0.25 and min(stage.seconds for stage in after) > 0:
        assert max(1, slowness) * sum(stage.planned for stage in after) == pytest.approx(left)


@given(COUNTS, OVERHEAD, st.floats(0.5, 100))
def test_the_needed_budget_is_enough_and_little_less_is_not(candidates, overhead, least):
    needed = find_needed_budget(candidates, overhead, 1e9, least)
    assert count_affordable(candidates, needed, overhead, 1e9, least) == candidates
    assert count_affordable(candidates, 0.97 * needed, overhead, 1e9, least) < candidates


@given(st.integers(2, 30), SECONDS, st.floats(0.5, 100))
def test_more_time_never_means_fewer_candidates(wanted, seconds, least):
    fewer, more = (count_affordable(wanted, s, 0.0, 1e9, least) for s in (seconds, 1.5 * seconds))
    assert fewer <= more <= wanted
