"""Threads by the load that is seen."""

import io

import pytest
import torch
from rich.console import Console

from vitclinic._core import threads
from vitclinic.cli import train

STAT = (
    "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 {} 100 0 500 50 0 0 0 0 0\ncpu1 7 0 0 {} 0 0 0 0 0 0\ncpu2 {} 0 0 4 0 0 0 0 0 0\n"
)
"""Two cores of ours, of which the second is idle, and one of others, who are busy."""


def test_load_is_the_time_that_others_took(monkeypatch, tmp_path):
    file = tmp_path / "stat"
    ticks, clock = [1000, 1045], [0.0, 0.3]  # 0.45 s of a core in 0.3 s
    monkeypatch.setattr(threads.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(threads.os, "times", lambda: (0.0, 0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(threads.time, "monotonic", lambda: clock.pop(0))

    def read():
        now = ticks.pop(0)
        file.write_text(STAT.format(now, now, 100 * now))
        return original(file)

    monkeypatch.setattr(threads, "_own_cores", lambda: {0, 1})
    original = threads._read_busy
    monkeypatch.setattr(threads, "_read_busy", read)
    assert threads.measure_load(0.0) == pytest.approx(1.5)


@pytest.mark.parametrize(("busy", "before", "expected"), [(1.0, None, 1), (0.1, None, 2), (None, None, 2), (1.0, 2, 2)])
def test_the_command_leaves_busy_cores_alone_and_says_so(monkeypatch, busy, before, expected):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(train, "measure_load", lambda: busy)
    monkeypatch.setattr(train, "count_cores", lambda: 2)
    said, given = io.StringIO(), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        train._set_threads(before, Console(file=said, width=200))
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(given)
    assert said.getvalue().count("cores are busy: training with 1 thread (OMP") == (expected == 1)
