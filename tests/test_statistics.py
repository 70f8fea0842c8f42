import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vitclinic.statistics import RunningMean, median_interval, paired_interval, share_interval


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


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_a_paired_interval_holds_the_difference(lost, gained, neither):
    trials = lost + gained + neither + 1
    low, high = paired_interval(lost, gained, trials)
    assert -1 <= low <= (lost - gained) / trials <= high <= 1
    assert paired_interval(gained, lost, trials) == pytest.approx((-high, -low), abs=1e-12)


def test_where_no_pair_differs_the_paired_interval_has_a_closed_form():
    z = stats.norm.ppf(0.975)
    assert paired_interval(0, 0, 44) == pytest.approx((-(z**2) / (44 + z**2), z**2 / (44 + z**2)))


@pytest.mark.parametrize(("lost", "gained", "trials"), [(8, 2, 100), (0, 3, 20), (5, 0, 10), (1, 7, 30)])
def test_the_edges_of_a_paired_interval_are_where_a_test_would_reject(lost, gained, trials):
    """The score statistic at each edge, with the maximum of the likelihood found on a grid."""
    for edge, sign in zip(paired_interval(lost, gained, trials), (1, -1), strict=True):
        after = np.linspace(max(0, -edge), (1 - edge) / 2, 200_001)[1:-1]  # shares gained, edge + after being lost
        likelihood = lost * np.log(after + edge) + gained * np.log(after)
        likelihood += (trials - lost - gained) * np.log(1 - 2 * after - edge)
        most_likely = after[likelihood.argmax()]
        error = np.sqrt(trials * (2 * most_likely + edge * (1 - edge)))
        assert (lost - gained - trials * edge) / error == pytest.approx(sign * stats.norm.ppf(0.975), rel=1e-3)


@pytest.mark.parametrize(("loses", "gains"), [(0.02, 0.0), (0.2, 0.05), (0.5, 0.3)])
def test_a_paired_interval_covers_at_about_its_nominal_rate(loses, gains):
    drawn = np.random.default_rng(0).multinomial(100, [loses, gains, 1 - loses - gains], size=2000)
    found = [paired_interval(int(lost), int(gained), 100) for lost, gained, _ in drawn]
    assert 0.93 < np.mean([low <= loses - gains <= high for low, high in found]) <= 1
