import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vitclinic._core.statistics import (
    RunningMean,
    holm,
    median_interval,
    paired_difference,
    paired_share_interval,
    share_interval,
    t_interval,
)


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (3, 10), (10, 10), (540, 1000)])
def test_wilson_against_scipy(successes, trials):
    interval = stats.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    assert share_interval(successes, trials) == pytest.approx((interval.low, interval.high), abs=1e-9)


def test_covers_at_its_nominal_rate():
    draws = np.random.default_rng(0).binomial(200, 0.7, 4000)
    inside = [low <= 0.7 <= high for low, high in (share_interval(int(d), 200) for d in draws)]
    assert 0.935 < np.mean(inside) < 0.965


@given(st.integers(1, 3000), st.data())
def test_a_share_lies_in_its_interval(trials, data):
    successes = data.draw(st.sampled_from([0, trials]) | st.integers(0, trials))
    low, high = share_interval(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1


def test_no_trials_say_nothing():
    assert share_interval(0, 0) == (0, 1)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.integers(1, 7))
def test_a_running_mean_does_not_depend_on_the_batches(values, size):
    running = RunningMean()
    for start in range(0, len(values), size):
        running.add(values[start : start + size])
    assert running.n == len(values)
    assert float(running.mean) == pytest.approx(np.mean(values), abs=1e-6)
    if len(values) > 1:
        low, high = stats.t.interval(0.95, len(values) - 1, 0, stats.sem(values) + 1e-300)
        assert float(running.half_width()) == pytest.approx((high - low) / 2, rel=1e-6, abs=1e-6)


def test_a_running_mean_does_not_cancel():
    running = RunningMean()
    for batch in np.split(1e9 + np.arange(1000) % 2, 10):
        running.add(batch)
    assert float(running.half_width()) == pytest.approx(1.96 * 0.5 / 1000**0.5, rel=0.01)


def test_one_sample_has_no_interval():
    running = RunningMean()
    running.add([1.0])
    assert np.isnan(running.half_width())


def test_the_interval_of_a_median_covers_it():
    random = np.random.default_rng(0)
    draws = random.exponential(size=(2000, 10))
    intervals = np.array([median_interval(row) for row in draws])
    covered = np.mean((intervals[:, 0] <= np.log(2)) & (np.log(2) <= intervals[:, 1]))
    assert covered == pytest.approx(1 - 2 * (1 + 10) / 2**10, abs=0.01)  # 97.9%: the best that ten values allow
    assert median_interval([1, 2, 3, 4, 5]) is None


def test_the_paired_interval_by_hand():
    # 13/102 - 3/102 = 0.098039; 1.959964 sqrt((16/102 - 0.098039^2) / 102) = 0.074469
    assert paired_share_interval(12, 2, 100) == pytest.approx((0.023570, 0.172508), abs=2e-6)


@given(st.integers(1, 300), st.data())
def test_the_paired_interval_holds_its_value(n, data):
    lost = data.draw(st.integers(0, n))
    gained = data.draw(st.integers(0, n - lost))
    low, high = paired_share_interval(lost, gained, n)
    assert -1 <= low <= (lost - gained) / n <= high <= 1
    assert low < high
    mirrored = paired_share_interval(gained, lost, n)
    assert mirrored == pytest.approx((-high, -low))


def test_the_paired_interval_covers_at_its_nominal_rate():
    random = np.random.default_rng(0)
    counts = random.multinomial(120, [0.12, 0.05, 0.83], size=4000)
    inside = [low <= 0.07 <= high for low, high in (paired_share_interval(int(a), int(b), 120) for a, b, _ in counts)]
    assert 0.935 < np.mean(inside) < 0.975


@pytest.mark.parametrize("pairs", [2, 5, 30])
def test_the_paired_difference_against_scipy(pairs):
    random = np.random.default_rng(pairs)
    first, second = random.normal(size=(2, pairs))
    found, expected = paired_difference(first, second), stats.ttest_rel(second, first)
    interval = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.p == pytest.approx(expected.pvalue)
    assert found.mean == pytest.approx(np.mean(second - first))
    assert found.pairs == pairs


@pytest.mark.parametrize("pairs", [2, 3, 5])
def test_the_paired_interval_covers_at_its_nominal_rate_even_with_few_pairs(pairs):
    random = np.random.default_rng(0)
    seeds = random.normal(size=(4000, pairs))  # what two runs with one seed share
    intervals = [
        paired_difference(shared + random.normal(0, 0.5, pairs), shared + random.normal(0.3, 0.5, pairs))
        for shared in seeds
    ]
    assert np.mean([found.low <= 0.3 <= found.high for found in intervals]) == pytest.approx(0.95, abs=0.011)


def test_several_arms_hold_together_and_holm_errs_in_one_of_twenty_at_most():
    random = np.random.default_rng(1)
    together, wrong = [], []
    for _ in range(2000):
        plain = random.normal(size=5)
        found = [paired_difference(plain, random.normal(size=5), arms=4) for _ in range(4)]
        together.append(all(arm.low <= 0 <= arm.high for arm in found))
        wrong.append(min(holm([arm.p for arm in found])) < 0.05)
    assert np.mean(together) >= 0.95
    assert np.mean(wrong) <= 0.05
    assert np.mean(wrong) > 0.02  # nor does it err never


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_against_its_definition(p_values):
    adjusted = holm(p_values)
    for alpha in (0.01, 0.05, 0.2):
        rejected = set()
        for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
            if p_values[index] * (len(p_values) - rank) > alpha:
                break
            rejected.add(index)
        assert {i for i, p in enumerate(adjusted) if p <= alpha} == rejected


def test_the_same_difference_in_every_pair():
    assert paired_difference([1, 2], [1, 2]).p == 1
    assert paired_difference([1, 2], [2, 3]).p == 0
    with pytest.raises(ValueError, match="two pairs"):
        paired_difference([1], [2])
    assert t_interval([1.0]) is None
