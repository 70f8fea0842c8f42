"""Probes by name, from what a user wrote and from other packages."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from vitclinic._core import registry as plugins
from vitclinic._core.errors import RecipeError
from vitclinic.probes import Cost, OwningProbe, StreamingProbe, default_probes, known_probes, parse_probes, register
from vitclinic.probes.probe import PROBES, Probe


def test_names_and_options():
    norms, cost = parse_probes(["norms", {"cost": {"repeats": 3}}])
    assert (norms.name, cost.name, cost.repeats) == ("norms", "cost", 3)
    assert [probe.name for probe in parse_probes(None)] == default_probes()
    assert {"cost", "norms", "fourier", "attention_entropy"} <= set(default_probes())
    assert not {"sharpness", "landscape", "lesion", "attention_maps"} & set(default_probes())
    assert parse_probes([cost]) == [cost]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["norm"], "There is no probe 'norm'. Did you mean 'norms'?"),
        (["zzz"], "There is no probe 'zzz'. See `vitclinic list probes`"),
        ([{"cost": {"repeat": 3}}], "Unknown key 'probes.cost.repeat'. Did you mean 'repeats'?"),
        ([{"cost": {"repeats": "3"}}], "'probes.cost.repeats': input should be a valid integer"),
        ([{"norms": {"x": 1}}], "The probe 'norms' has no options"),
        (["cost", "cost"], "'cost' is listed twice"),
        ([{"cost": {}, "norms": {}}], "write a name or"),
        ([], "'probes' is empty"),
    ],
)
def test_mistakes_are_sentences(entries, message):
    with pytest.raises(RecipeError) as caught:
        parse_probes(entries)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeat": 3}, "^Unknown key 'probes.cost.repeat'. Did you mean 'repeats'.$"),
        ({"repeats": "x"}, r"^'probes.cost.repeats': input should be a valid integer \(got 'x'\).$"),
    ],
)
def test_mistakes_in_a_probe_of_one_s_own_making_are_the_same_sentences(options, message):
    with pytest.raises(RecipeError, match=message):
        Cost(**options)


def test_the_docs_have_each_probe_where_it_belongs():
    page = (Path(__file__).parents[2] / "docs" / "probes" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (.*?) ?\| (.*?) ?\|$", page, re.MULTILINE)
    cells = [(group, kind, cell) for group, *cells in rows for kind, cell in enumerate(cells)]
    written = [
        (*found, group, kind) for group, kind, cell in cells for found in re.findall(r"\[(\w+)\]\([^)]*\)(\W?)", cell)
    ]
    marked = {name: (group, kind, mark.strip(",")) for name, mark, group, kind in written}
    assert len(marked) == len(written)
    expected = {}
    for name, probe in known_probes().items():
        streams = issubclass(probe, StreamingProbe)
        mark = "†" if probe.by_default and not streams else "‡" if probe.asked_for else ""
        expected[name] = (probe.group.lower(), 0 if streams else 1, mark)
    assert {name: (group, kind, mark.strip()) for name, (group, kind, mark) in marked.items()} == expected


def test_a_probe_of_another_package_is_found_by_its_entry_point(monkeypatch):
    class Foreign(OwningProbe):
        """From elsewhere."""

        name = "foreign"

    monkeypatch.setattr(EntryPoint, "load", lambda self: Foreign)
    monkeypatch.setattr(PROBES, "_known", dict(PROBES._known))
    monkeypatch.setattr(
        plugins, "entry_points", lambda group: [EntryPoint("foreign", "elsewhere:Foreign", group)] if group else []
    )
    plugins.load_entry_points.cache_clear()
    assert known_probes()["foreign"] is Foreign
    assert isinstance(parse_probes(["foreign"])[0], Foreign)


def test_a_probe_is_of_one_of_two_kinds():
    with pytest.raises(TypeError, match="is not a probe: derive it from"):
        register(type("Neither", (Probe,), {"name": "neither", "__module__": __name__}))
