import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vitclinic.statistics import RunningMean, median_interval, paired_share_interval, share_interval


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
