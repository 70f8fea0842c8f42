import numpy as np
import pytest
from scipy import stats

from vitclinic.statistics import share_interval


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (3, 10), (10, 10), (540, 1000)])
def test_wilson_against_scipy(successes, trials):
    interval = stats.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    assert share_interval(successes, trials) == pytest.approx((interval.low, interval.high), abs=1e-9)


def test_covers_at_its_nominal_rate():
    draws = np.random.default_rng(0).binomial(200, 0.7, 4000)
    inside = [low <= 0.7 <= high for low, high in (share_interval(int(d), 200) for d in draws)]
    assert 0.935 < np.mean(inside) < 0.965


def test_no_trials_say_nothing():
    assert share_interval(0, 0) == (0, 1)
