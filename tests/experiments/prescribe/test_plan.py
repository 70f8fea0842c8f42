"""The arithmetic of halving within a budget."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vitclinic._core.statistics import paired_difference
from vitclinic.experiments.prescribe.plan import (
    FEW,
    FINAL_SEEDS,
    FINAL_SHARE,
    LARGEST_UNSEEN,
    RESERVE,
    SEED_NOISE,
    add_pairs,
    count_affordable,
    detectable_difference,
    find_needed_budget,
    halve,
    make_plan,
    shrink,
)

IMAGES = {"train": 1000, "val": 500, "test": 500}
COUNTS = st.integers(1, 40)
SECONDS = st.floats(10, 1e5)
OVERHEAD = st.floats(0, 0.1)
LONGEST = st.floats(0.1, 1e5)


@given(st.integers(2, 200))
def test_every_rung_has_half_rounded_up_until_they_are_few(candidates):
    rungs = halve(candidates)
    assert rungs[0] == candidates
    assert all(after == -(-before // 2) for before, after in itertools.pairwise(rungs))
    assert rungs[-1] <= FEW
    assert all(size > FEW for size in rungs[:-1])


@given(COUNTS, SECONDS, OVERHEAD, LONGEST)
def test_a_plan_keeps_the_budget_and_the_final_its_share(candidates, seconds, overhead, longest):
    plan = make_plan(candidates, seconds, overhead, longest, IMAGES)
    final = plan[-1]
    assert sum(stage.planned for stage in plan) <= seconds * (1 - RESERVE) * (1 + 1e-9)
    assert final.arms == 2
    assert FINAL_SEEDS[0] <= final.seeds <= FINAL_SEEDS[1]
    assert all(stage.seconds <= final.seconds + 1e-9 for stage in plan)
    assert final.seconds <= longest
    if candidates > 1 and final.seconds < longest:
        assert final.planned == pytest.approx(FINAL_SHARE * (1 - RESERVE) * seconds)


@given(st.integers(2, 40), SECONDS)
def test_arms_are_the_plain_recipe_singles_and_then_the_best_with_a_few_more(candidates, seconds):
    plan, rungs = make_plan(candidates, seconds, 0.0, 1e9, IMAGES), halve(candidates)
    growths = plan[len(rungs) : -1]
    assert [stage.arms for stage in plan[: len(rungs)]] == [1 + singles for singles in rungs]
    assert [stage.arms for stage in growths] == [2 + min(3, candidates - n) for n in range(1, 4) if n < candidates]
    assert [stage.name for stage in growths] == [f"growth {n}" for n in range(1, len(growths) + 1)]
    trials = [stage.seconds for stage in plan[: len(rungs)]]
    assert trials == sorted(trials)  # fewer arms, longer trials


def test_one_candidate_needs_no_selection():
    (final,) = make_plan(1, 1000, 0.0, 1e9, IMAGES)
    assert final.planned == pytest.approx((1 - RESERVE) * 1000)


def test_time_beyond_the_recipe_s_own_length_goes_into_seeds():
    short, growth, final = make_plan(2, 1000, 0.0, 20.0, IMAGES)
    assert (final.seconds, final.seeds) == (20.0, 9)  # 0.4 x 940 / (2 x 20)
    assert (short.seconds, short.seeds) == (20.0, 4)  # 0.3 x 940 / (3 x 20)
    assert (growth.seconds, growth.seeds) == (20.0, 4)
    assert make_plan(2, 2000, 0.0, 20.0, IMAGES)[0].seeds == 5  # and never more than five to select by


@given(COUNTS, SECONDS, OVERHEAD, st.floats(0.3, 3), st.floats(0.3, 2))
def test_stages_only_shrink_and_then_fit(candidates, seconds, overhead, slowness, share):
    plan = make_plan(candidates, seconds, overhead, 1e9, IMAGES)
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
    needed = find_needed_budget(candidates, overhead, 1e9, least, IMAGES)
    assert count_affordable(candidates, needed, overhead, 1e9, least, IMAGES) == candidates
    assert count_affordable(candidates, 0.97 * needed, overhead, 1e9, least, IMAGES) < candidates


@given(st.integers(2, 30), SECONDS, st.floats(0.5, 100))
def test_more_time_never_means_fewer_candidates(wanted, seconds, least):
    fewer, more = (count_affordable(wanted, s, 0.0, 1e9, least, IMAGES) for s in (seconds, 1.5 * seconds))
    assert fewer <= more <= wanted


def simulated_runs(seeds, images, shift=0.0, times=4000):
    """Accuracies of `times` x `seeds` runs: networks that are right on half of the images, give or take their seed."""
    random = np.random.default_rng(seeds * images)
    rates = 0.5 + shift + SEED_NOISE * random.standard_normal((times, seeds))
    return random.binomial(images, rates) / images


@pytest.mark.parametrize(("seeds", "images"), [(1, 50), (1, 5000), (3, 500)])
def test_noise_alone_rarely_makes_a_difference_that_a_rung_can_tell(seeds, images):
    one, other = simulated_runs(seeds, images), simulated_runs(seeds, images + 1, 0.0)
    beyond = np.abs(one.mean(1) - other.mean(1)) > detectable_difference(seeds, images, tested=False)
    assert beyond.mean() == pytest.approx(0.05, abs=0.02)


@pytest.mark.parametrize(("seeds", "images"), [(5, 50), (5, 10_000), (10, 500)])
def test_a_difference_that_the_final_can_tell_is_found_about_every_second_time(seeds, images):
    smallest = detectable_difference(seeds, images, tested=True)
    plain, winner = simulated_runs(seeds, images, times=800), simulated_runs(seeds, images + 1, smallest, times=800)
    found = [paired_difference(a, b).low > 0 for a, b in zip(plain.tolist(), winner.tolist(), strict=True)]
    assert 0.4 < np.mean(found) < 0.65
    twice = simulated_runs(seeds, images + 1, 2 * smallest, times=800)
    assert np.mean([paired_difference(a, b).low > 0 for a, b in zip(plain.tolist(), twice.tolist(), strict=True)]) > 0.9


@given(st.integers(50, 20_000), st.integers(1, 12))
def test_every_stage_has_seeds_enough_to_tell_a_large_difference(images, candidates):
    plan = make_plan(candidates, 1000, 0.0, 1e9, {"val": images, "test": images})
    assert all(stage.detectable <= LARGEST_UNSEEN for stage in plan)
    for stage in plan:  # and no more than it takes, unless its trials are as long as they may be
        few = FINAL_SEEDS[0] if stage.final else 1
        enough = stage.seeds == few or detectable_difference(stage.seeds - 1, images, stage.final) > LARGEST_UNSEEN
        assert enough or stage.seconds == plan[-1].seconds


def test_few_images_need_more_seeds_and_so_a_larger_budget():
    few, many = ({"val": n, "test": n} for n in (50, 5000))
    assert make_plan(1, 1000, 0.0, 1e9, few)[-1].seeds == 7
    assert make_plan(1, 1000, 0.0, 1e9, many)[-1].seeds == 5
    assert find_needed_budget(3, 0.0, 1e9, 10, few) > 1.3 * find_needed_budget(3, 0.0, 1e9, 10, many)


def test_time_that_growing_did_not_need_goes_into_pairs_of_the_final():
    final = make_plan(4, 1000, 0.0, 1e9, IMAGES)[-1]  # 5 pairs of 37.6 s
    assert add_pairs(final, 400, 1.0) == final
    assert add_pairs(final, 650, 1.0).seeds == 8
    assert add_pairs(final, 650, 1.3).seeds == 6
    assert add_pairs(final, 9999, 1.0).seeds == FINAL_SEEDS[1]
    assert add_pairs(final, 10, 1.0) == final
