"""The whole of timm's registry: each network has an anatomy, or a clear error."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from tests.anatomy.networks import CUTS, NETWORKS, cut, sample
from vitclinic._core.errors import AnatomyError
from vitclinic.anatomy import Anatomy, list_families
from vitclinic.anatomy.families import recognise

PARALLEL = {"ParallelScalingBlock", "ParallelThingsBlock", "DiffParallelScalingBlock"}


def test_the_contract_covers_every_family_and_25_architectures_of_timm() -> None:
    assert sum(name.startswith("timm ") for name in NETWORKS) >= 25
    covered = {recognise(build())[1].name for build in NETWORKS.values()}
    optional = {family.name for family in list_families() if family.name.startswith("Hugging Face")}
    assert covered | optional == {family.name for family in list_families()}


@pytest.mark.parametrize("module", CUTS)
def test_every_network_of_a_known_module_has_an_anatomy_or_parallel_blocks(module: str) -> None:
    names = timm.list_models(module=module)
    refused = {}
    for name in names:
        network = cut(module, name)
        try:
            anatomy = Anatomy.of(network)
        except AnatomyError:
            refused[name] = type(network.blocks[0]).__name__
        else:
            assert anatomy.units[-1].kind == "head"
    assert set(refused.values()) <= PARALLEL
    assert len(refused) < len(names) / 10


def _other_modules() -> list[str]:
    others = set(timm.list_modules()) - set(CUTS)
    return [names[0] for module in sorted(others) if (names := timm.list_models(module=module))]


OTHERS = _other_modules()
SAMPLE = sample(OTHERS, 16)

LARGE = 12e6
"""Parameters; an anatomy of a larger network takes seconds, or gigabytes."""


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]
)
def test_a_network_of_another_module_is_known_by_its_base_class_or_gets_a_clear_error(name: str) -> None:
    try:
        with torch.device("meta"):
            network: nn.Module = timm.create_model(name)
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"timm cannot build it without memory: {error}")
    with pytest.raises(AnatomyError) as caught:
        Anatomy.of(network)
    if "no weights" in str(caught.value):
        if sum(p.numel() for p in network.parameters()) > LARGE:
            return  # the zoo has a small network of every module of timm
        assert Anatomy.of(timm.create_model(name)).units[-1].kind == "head"
    else:
        assert "docs/anatomy.md" in str(caught.value)
        assert str(caught.value).count(". ") == 0


def test_weights_are_needed() -> None:
    with torch.device("meta"):
        network = timm.create_model("vit_tiny_patch16_224")
    with pytest.raises(AnatomyError, match="no weights"):
        Anatomy.of(network)
