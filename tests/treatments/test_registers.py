"""Registers: against timm's own, against blocks called by hand, and in company; probes see patches where they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor

from tests.anatomy.handwritten import EncoderViT, LinearPatchViT
from tests.anatomy.networks import NETWORKS, shaken
from tests.probes.subjects import CLASSES, SIZE, subject, vit
from vitclinic import functional as F
from vitclinic._core.errors import AnatomyError, TreatmentError
from vitclinic.anatomy import Anatomy, record_attention
from vitclinic.models import Normalized
from vitclinic.probes import measure, parse_probes
from vitclinic.training.optimizer import weight_decay_parameters
from vitclinic.treatments import RegistersTreatment, image_spec, treat

IMAGES = torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
LARGER = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def built(**keywords: Any) -> Any:
    torch.manual_seed(0)
    return shaken(vit(**keywords)).eval()


def pair() -> tuple[Any, Any]:
    """A ViT with four registers of timm's own, and one treated with the same; classes have no position."""
    native, treated = built(reg_tokens=4, no_embed_class=True), treat(built(no_embed_class=True), "registers")
    weights = native.state_dict()
    weights["registers.reg_token"] = weights.pop("reg_token")[0]
    treated.load_state_dict(weights)
    return native, treated


def passed_by_hand(x_bnd: Tensor, registers_rd: Tensor, prefix: int, blocks: Any) -> Tensor:
    """Tokens through the blocks of an untreated network, with registers put in and taken out here."""
    registers = [registers_rd for _ in x_bnd]
    x = torch.stack([torch.cat([one[:prefix], r, one[prefix:]]) for one, r in zip(x_bnd, registers, strict=True)])
    for block in blocks:
        x = block(x)
    kept = [place for place in range(x.shape[1]) if not prefix <= place < prefix + len(registers_rd)]
    return x[:, kept]


def test_they_are_timm_s_own() -> None:
    native, treated = pair()
    torch.testing.assert_close(treated(IMAGES), native(IMAGES))
    torch.testing.assert_close(treated.forward_features(IMAGES)[:, 0], native.forward_features(IMAGES)[:, 0])


PROBES = ["attention_entropy", "attention_distance", "token_norms", "token_similarity", "fourier", "variance", "cka"]


@pytest.mark.parametrize("probe", PROBES)
def test_probes_see_what_they_see_of_timm_s_own(probe: str) -> None:
    native, treated = (measure(subject(network, count=8), parse_probes([probe]))[0] for network in pair())
    assert treated.status == native.status == "ok", treated.reason
    assert [row.name for row in treated.units] == [row.name for row in native.units]
    for ours, theirs in zip(treated.units, native.units, strict=True):
        if ours.kind == "position":  # timm's registers are there already
            continue
        assert ours.values.keys() == theirs.values.keys()
        for name, scalar in ours.values.items():
            assert scalar.value == pytest.approx(theirs.values[name].value, rel=1e-4, abs=1e-6), (ours.name, name)


def test_attention_maps_have_registers_before_the_patches_and_the_class_token_first() -> None:
    network = treat(built(), {"registers": {"count": 3}})
    anatomy = Anatomy.of(network)
    seen: list[Any] = []
    with record_attention(anatomy.of_kind("msa"), seen.append), torch.no_grad():
        network(IMAGES)
    assert [tuple(one.weights.shape) for one in seen] == [(3, 2, 20, 20)] * 3
    assert {(one.prefix, one.grid, one.has_class) for one in seen} == {(4, (4, 4), True)}
    assert anatomy.unit("position").output.layout.prefix == 1
    assert {unit.output.layout.prefix for unit in anatomy.of_kind("msa", "mlp")} == {4}


