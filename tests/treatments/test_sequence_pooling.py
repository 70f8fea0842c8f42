"""Sequence pooling: written out token by token, gap_head where it starts, and what a classifier read before."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.anatomy.networks import NETWORKS, shaken, tiny_vit
from tests.anatomy.zoo import ZOO
from tests.treatments.attentions import images, vit
from vitclinic import functional as F
from vitclinic._core.errors import TreatmentError
from vitclinic.data import ImageSpec
from vitclinic.treatments import SequencePool, image_spec, treat

ENTRY = "sequence_pooling"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def written_out(x_bnd: Tensor, g: Tensor) -> Tensor:
    """z = sum_i exp(x_i . g) x_i / sum_i exp(x_i . g), image by image and token by token."""
    rows = []
    for tokens in x_bnd.tolist():
        powers = [math.exp(sum(a * b for a, b in zip(token, g.tolist(), strict=True))) for token in tokens]
        channels = zip(*tokens, strict=True)
        rows.append([sum(p * x for p, x in zip(powers, channel, strict=True)) / sum(powers) for channel in channels])
    return torch.tensor(rows, dtype=x_bnd.dtype)


def pool_of(network: nn.Module) -> SequencePool:
    (found,) = [module for module in network.modules() if isinstance(module, SequencePool)]
    return found


def learned(network: nn.Module) -> Tensor:
    """Give g ordinary values, and return it."""
    pool = pool_of(network)
    with torch.no_grad():
        pool.weight.copy_(normal(len(pool.weight), seed=3))
    return pool.weight.detach()


def logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def build(name: str) -> tuple[nn.Module, Tensor, ImageSpec]:
    torch.manual_seed(0)
    network = shaken(NETWORKS[name]() if name in NETWORKS else ZOO[name].build()).double().eval()
    spec = ImageSpec(10, ZOO[name].image[0], ZOO[name].image[1:]) if name in ZOO else image_spec(network)
    return network, normal(2, spec.in_chans, *spec.img_size, seed=1), spec


# The formula


def test_the_function_and_the_module_are_the_formula() -> None:
    x, g = normal(3, 7, 5), normal(5, seed=1)
    torch.testing.assert_close(F.sequence_pool(x, g), written_out(x, g), rtol=1e-12, atol=1e-12)
    pool = SequencePool(5).double()
    pool.weight.data = g
    torch.testing.assert_close(pool(x), written_out(x, g), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pool.weigh(x).mean(1), written_out(x, g), rtol=1e-12, atol=1e-12)
    grid = x[:, :6].reshape(3, 2, 3, 5)
    torch.testing.assert_close(pool.weigh(grid).mean((1, 2)), written_out(x[:, :6], g), rtol=1e-12, atol=1e-12)


def test_zero_is_the_mean_and_a_large_weight_the_largest_token() -> None:
    x = normal(2, 6, 3)
    torch.testing.assert_close(F.sequence_pool(x, torch.zeros(3).double()), x.mean(1))
    top = F.sequence_pool(x, torch.tensor([1e6, 0, 0], dtype=torch.float64))
    torch.testing.assert_close(top, x[torch.arange(2), x[..., 0].argmax(1)])


def test_wrong_shapes_are_a_sentence() -> None:
    with pytest.raises(ValueError, match="one per channel"):
        F.sequence_pool(torch.zeros(1, 2, 3), torch.zeros(2))


# Beside gap_head

OPTIONS = [
    {},
    {"no_embed_class": True},
    {"reg_tokens": 2},
    {"class_token": False, "global_pool": "avg"},
    {"class_token": False, "global_pool": "avg", "fc_norm": False},
    {"global_pool": "max"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_starts_as_gap_head_in_timm(options: dict[str, Any]) -> None:
    network = vit(**options)
    x, gap = images(network), treat(copy.deepcopy(network), "gap_head")
    treated = treat(network, ENTRY)
    torch.testing.assert_close(treated(x), gap(x), rtol=0, atol=1e-6)
    shapes = {name: p.shape for name, p in treated.named_parameters()}
    assert shapes == {name: p.shape for name, p in gap.named_parameters()} | {"attn_pool.weight": (24,)}


CLASS_TOKENS = [
    *("torchvision vit", "huggingface vit", "huggingface deit", "timm pit_ti_224", "timm volo_d1_224"),
    *("hand-written/linear_patch_vit", "hand-written/sequence_first_vit", "timm/xcit_nano_12_p16_224"),
]


@pytest.mark.parametrize("name", [name for name in CLASS_TOKENS if name in NETWORKS or name in ZOO])
def test_it_starts_as_gap_head_wherever_a_class_token_is_read(name: str) -> None:
    network, x, spec = build(name)
    gap = treat(copy.deepcopy(network), "gap_head", spec=spec)
    before = set(network.state_dict())
    treated = treat(network, ENTRY, spec=spec)
    with torch.no_grad():
        expected = logits(gap(x))
        torch.testing.assert_close(logits(treated(x)), expected, rtol=0, atol=1e-6 * expected.abs().max().item())
        learned(treated)
        assert (logits(treated(x)) - expected).abs().max() > 1e-6
    assert set(treated.state_dict()) - before == {"sequence_pooling.weight"}


MEANS = [
    *("swin, not square, padded", "timm mixer_l32_224", "torchvision swin, padded", "huggingface swin"),
    *("timm/beit_base_patch16_224", "hand-written/encoder_vit"),
]


@pytest.mark.parametrize("name", [name for name in MEANS if name in NETWORKS or name in ZOO])
def test_it_starts_as_the_network_where_a_mean_is_read(name: str) -> None:
    network, x, spec = build(name)
    with torch.no_grad():
        expected = logits(network(x))
        treated = treat(network, ENTRY, spec=spec)
        torch.testing.assert_close(logits(treated(x)), expected, rtol=0, atol=1e-6 * expected.abs().max().item())
        learned(treated)
        assert (logits(treated(x)) - expected).abs().max() > 1e-6


def test_the_zoo_has_the_networks_named_here() -> None:
    assert sum(name in NETWORKS or name in ZOO for name in (*CLASS_TOKENS, *MEANS)) >= 10


# With learned weights


@pytest.mark.parametrize("options", [{}, {"reg_tokens": 2}], ids=str)
def test_a_vit_s_classifier_reads_the_norm_of_the_weighted_patches(options: dict[str, Any]) -> None:
    treated = treat(vit(**options), ENTRY)
    x, g = images(treated), learned(treated)
    states = treated.forward_features(x)[:, treated.num_prefix_tokens :]
    expected = treated.head(treated.fc_norm(written_out(states, g)))
    torch.testing.assert_close(treated(x), expected, rtol=1e-9, atol=1e-9)


def test_a_swin_s_classifier_reads_the_weighted_patches_behind_its_norm() -> None:
    network, x, spec = build("swin, not square, padded")
    normed: list[Tensor] = []
    network.norm.register_forward_hook(lambda _, __, output: normed.append(output.detach().flatten(1, 2)))
    treat(network, ENTRY, spec=spec)
    g = learned(network)
    normed.clear()
    output = network(x)
    expected = network.head.fc(written_out(normed[-1], g))
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)


def test_a_class_token_among_other_libraries_is_replaced_before_the_norm() -> None:
    network, x, spec = build("torchvision vit")
    states: list[Tensor] = []
    network.encoder.ln.register_forward_pre_hook(lambda _, args: states.append(args[0].detach()))
    treat(network, ENTRY, spec=spec)
    g = learned(network)
    states.clear()
    output = network(x)
    expected = network.heads(network.encoder.ln.forward(written_out(states[-1][:, 1:], g)))
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)


def test_weights_learn_from_the_start() -> None:
    treated = treat(vit(), ENTRY).train()
    treated(images(treated)).square().sum().backward()
    assert treated.attn_pool.weight.grad.abs().min() > 0


def test_dropped_patches_are_not_pooled() -> None:
    treated = treat(vit(patch_drop_rate=0.5), ENTRY).train()
    seen: list[Tensor] = []
    treated.attn_pool.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    treated(images(treated))
    assert seen[0].shape[1] == 12


def test_a_copy_has_weights_of_its_own() -> None:
    network, x, spec = build("torchvision vit")
    treat(network, ENTRY, spec=spec)
    copied = copy.deepcopy(network)
    learned(copied)
    with torch.no_grad():
        assert not torch.equal(copied(x), network(x))
    assert not pool_of(network).weight.any()


def test_half_precision_and_the_mode_are_kept() -> None:
    network = treat(tiny_vit().to(torch.bfloat16).eval(), ENTRY)
    assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}
    assert network(torch.zeros(1, 3, 32, 48, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert not network.attn_pool.training
    swin = NETWORKS["swin, not square, padded"]().to(torch.bfloat16).eval()
    assert treat(swin, ENTRY)(torch.zeros(1, 3, 72, 104, dtype=torch.bfloat16)).dtype == torch.bfloat16


# In company, and errors


def test_it_goes_with_registers_and_local_attention_behind_it() -> None:
    treated = treat(vit(), ENTRY, "registers", "local_attention", "context_broadcasting")
    assert treated(images(treated)).shape == (2, 5)
    with pytest.raises(TreatmentError, match="List sequence_pooling before local_attention"):
        treat(vit(), "local_attention", ENTRY)


def test_one_more_head_widens_it() -> None:
    treated = treat(vit(), ENTRY, {"uniform_heads": {"variant": "append"}})
    assert len(treated.attn_pool.weight) == 36
    assert treated(images(treated)).shape == (2, 5)


@pytest.mark.parametrize("order", [("gap_head", ENTRY), (ENTRY, "gap_head")])
@pytest.mark.parametrize("network", [vit, NETWORKS["torchvision vit"]], ids=["timm", "torchvision"])
def test_two_poolings_are_a_sentence(order: tuple[str, str], network: Any) -> None:
    sentence = rf"^gap_head and sequence_pooling both .* has {order[0]}: leave out one of the two; applied to .*\.$"
    with pytest.raises(TreatmentError, match=sentence):
        treat(network(), *order)


@pytest.mark.parametrize("pool", ["map", ""])
def test_a_timm_head_without_a_pooling_to_replace_is_a_sentence(pool: str) -> None:
    with pytest.raises(TreatmentError, match=rf"^sequence_pooling replaces .*; this head is '{pool}'\.$"):
        treat(vit(global_pool=pool, class_token=False), ENTRY)


class Pooled(nn.Module):
    """A network of one's own whose classifier, which starts at zero, reads the mean, the maximum or something near."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.backbone = timm.models.VisionTransformer(
            img_size=16,
            patch_size=4,
            embed_dim=24,
            depth=2,
            num_heads=2,
            class_token=False,
            global_pool="",
            num_classes=0,
        )
        self.query, self.head = nn.Parameter(torch.full((24,), 0.01)), nn.Linear(24, 3)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.backbone(x)
        if self.how == "maximum":
            return self.head(tokens.amax(1))
        if self.how == "attention":
            return self.head((tokens @ self.query).softmax(1).unsqueeze(1).matmul(tokens).squeeze(1))
        return self.head(tokens.mean(1))


@pytest.mark.parametrize("how", ["mean", "maximum", "attention"])
def test_only_a_mean_is_taken_for_a_mean_also_where_the_classifier_starts_at_zero(how: str) -> None:
    torch.manual_seed(0)
    network, spec = Pooled(how), ImageSpec(3, 3, (16, 16))
    if how == "mean":
        assert pool_of(treat(network, ENTRY, spec=spec)).weight.shape == (24,)
        return
    before = set(network.state_dict())
    with pytest.raises(TreatmentError, match=r"^sequence_pooling does not fit Pooled: it needs a classifier that"):
        treat(network, ENTRY, spec=spec)
    assert set(network.state_dict()) == before
