"""Squeeze-and-Excitation against its formula, and at the same places as Context Broadcasting."""

from __future__ import annotations

import pytest
import timm
import torch

from tests.anatomy.networks import shaken, tiny_vit
from vitclinic._core.errors import RecipeError
from vitclinic.anatomy import Anatomy, taps
from vitclinic.treatments import ContextBroadcasting, SqueezeExcitation, treat


@pytest.mark.parametrize("shape", [(2, 5, 32), (2, 3, 4, 32)])
def test_channels_are_gated_by_the_mean_of_all_tokens(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    part = shaken(SqueezeExcitation(32, reduction=8)).double()
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        for image, gated in zip(x, part(x), strict=True):
            tokens = image.reshape(-1, 32)
            hidden = (part.squeeze.weight @ (sum(tokens) / len(tokens))).clamp(min=0)
            gate = 1 / (1 + torch.exp(-(part.excite.weight @ hidden)))
            torch.testing.assert_close(gated.reshape(-1, 32), torch.stack([token * gate for token in tokens]))


def test_the_mlp_branch_is_gated() -> None:
    network = shaken(tiny_vit()).double().eval()
    x = torch.randn(2, 3, 32, 48, dtype=torch.float64)
    last = Anatomy.of(network).unit("blocks.1.mlp")
    with torch.no_grad(), taps({"branch": last.branch, "msa": last.input}) as before:
        network(x)
    treat(network, {"squeeze_excitation": {"reduction": 4}})
    part = shaken(network.blocks[1].mlp.squeeze_excitation)
    last = Anatomy.of(network).unit("blocks.1.mlp")
    with torch.no_grad(), taps({"branch": last.branch, "msa": last.input}) as after:
        network(x)
        torch.testing.assert_close(after["msa"], before["msa"])
        torch.testing.assert_close(after["branch"], part(before["branch"]))
    assert not torch.allclose(after["branch"], before["branch"])


@pytest.mark.parametrize(
    ("options", "added"),
    [
        ({}, 2 * 2 * 384 * 24),
        ({"layers": "all", "reduction": 4}, 4 * 2 * 384 * 96),
        ({"layers": [3], "position": "mlp_mid"}, 2 * 1536 * 96),
        ({"layers": [3], "position": "both"}, 2 * 2 * 384 * 24),
    ],
)
def test_parameters_at_the_width_of_deit_small(options: dict[str, object], added: int) -> None:
    """2 D^2 / r for each place."""
    network = timm.create_model("deit_small_patch16_224", img_size=32, depth=4)
    before = sum(p.numel() for p in network.parameters())
    treat(network, {"squeeze_excitation": options})
    assert sum(p.numel() for p in network.parameters()) - before == added


def test_it_sits_where_context_broadcasting_sits_and_beside_it() -> None:
    network = treat(tiny_vit(depth=4), "context_broadcasting", "squeeze_excitation")
    places = {
        kind: [name.rpartition(".")[0] for name, module in network.named_modules() if isinstance(module, kind)]
        for kind in (ContextBroadcasting, SqueezeExcitation)
    }
    assert places[ContextBroadcasting] == places[SqueezeExcitation] == ["blocks.2.mlp", "blocks.3.mlp"]


def test_a_gate_is_never_without_a_hidden_layer() -> None:
    assert SqueezeExcitation(8, reduction=16).squeeze.out_features == 1


def test_a_reduction_below_one_is_a_mistake() -> None:
    with pytest.raises(RecipeError, match="reduction"):
        treat(tiny_vit(), {"squeeze_excitation": {"reduction": 0}})