@pytest.mark.parametrize("pool", ["token", "avg", "map"])
def test_they_pass_the_blocks_and_are_dropped_behind_them(pool: str) -> None:
    plain = built(global_pool=pool, class_token=pool == "token")
    treated = treat(copy.deepcopy(plain), {"registers": {"count": 2}})
    x = plain.norm_pre(plain._pos_embed(plain.patch_embed(IMAGES)))
    x = passed_by_hand(x, treated.registers.reg_token, plain.num_prefix_tokens, plain.blocks)
    torch.testing.assert_close(treated(IMAGES), plain.forward_head(plain.norm(x)))
    with torch.no_grad():
        treated.registers.reg_token.copy_(torch.randn(2, 24))
        assert (treated(IMAGES) - plain.forward_head(plain.norm(x))).abs().max() > 1e-4


def test_they_pass_the_blocks_of_torchvision_s_vit() -> None:
    torch.manual_seed(0)
    plain = shaken(torchvision.models.VisionTransformer(SIZE, 4, 2, 2, 16, 32, num_classes=CLASSES)).eval()
    treated = treat(copy.deepcopy(plain), "registers")
    x = torch.cat([plain.class_token.expand(3, -1, -1), plain._process_input(IMAGES)], dim=1)
    x = passed_by_hand(x + plain.encoder.pos_embedding, treated.registers.reg_token, 1, plain.encoder.layers)
    torch.testing.assert_close(treated(IMAGES), plain.heads(plain.encoder.ln(x)[:, 0]))


def test_weights_keep_their_names_and_registers_are_not_decayed() -> None:
    plain = built()
    treated = treat(copy.deepcopy(plain), "registers")
    assert set(treated.state_dict()) == {*plain.state_dict(), "registers.reg_token"}
    decayed = {id(p) for p in weight_decay_parameters(Normalized(treated, [0.5] * 3, [0.25] * 3))}
    assert id(treated.registers.reg_token) not in decayed
    assert id(treated.head.weight) in decayed


def test_checkpointed_blocks_see_them_as_well() -> None:
    network = treat(built(), "registers")
    expected = network(IMAGES)
    network.set_grad_checkpointing(True)
    network.train()
    torch.testing.assert_close(network(IMAGES), expected)


def test_images_of_another_size() -> None:
    network = treat(built(dynamic_img_size=True), "registers")
    larger = torch.randn(2, 3, 24, 16, generator=torch.Generator().manual_seed(1))
    anatomy = Anatomy.of(network, example=larger)
    assert anatomy.size(anatomy.unit("blocks.0.msa").input.layout) == (6, 4)
    assert network(larger).shape == (2, CLASSES)


@pytest.mark.parametrize("others", [["gap_head"], ["gap_head", "extra_block"], ["conv_stem", "context_broadcasting"]])
def test_after_other_treatments(others: list[str]) -> None:
    network = treat(built(), *others, "registers")
    assert Anatomy.of(network).unit("blocks.0.msa").input.layout.prefix == network.num_prefix_tokens + 4
    assert network(IMAGES).isfinite().all()


@pytest.mark.parametrize("other", ["extra_block", "talking_heads", {"local_attention": {"kernel": 3}}])
def test_before_other_treatments(other: Any) -> None:
    network = treat(built(), "registers", other)
    anatomy = Anatomy.of(network)
    assert {unit.input.layout.prefix for unit in anatomy.of_kind("msa")} == {5}
    seen: list[Any] = []
    with record_attention(anatomy.of_kind("msa"), seen.append), torch.no_grad():
        network(IMAGES)
    if isinstance(other, dict):  # registers see everything, patches their neighbours and the registers
        visible = seen[0].visible()[0]
        assert visible[:5].all()
        assert visible[:, :5].all()
        assert visible[5:, 5:].sum() == F.neighborhood_mask((4, 4), 3).sum()


def test_local_attention_first_is_refused_and_leaves_the_network_as_it_was() -> None:
    network = treat(built(), "local_attention")
    expected, before = network(IMAGES), str(network)
    with pytest.raises(TreatmentError, match="list registers first"):
        treat(network, "registers")
    assert str(network) == before
    assert torch.equal(network(IMAGES), expected)


