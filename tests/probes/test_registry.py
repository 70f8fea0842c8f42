"""Probes by name, from what a user wrote and from other packages."""

from importlib.metadata import EntryPoint

import pytest

from vitclinic._core import registry as plugins
from vitclinic._core.errors import RecipeError
from vitclinic.probes import OwningProbe, default_probes, known_probes, parse_probes, register
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
