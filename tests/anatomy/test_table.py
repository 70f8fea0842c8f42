"""The facts of a table against what a forward pass shows, and the table as it is printed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.anatomy.handwritten import FlipAveraged, FunctionalViT, LinearPatchViT, SharedBlockViT
from tests.anatomy.handwritten_convnets import UNetClassifier
from tests.anatomy.networks import NETWORKS
from vitclinic import treat
from vitclinic.anatomy import Anatomy, record_attention, taps
from vitclinic.anatomy.table import count_outside, list_facts

FAMILIES = (
    *("timm deit_small_distilled_patch16_224", "timm pit_ti_224", "timm volo_d1_224", "timm gmixer_12_224"),
    *("timm resnet18d", "timm swinv2_base_window8_256", "torchvision vit", "torchvision swin, padded"),
    *("torchvision convnext", "huggingface swin", "vitclinic alternet, padded", "vit, not square, registers"),
)
OBSERVED = {net.__name__: net for net in (LinearPatchViT, FunctionalViT, SharedBlockViT, UNetClassifier)}

PRINTED = """\
FunctionalViT on 3 x 32 x 32 images: 6 units, 47,328 parameters (observed from one forward pass)
   unit   kind  stage   grid  channels  parameters  residual  attention map  removed by
0  stem   stem      0  4 x 4        48       9,984
1  msa.0  msa       0  4 x 4        48       9,216  yes       3 heads        branch set to zero
2  mlp.0  mlp       0  4 x 4        48       9,216  yes                      branch set to zero
3  msa.1  msa       0  4 x 4        48       9,216  yes       3 heads        branch set to zero
4  mlp.1  mlp       0  4 x 4        48       9,216  yes                      branch set to zero
5  head   head      0               10         480"""


@pytest.fixture(params=[*FAMILIES, *OBSERVED], scope="module")
def anatomy(request: pytest.FixtureRequest) -> Anatomy:
    torch.manual_seed(0)
    if request.param in OBSERVED:
        return Anatomy.of(OBSERVED[request.param]().eval(), torch.rand(1, 3, 32, 32))
    return Anatomy.of(NETWORKS[request.param]().eval())


def test_grid_prefix_and_channels_are_those_of_the_values_that_pass(anatomy: Anatomy) -> None:
    with torch.no_grad(), taps({unit.name: unit.output for unit in anatomy.units}) as seen:
        anatomy.network(torch.randn(2, *anatomy.image))
    for unit, facts in zip(anatomy.units, list_facts(anatomy), strict=True):
        values = seen[unit.name]
        if facts.grid is not None:
            features = anatomy.grid(unit.output, values)
            assert (facts.channels, *facts.grid) == features.shape[1:]
            assert values[0].numel() - features[0].numel() == facts.prefix * facts.channels
        elif facts.channels is not None:
            assert facts.channels == values[0].numel()
    assert facts.kind == "head"
    assert facts.channels is not None


def test_heads_and_windows_are_those_of_the_maps(anatomy: Anatomy) -> None:
    maps = {}

    def note(seen):
        maps[seen.unit.name] = (seen.weights.shape[1], len(seen.positions()), seen.windows and seen.windows.size)

    with torch.no_grad(), record_attention([unit for unit in anatomy.units if unit.attention], note):
        anatomy.network(torch.randn(1, *anatomy.image))
    for facts in list_facts(anatomy):
        assert facts.attention == (facts.name in maps)
        if facts.attention:
            heads, windows, size = maps[facts.name]
            assert facts.heads == heads
            stated = f"{windows} windows" if size is None else f"{size[0]} x {size[1]} windows"
            assert facts.windows == (None if size is None and windows == 1 else stated)


def test_every_parameter_is_counted_once(anatomy: Anatomy) -> None:
    facts = list_facts(anatomy)
    total = sum(parameter.numel() for parameter in anatomy.network.parameters())
    assert sum(unit.parameters for unit in facts) + count_outside(anatomy) == total
    assert all(unit.parameters == 0 for unit in facts if unit.shared)


def test_heads_of_uniform_attention_count() -> None:
    network = treat(NETWORKS["timm vit_small_patch16_224"](), {"uniform_heads": {"variant": "append"}})
    anatomy, heads = Anatomy.of(network), []
    with torch.no_grad(), record_attention(anatomy.of_kind("msa"), lambda seen: heads.append(seen.weights.shape[1])):
        network(torch.randn(1, *anatomy.image))
    assert [facts.heads for facts in list_facts(anatomy) if facts.attention] == heads


def test_an_anatomy_is_printed_as_a_table() -> None:
    anatomy = Anatomy.of(FunctionalViT(), torch.rand(1, 3, 32, 32))
    assert repr(anatomy) == "Anatomy(FunctionalViT, 6 units)"
    assert (anatomy.observed, anatomy.image) == (True, (3, 32, 32))
    assert str(anatomy) == PRINTED


def test_columns_without_anything_are_left_out_and_the_family_is_named() -> None:
    anatomy = Anatomy.of(NETWORKS["timm resnet18d"]())
    head, titles, *rows = str(anatomy).splitlines()
    assert not anatomy.observed
    assert head.endswith("parameters (family timm ResNet)")
    assert titles.split() == ["unit", "kind", "stage", "grid", "channels", "parameters", "residual", "removed", "by"]
    assert len(rows) == len(anatomy.units) + bool(count_outside(anatomy))


def test_shared_parameters_are_said_to_be_so() -> None:
    rows = list_facts(Anatomy.of(SharedBlockViT(), torch.rand(1, 3, 32, 32)))
    assert [facts.shared for facts in rows] == [False] * 3 + [True] * 4 + [False]
    assert str(Anatomy.of(SharedBlockViT(), torch.rand(1, 3, 32, 32))).count("shared") == 4


def test_what_could_not_be_settled_is_below_the_table() -> None:
    anatomy = Anatomy.of(FlipAveraged(LinearPatchViT()), torch.rand(1, 3, 32, 32))
    (note,) = anatomy.notes
    last = str(anatomy).splitlines()[-1]
    assert last == f"{note[0].upper()}{note[1:]}"
    assert "runs 2 times" in last


def test_features_without_a_grid_have_none() -> None:
    facts = list_facts(Anatomy.of(NETWORKS["timm volo_d1_224"]()))
    alone = next(unit for unit in facts if unit.name == "post_network.0.msa")  # the class token alone
    assert (alone.grid, alone.prefix, alone.channels) == (None, 0, None)


def test_an_anatomy_made_by_hand_can_be_printed() -> None:
    assert str(Anatomy("nothing", nn.Identity(), (), {})).startswith("Identity: 0 units, 0 parameters")
