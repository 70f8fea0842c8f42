"""The GAP head: timm's own network without a class token, with the weights copied."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn

from tests.anatomy.handwritten import LinearPatchViT, split_patches
from tests.anatomy.networks import shaken, tiny_vit
from tests.treatments.attentions import images, vit
from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy
from vitclinic.treatments import treat


def timm_s_own(network: nn.Module, **keywords: Any) -> nn.Module:
    """timm's network without class token, pooled by mean, holding the weights that a ViT with one has for it."""
    own = tiny_vit(img_size=(16, 24), patch_size=4, class_token=False, global_pool="avg", **keywords).double().eval()
    weights = {name: value for name, value in network.state_dict().items() if name in own.state_dict()}
    if own.pos_embed is not None:
        weights["pos_embed"] = network.pos_embed[:, -own.pos_embed.shape[1] :]
    weights |= {f"fc_norm.{end}": network.state_dict()[f"norm.{end}"] for end in ("weight", "bias")}
    own.load_state_dict(weights)
    return own


OPTIONS = [{}, {"no_embed_class": True}, {"pos_embed": "none"}, {"reg_tokens": 2}, {"dynamic_img_size": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_timm_s_own_network_with_the_weights_copied(options: dict[str, Any]) -> None:
    network = vit(**options)
    x, own = images(network), timm_s_own(network, **options)
    treated = treat(network, "gap_head")
    assert torch.equal(treated(x), own(x))
    assert {n: p.shape for n, p in treated.named_parameters()} == {n: p.shape for n, p in own.named_parameters()}
    assert [unit.name for unit in Anatomy.of(treated).units] == [unit.name for unit in Anatomy.of(own).units]


@pytest.mark.parametrize("no_embed_class", [False, True])
def test_a_distilled_deit_loses_both_tokens_and_its_second_head(no_embed_class: bool) -> None:
    torch.manual_seed(0)
    sizes = {"img_size": (16, 24), "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
    network = timm.models.deit.VisionTransformerDistilled(**sizes)
    if no_embed_class:
        network.no_embed_class = True
        network.pos_embed = nn.Parameter(network.pos_embed[:, 2:].detach())
    network = shaken(network).double().eval()
    x, own = images(network), timm_s_own(network)
    treated = treat(network, "gap_head")
    assert torch.equal(treated(x), own(x))
    assert set(treated.state_dict()) == set(own.state_dict())
    treated.train()(x).sum().backward()
    assert all(parameter.grad is not None for parameter in treated.parameters())


def test_the_parameters_that_go_are_the_token_and_its_position() -> None:
    before, after = vit(), treat(vit(), "gap_head")
    assert sum(p.numel() for p in before.parameters()) - sum(p.numel() for p in after.parameters()) == 2 * 24


def test_a_pooled_network_with_a_class_token_loses_the_token() -> None:
    network = vit(global_pool="avg", pool_include_prefix=True)
    norm = network.fc_norm
    treated = treat(network, "gap_head")
    assert treated.cls_token is None
    assert treated.fc_norm is norm
    assert treated.num_prefix_tokens == 0


@pytest.mark.parametrize("pool", ["max", "avgmax"])
def test_the_maximum_becomes_the_mean(pool: str) -> None:
    network = vit(class_token=False, global_pool=pool)
    x = images(network)
    expected = network.head(network.fc_norm(network.forward_features(x).mean(1)))
    torch.testing.assert_close(treat(network, "gap_head")(x), expected)


def test_dropped_patches_are_still_patches() -> None:
    treated = treat(vit(patch_drop_rate=0.5), "gap_head").train()
    seen: list[torch.Tensor] = []
    treated.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    treated(images(treated))
    assert seen[0].shape[1] == 12


def test_a_resized_network_and_local_attention_follow() -> None:
    treated = treat(vit(), "gap_head", "local_attention")
    treated.set_input_size((32, 24))
    assert treated(torch.randn(1, 3, 32, 24, dtype=torch.float64)).shape == (1, 5)
    assert treated.blocks[0].attn.neighbourhood.size == (8, 6)
    with pytest.raises(TreatmentError, match="List gap_head before local_attention"):
        treat(vit(), "local_attention", "gap_head")


@pytest.mark.parametrize("pool", ["map", ""])
def test_a_head_without_a_pooling_to_replace_is_a_sentence(pool: str) -> None:
    network = vit(global_pool=pool, class_token=False)
    with pytest.raises(TreatmentError, match=rf"this head is '{pool}'"):
        treat(network, "gap_head")


def test_a_class_token_behind_the_patches_is_a_sentence() -> None:
    class ClassTokenLast(LinearPatchViT):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            x = self.to_patch_embedding(split_patches(images))
            x = torch.cat((x, self.cls_token.expand(len(x), -1, -1)), dim=1) + self.pos_embedding
            scores: torch.Tensor = self.mlp_head(self.transformer(x)[:, -1])
            return scores

    with pytest.raises(TreatmentError, match="its class token is not the first of its tokens"):
        treat(ClassTokenLast(), "gap_head")
