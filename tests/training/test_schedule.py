import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitclinic.training.schedule import Schedule, ScheduleConfig


def test_cosine_against_its_formula():
    schedule = Schedule(ScheduleConfig(name="cosine", warmup="10 steps", final=0.1), 5, 110)
    assert [schedule(step) for step in range(10)] == pytest.approx([(step + 1) / 11 for step in range(10)])
    for step in (10, 60, 109):
        assert schedule(step) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * (step - 10) / 100)) / 2)


def test_linear_and_constant():
    linear = Schedule(ScheduleConfig(name="linear", warmup=0), 5, 100)
    assert [linear(0), linear(50), linear(99)] == pytest.approx([1, 0.5, 0.01])
    constant = Schedule(ScheduleConfig(name="constant", warmup=2), 5, 100)
    assert constant(9) < 1
    assert constant(10) == constant(99) == 1


def test_polynomial_against_torch():
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    peer = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=50, power=0.9)
    ours = Schedule(ScheduleConfig(name="polynomial", warmup=0), 1, 50)
    for step in range(50):
        assert ours(step) == pytest.approx(peer.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        peer.step()
    with pytest.raises(ValueError, match="only for the polynomial schedule"):
        ScheduleConfig(name="cosine", power=2.0)


def test_exponential_falls_by_the_same_factor_every_step():
    schedule = Schedule(ScheduleConfig(name="exponential", warmup="10 steps", final=0.01), 5, 110)
    rates = [schedule(step) for step in range(10, 110)]
    assert rates[0] == 1
    assert [b / a for a, b in itertools.pairwise(rates)] == pytest.approx([0.01 ** (1 / 100)] * 99)
    with pytest.raises(ValueError, match="never reaches 0"):
        ScheduleConfig(name="exponential")


def test_cosine_against_torch():
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    peer = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    ours = Schedule(ScheduleConfig(warmup=0), 1, 50)
    for step in range(50):
        assert ours(step) == pytest.approx(peer.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        peer.step()


@given(
    st.sampled_from(["cosine", "linear", "polynomial", "constant"]),
    st.sampled_from([0, 1, "3 steps", "20%", "100%", 1000]),
    st.integers(1, 200),
    st.floats(0.3, 50),
)
def test_always_positive_and_at_most_the_peak(name, warmup, total, steps_per_epoch):
    schedule = Schedule(ScheduleConfig(name=name, warmup=warmup), steps_per_epoch, total)
    factors = [schedule(step) for step in range(total)]
    assert all(0 < factor <= 1 for factor in factors)
    peak = factors.index(max(factors))
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
