"""What another package brings is taken, or left out with a warning; it never disables the rest."""

from importlib.metadata import EntryPoint

import pytest

from vitclinic._core import registry as plugins
from vitclinic.anatomy.families.family import register_family
from vitclinic.probes.probe import register


@pytest.fixture
def group(monkeypatch):
    points = [
        EntryPoint("broken", "no_such_package:thing", "some.group"),
        EntryPoint("odd", "math:pi", "some.group"),
        EntryPoint("fine", "math:tau", "some.group"),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    plugins.load_entry_points.cache_clear()
    yield "some.group"
    plugins.load_entry_points.cache_clear()


def test_a_broken_entry_point_is_left_out_with_one_warning(group, caplog):
    taken = []

    def take(value):
        if value < 4:
            raise TypeError("too small")
        taken.append(value)

    for _ in range(2):
        plugins.load_entry_points(group, take)
    assert len(taken) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "The entry point broken = no_such_package:thing (some.group) is skipped: ModuleNotFoundError: No module named"
        " 'no_such_package'",
        "The entry point odd = math:pi (some.group) is skipped: TypeError: too small",
    ]


@pytest.mark.parametrize("take", [register, register_family])
def test_what_is_no_probe_or_family_is_refused(take, group, caplog):
    plugins.load_entry_points(group, take)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