def test_a_head_that_is_replaced_later_is_an_error_that_says_so() -> None:
    network = treat(built(), "registers", "gap_head")
    with pytest.raises(TreatmentError, match="list registers after it"):
        network(IMAGES)
    with pytest.raises(AnatomyError, match="list registers after it"):
        Anatomy.of(network)


@pytest.mark.parametrize("name", ["timm mixer", "timm pit", "timm swin", "timm resnet", "timm volo"])
def test_networks_without_one_sequence_of_tokens_are_refused(name: str) -> None:
    network = NETWORKS[next(each for each in NETWORKS if each.startswith(name))]()
    before = str(network)
    with pytest.raises(
        TreatmentError, match=f"^registers does not fit {type(network).__name__}: it needs one sequence"
    ):
        RegistersTreatment().operate(network, image_spec(network))
    assert str(network) == before


def test_without_a_module_behind_the_blocks_they_are_dropped_where_the_last_block_ends() -> None:
    network = built()

    def forward_features(x: Tensor, **_: Any) -> Tensor:
        x = network.norm_pre(network._pos_embed(network.patch_embed(x)))
        for block in network.blocks:
            x = block(x)
        return x * 1.0

    network.forward_features = forward_features
    x = network.norm_pre(network._pos_embed(network.patch_embed(IMAGES)))
    blocks = copy.deepcopy(network.blocks)
    treated = treat(network, "registers")
    expected = passed_by_hand(x, treated.registers.reg_token, 1, blocks)
    torch.testing.assert_close(treated(IMAGES), network.forward_head(expected))


def test_tokens_on_the_first_axis_have_them_as_those_on_the_second() -> None:
    """Of one network in both orders of axes; registers along the images would leave the outputs as they are."""
    outputs = []
    for batch_first in (True, False):
        torch.manual_seed(0)
        network = shaken(EncoderViT(batch_first=batch_first)).eval()
        treated = treat(network, "registers")
        with torch.no_grad():
            treated.registers.reg_token.copy_(torch.linspace(-1, 1, 4)[:, None].expand(-1, 48))
            outputs.append(treated(torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))))
    torch.testing.assert_close(outputs[1], outputs[0])


def test_putting_in_and_taking_out_are_inverse() -> None:
    x, registers = torch.randn(2, 5, 3), torch.randn(4, 3)
    for prefix in range(6):
        y = F.insert_registers(x, registers, prefix)
        assert torch.equal(y[:, prefix : prefix + 4], registers.expand(2, -1, -1))
        assert torch.equal(F.remove_registers(y, 4, prefix), x)
    with pytest.raises(ValueError, match="registers must be"):
        F.insert_registers(x, torch.randn(4, 2))
    with pytest.raises(ValueError, match="fewer than"):
        F.remove_registers(x, 5)


def test_each_of_them_learns() -> None:
    network = treat(timm.models.VisionTransformer(img_size=SIZE, patch_size=4, embed_dim=24, depth=2), "registers")
    network(IMAGES).square().sum().backward()
    assert network.registers.reg_token.grad.abs().sum(1).min() > 0


def test_a_network_that_runs_itself_twice_is_refused_and_left_as_it_was() -> None:
    class Twice(LinearPatchViT):
        def forward(self, images: Tensor) -> Tensor:
            both: Tensor = super().forward(images) + super().forward(images.flip(-1))
            return both / 2

    network = Twice().eval()
    before = network(LARGER)
    with pytest.raises(TreatmentError, match="it runs its blocks more than once for each image"):
        treat(network, "registers")
    assert torch.equal(network(LARGER), before)


def test_a_network_that_returns_its_loss_first_is_read_by_its_scores() -> None:
    class WithLoss(LinearPatchViT):
        def forward(self, images: Tensor) -> Any:
            scores = super().forward(images)
            return scores.new_zeros(()), scores

    assert image_spec(WithLoss()).num_classes == LinearPatchViT()(LARGER).shape[-1]
