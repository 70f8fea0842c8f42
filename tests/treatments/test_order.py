"""Treatments one after another: what an earlier one put in is kept, or the later one says which order fits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.anatomy.handwritten import SIZE, LinearPatchViT
from tests.anatomy.networks import NETWORKS, shaken, tiny_vit
from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy
from vitclinic.treatments import ContextBroadcasting, SqueezeExcitation, treat, treatments_of

IMAGES = torch.zeros(2, 3, 32, 48)
MSA_END = [
    {"context_broadcasting": {"position": "msa_end"}},
    {"context_broadcasting": {"position": "both", "scaled": True}},
    {"squeeze_excitation": {"position": "both", "layers": "all"}},
]


def refused(network: Any, first: Any, second: Any, sentence: str) -> None:
    """`second` does not go after `first`: a sentence, and nothing is changed."""
    treat(network, first)
    before = str(network)
    with pytest.raises(TreatmentError, match=sentence):
        treat(network, second)
    assert str(network) == before


@pytest.mark.parametrize("part", MSA_END, ids=str)
def test_a_part_at_the_end_of_an_attention_is_not_thrown_away_with_it(part: dict[str, Any]) -> None:
    refused(tiny_vit(), part, "uniform_heads", r"blocks\.\d\.msa, which .* acts on; list uniform_heads first\.$")
    assert treat(tiny_vit(), "uniform_heads", part)(IMAGES).shape == (2, 5)


@pytest.mark.parametrize("name", ["local_attention", "no_softmax", "talking_heads"])
@pytest.mark.parametrize("part", MSA_END, ids=str)
def test_a_part_at_the_end_of_an_attention_and_an_edit_of_its_map_go_in_either_order(
    name: str, part: dict[str, Any]
) -> None:
    network = shaken(tiny_vit()).eval()
    images = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    one, other = (treat(copy.deepcopy(network), *order) for order in ((name, part), (part, name)))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(images), other(images))


def test_a_variant_of_attention_keeps_its_part_when_it_is_varied_again() -> None:
    network = treat(tiny_vit(), "local_attention", {"context_broadcasting": {"position": "msa_end"}}, "no_softmax")
    assert isinstance(network.blocks[1].attn.context_broadcasting, ContextBroadcasting)
    assert len(network.blocks[1].attn._forward_hooks) == 1


@pytest.mark.parametrize(
    ("network", "position"),
    [("vit, not square, registers", "mlp_mid"), ("torchvision vit", "mlp_mid"), ("torchvision vit", "mlp_front")],
)
@pytest.mark.parametrize("part", ["context_broadcasting", "squeeze_excitation"])
def test_a_part_inside_an_mlp_is_not_thrown_away_with_a_layer(network: str, position: str, part: str) -> None:
    placed = {part: {"position": position}}
    for variant in ("conv_gelu", "conv_bn_gelu"):
        rewritten = {"ffn_variant": {"variant": variant}}
        refused(NETWORKS[network](), placed, rewritten, r"mlp, which .* acts on; list ffn_variant first\.$")
        assert treat(NETWORKS[network](), rewritten, placed)
    assert treat(NETWORKS[network](), placed, {"ffn_variant": {"variant": "relu"}})


def test_a_part_at_the_end_of_an_mlp_is_no_layer_of_it() -> None:
    network = treat(tiny_vit(), "squeeze_excitation", "ffn_variant")
    assert isinstance(network.blocks[1].mlp.squeeze_excitation, SqueezeExcitation)
    assert network(IMAGES).shape == (2, 5)
    network = treat(tiny_vit(), "squeeze_excitation", {"context_broadcasting": {"position": "mlp_mid"}})
    assert isinstance(network.blocks[1].mlp.fc2.context_broadcasting, ContextBroadcasting)


def test_the_grid_that_local_attention_watches_is_not_replaced() -> None:
    sentence = r"conv_stem would replace the stem's convolution, which .* acts on; list conv_stem first\.$"
    refused(tiny_vit(dynamic_img_size=True), "local_attention", "conv_stem", sentence)
    network = treat(tiny_vit(dynamic_img_size=True), "conv_stem", "local_attention").eval()
    for size in ((32, 48), (48, 16)):
        assert network(torch.zeros(2, 3, *size)).shape == (2, 5)


@pytest.mark.parametrize("part", MSA_END, ids=str)
def test_an_extra_attention_is_no_copy_of_one_with_a_part(part: dict[str, Any]) -> None:
    refused(tiny_vit(), part, "extra_block", r"extra_block would copy blocks\.1\.msa.* list extra_block first\.$")
    assert treat(tiny_vit(), part, {"extra_block": {"kind": "mlp"}})(IMAGES).shape == (2, 5)


@pytest.mark.parametrize("part", ["context_broadcasting", "squeeze_excitation"])
@pytest.mark.parametrize(
    ("kind", "position", "layers", "placed"),
    [
        ("msa", "mlp_end", "upper", ["blocks.1.mlp"]),
        ("msa", "mlp_end", "all", ["blocks.0.mlp", "blocks.1.mlp"]),
        ("msa", "both", "upper", ["blocks.1.attn", "blocks.1.mlp", "blocks.2.attn"]),
        ("mlp", "msa_end", "upper", ["blocks.1.attn"]),
        ("mlp", "mlp_end", [2], ["blocks.2.mlp"]),
    ],
)
def test_blocks_without_the_place_are_passed_over(
    part: str, kind: str, position: str, layers: Any, placed: list[str]
) -> None:
    network = treat(tiny_vit(), {"extra_block": {"kind": kind}}, {part: {"position": position, "layers": layers}})
    found = [name.removesuffix(f".{part}") for name, _ in network.named_modules() if name.endswith(part)]
    assert found == placed
    assert network(IMAGES).shape == (2, 5)


def test_a_block_without_the_place_is_a_sentence_if_it_is_listed_and_left_out_otherwise() -> None:
    listed = {"context_broadcasting": {"layers": [0, 2]}}
    refused(tiny_vit(), "extra_block", listed, r"blocks\.2 has no MLP on its channels; leave it out of 'layers'\.$")
    treated = treat(tiny_vit(depth=1), "extra_block", "context_broadcasting")
    assert hasattr(treated.blocks[0].mlp, "context_broadcasting")


def test_what_was_applied_before_a_treatment_that_does_not_fit_is_said() -> None:
    network = treat(tiny_vit(), "gap_head")
    with pytest.raises(
        TreatmentError, match=r"leave out one of the two; applied to the network before it: conv_stem, talking_heads\.$"
    ):
        treat(network, "conv_stem", "talking_heads", "no_softmax")
    assert treatments_of(network) == ("gap_head", "conv_stem", "talking_heads")
    with pytest.raises(TreatmentError, match=r"once is enough\.$"):
        treat(network, "conv_stem")


@pytest.mark.parametrize("part", ["context_broadcasting", "squeeze_excitation", "gap_head", MSA_END[1]], ids=str)
def test_sums_of_a_part_do_not_move_those_that_another_treatment_acts_on(part: Any) -> None:
    """Registers are put in at the sum with the position embedding, which is found by its number in the pass."""
    network, images = LinearPatchViT().eval(), torch.rand(2, 3, SIZE, SIZE)
    treat(network, "registers", part)
    with torch.no_grad():
        answers = network(images)
        torch.testing.assert_close(torch.compile(network, backend="aot_eager")(images), answers)
    anatomy = Anatomy.of(network)
    assert anatomy.unit("head").input.layout.prefix == 5
    for unit in anatomy.of_kind("msa", "mlp"):
        assert unit.removal is not None
        with torch.no_grad(), anatomy.remove(unit):
            assert not torch.allclose(network(images), answers)
