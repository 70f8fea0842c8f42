"""Names and facts that are read from source are those of the imported classes, and of timm's registry."""

import ast
import itertools
import subprocess
import sys
from typing import Any

import pytest

import vitclinic
from vitclinic._core.config import validate
from vitclinic._core.errors import RecipeError
from vitclinic._core.registry import Registry
from vitclinic._core.sources import SourceModule, Unreadable, read_classes, read_model_names
from vitclinic.probes.probe import PROBES
from vitclinic.tasks.task import TASKS
from vitclinic.treatments.treatment import TREATMENTS

REGISTRIES = [
    (PROBES, ("needs", "rank", "group", "asked_for", "by_default")),
    (TREATMENTS, ("changes", "costs", "part", "paper")),
    (TASKS, ("title",)),
]


@pytest.mark.parametrize(("registry", "attributes"), REGISTRIES, ids=lambda value: getattr(value, "noun", ""))
def test_facts_read_from_source_are_those_of_the_classes(registry, attributes):
    stated = Registry(registry.noun, registry.group, registry.bases).facts(*attributes)
    live = dict(registry.all())
    imported = Registry(registry.noun, registry.group, registry.bases)
    imported._known.update(live)
    assert stated == imported.facts(*attributes)


@pytest.mark.parametrize("registry", [PROBES, TREATMENTS], ids=lambda registry: registry.noun)
def test_no_fact_of_ours_needs_an_import(registry):
    """A default or description that is computed makes `vitclinic list` import torch: write it as a literal."""
    for cls in read_classes(registry.group).values():
        try:
            cls.options()
        except Unreadable as reason:
            pytest.fail(f"{cls.node.name} in {cls.module.name}: {reason} is not a literal or a constant")


VALUES = [None, True, -1, 0, 1, 3, 0.5, -0.5, 1e9, "5x", "3m", "upper", "test", "1/255", [1, 2], [-1], {}, "x"]


@pytest.mark.parametrize("registry", [PROBES, TREATMENTS], ids=lambda registry: registry.noun)
def test_options_are_checked_without_an_import_as_the_class_does(registry):
    """What the class accepts is never refused; what is refused, is so in the words of the class."""
    refused = 0
    for name, stated in read_classes(registry.group).items():
        cls, source = registry.get(name), stated.config()
        assert list(source.model_fields) == list(cls.model_fields)
        for option, value in itertools.product([*cls.model_fields, "nothing"], VALUES):
            words, own = (_refusal(config, {option: value}) for config in (source, cls))
            assert words in (None, own), (name, option, value)
            refused += words is not None
    assert refused > 300  # it does check


def _refusal(config, options):
    try:
        validate(config, options)
    except RecipeError as error:
        return str(error)
    return None


def test_a_validator_that_runs_first_may_accept_anything():
    source = """
class Made(Base):
    count: int = 3

    @field_validator("count", mode="{mode}")
    @classmethod
    def _count(cls, value):
        return len(value)
"""
    for mode, refused in (("after", True), ("before", False), ("plain", False)):
        module = SourceModule("vitclinic.made", ast.parse(source.format(mode=mode)))
        made = module.find_class("Made").config()
        assert (_refusal(made, {"count": "abc"}) is not None) is refused
        assert _refusal(made, {"counts": 3}) is not None


def test_types_that_take_code_accept_anything():
    module = SourceModule(
        "vitclinic.made", ast.parse("Odd = Annotated[int, BeforeValidator(_odd)]\nCount = int | None")
    )
    types = [
        module.type_of(ast.parse(text, mode="eval").body) for text in ("Odd | None", "Count", "list[Count]", "Other")
    ]
    assert types == [Any, int | None, list[int | None], Any]


def test_a_class_is_imported_when_it_is_asked_for():
    code = """
import sys
from vitclinic.treatments import parse_treatments
(sam,) = parse_treatments(["sam"])
assert sam.rho == 0.1
assert "vitclinic.treatments.conv_stem" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_class_of_a_users_own_is_not_replaced_by_ours():
    registry = Registry(PROBES.noun, PROBES.group, PROBES.bases)
    mine = type("Mine", (PROBES.get("norms"),), {"__module__": "mine", "__doc__": "My norms."})
    registry.register(mine)
    registry.register(PROBES.get("norms"))
    assert registry.get("norms") is mine
    assert next(facts for facts in registry.facts() if facts.name == "norms").about == "My norms."


def test_names_of_models_read_from_source_are_those_of_the_registry():
    import timm

    import vitclinic.models

    assert read_model_names() == timm.list_models() == vitclinic.list_models()


def test_patterns_choose_names():
    assert vitclinic.list_models("vit_tiny_f*") == ["vit_tiny_fitted"]
    assert vitclinic.list_treatments("s?m") == ["sam"]
    assert vitclinic.list_remedies("lr*") == ["lr x 3", "lr / 3"]
    assert vitclinic.list_probes("nothing*") == []
    assert {"digits", "hf:NAME"} <= set(vitclinic.list_datasets())
    assert vitclinic.list_recipes("dig*") == ["digits"]
    assert {"classification", "contrastive", "dino"} <= set(vitclinic.list_tasks())
    assert vitclinic.list_studies("C6") == ["C6"]
