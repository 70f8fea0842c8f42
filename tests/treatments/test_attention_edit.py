"""The edit of attention maps: the same in every implementation, and out of the way of all else that runs a network."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from tests.anatomy.networks import NETWORKS, shaken
from tests.treatments.attentions import allowed_pairs
from tests.treatments.handwritten import (
    EncoderViT,
    OwnViT,
    SequenceFirstViT,
    families_of_handwritten_networks,
)
from vitclinic.anatomy import Anatomy, AttentionMap, double_differentiable, record_attention
from vitclinic.anatomy.families import recognise
from vitclinic.data import ImageSpec
from vitclinic.treatments import treat
from vitclinic.treatments.attention_edit import edit_attention
from vitclinic.treatments.parts import find_attentions
from vitclinic.treatments.talking_heads import TalkingHeads

OWN = {"own": OwnViT, "encoder layers": EncoderViT, "tokens first": SequenceFirstViT}
GLOBAL = [
    *("vit, not square, registers", "torchvision vit", *OWN),
    *(name for name in ("huggingface vit", "huggingface vit, eager attention") if name in NETWORKS),
]
WINDOWED = [
    *("swin, not square, padded", "torchvision swin, padded"),
    *(name for name in NETWORKS if name.startswith("timm swinv2")),
    *(name for name in ("huggingface swin",) if name in NETWORKS),
]


@pytest.fixture(autouse=True)
def handwritten() -> Iterator[None]:
    with families_of_handwritten_networks():
        yield


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return shaken((NETWORKS | OWN)[name]()).double().eval()


def images(network: nn.Module, batch: int = 2) -> Tensor:
    core, family = recognise(network)
    shape = (batch, *family.input_size(core))
    return torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def logits(network: nn.Module, x: Tensor) -> Tensor:
    output = network(x)
    return output if isinstance(output, Tensor) else output.logits


def recorded(network: nn.Module, x: Tensor) -> list[AttentionMap]:
    maps: list[AttentionMap] = []
    with torch.no_grad(), record_attention(Anatomy.of(network).of_kind("msa"), maps.append):
        network(x)
    return maps


@pytest.mark.parametrize("name", GLOBAL)
def test_a_recorded_map_is_the_untreated_one_over_the_neighbours_alone(name: str) -> None:
    network = build(name)
    x = images(network)
    before = recorded(network, x)[0]
    after = recorded(treat(network, "local_attention"), x)[0]
    near = allowed_pairs(before.grid, 3, before.prefix)
    kept = before.weights * near
    torch.testing.assert_close(after.weights, kept / kept.sum(-1, keepdim=True))


@pytest.mark.parametrize("name", WINDOWED)
def test_in_windows_a_neighbour_is_one_in_the_window(name: str) -> None:
    network = build(name)
    x = images(network)
    before = recorded(network, x)[0]
    assert before.windows is not None
    after = recorded(treat(network, "local_attention"), x)[0]
    kept = before.weights * allowed_pairs(before.windows.size, 3, 0)
    torch.testing.assert_close(after.weights, kept / kept.sum(-1, keepdim=True))


@pytest.mark.parametrize("name", [name for name in [*GLOBAL, *WINDOWED] if not name.startswith("vit")])
def test_a_uniform_head_is_the_last_and_flat_over_what_it_may_see(name: str) -> None:
    network = build(name)
    x = images(network)
    before = recorded(network, x)
    for old, new in zip(before, recorded(treat(network, "uniform_heads"), x), strict=True):
        windows = old.windows
        apart = torch.zeros(1, *new.weights.shape[-2:], dtype=torch.bool)
        if windows is not None:
            regions = windows.regions(old.grid)
            apart = regions[:, :, None] != regions[:, None]
        flat = (~apart / (~apart).sum(-1, keepdim=True)).double()
        images_by_window = new.by_image()[:, :, -1]
        torch.testing.assert_close(images_by_window, flat.expand_as(images_by_window).to(images_by_window))
    first = recorded(network, x)[0]  # the learned heads of the first block have seen nothing of it
    torch.testing.assert_close(first.weights[:, :-1], before[0].weights[:, :-1])


def by_logits(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float, seen: Tensor | bool) -> Tensor:
    """sum_j (q_i . k_j / sqrt(d) + bias_ij) v_j over what is seen, [B, N, H * D], written out."""
    weights = (torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5 + bias) * seen
    return torch.einsum("bhqk,bhkd->bqhd", weights, v).flatten(2)


def qkv_of(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int = 2) -> tuple[Tensor, ...]:
    three = F.linear(x, weight, bias).reshape(*x.shape[:2], 3, heads, -1)
    return tuple(part.transpose(1, 2) for part in three.unbind(2))


def seen_by(module: nn.Module, network: nn.Module) -> tuple[Tensor, Tensor]:
    """The tokens that go into an attention, and what comes out."""
    passed: list[tuple[Tensor, Any]] = []
    handle = module.register_forward_hook(lambda _, args, output: passed.append((args[0], output)))
    with torch.no_grad():
        network(images(network))
    handle.remove()
    ((x, output),) = passed
    return x, output if isinstance(output, Tensor) else output[0]


def test_without_a_softmax_the_logits_weigh_the_values() -> None:
    own: Any = treat(build("own"), "no_softmax")
    attention = own.blocks[1].attention
    x, output = seen_by(attention, own)
    expected = attention.to_out(by_logits(*qkv_of(x, attention.to_qkv.weight, None), 0.0, True))
    torch.testing.assert_close(output, expected)
    vision: Any = treat(build("torchvision vit"), "no_softmax")
    attention = vision.encoder.layers[1].self_attention
    x, output = seen_by(attention, vision)
    expected = attention.out_proj(by_logits(*qkv_of(x, attention.in_proj_weight, attention.in_proj_bias), 0.0, True))
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("fused", [True, False])
def test_without_a_softmax_the_two_sides_of_a_seam_still_do_not_see_each_other(fused: bool) -> None:
    network: Any = build("swin, not square, padded")
    for layer in network.layers:
        for block in layer.blocks:
            block.attn.fused_attn = fused
    windows = Anatomy.of(network).of_kind("msa")[1].attention.windows
    treat(network, "no_softmax")
    attention = network.layers[0].blocks[1].attn
    x, output = seen_by(attention, network)
    regions = windows((18, 26)).regions((18, 26))
    together = (regions[:, :, None] == regions[:, None])[:, None].repeat(2, 1, 1, 1)
    assert not together.all()
    q, k, v = qkv_of(x, attention.qkv.weight, attention.qkv.bias)
    expected = attention.proj(by_logits(q, k, v, attention._get_rel_pos_bias(), together))
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("options", [{"bias": True}, {"bias": False}, {"kdim": 16, "vdim": 20}])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masked", [None, "bool", "float", "heads", "padding"])
def test_pytorch_s_module_computes_the_same_under_an_edit_that_is_neutral(
    options: dict[str, Any], need_weights: bool, masked: str | None
) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(24, 4, batch_first=True, **options).double()
    q = torch.randn(2, 5, 24, dtype=torch.float64)
    k = torch.randn(2, 7, options.get("kdim", 24), dtype=torch.float64)
    v = torch.randn(2, 7, options.get("vdim", 24), dtype=torch.float64)
    hidden = torch.rand(5, 7) > 0.6
    hidden[:, 0] = False
    masks: dict[str | None, dict[str, Tensor]] = {
        None: {},
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": torch.randn(5, 7, dtype=torch.float64)},
        "heads": {"attn_mask": hidden.expand(8, 5, 7)},
        "padding": {"key_padding_mask": hidden[:2], "attn_mask": hidden},
    }
    call = {"need_weights": need_weights, "average_attn_weights": False, **masks[masked]}
    expected = attention(q, k, v, **call)
    options_of = edit_attention(attention, 4)
    for name in ("logits_mix", "weights_mix"):
        attention.register_parameter(name, nn.Parameter(torch.eye(4, dtype=torch.float64)))
    assert options_of.logits_mix is not None
    for one, other in zip(attention(q, k, v, **call), expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
    unbatched, alone = attention(q[0], k[0], v[0], need_weights=False), attention(q[:1], k[:1], v[:1])
    torch.testing.assert_close(unbatched[0], alone[0][0])


@pytest.mark.parametrize("training", [False, True])
def test_encoder_layers_do_not_take_their_fused_path_around_a_treatment(training: bool) -> None:
    network = treat(build("encoder layers"), {"local_attention": {"kernel": 1}}).train(training)
    x = images(network)
    expected = network(x)
    with torch.no_grad():
        torch.testing.assert_close(network(x), expected)
        assert (network(x) - build("encoder layers")(x)).abs().max() > 1e-3


class FoldedHeads(nn.Module):
    """Heads folded into the batch, [B * H, N, D], by a softmax or fused."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = torch.bmm(torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1), v)
        return mixed.unflatten(0, (-1, 3))


@pytest.mark.parametrize("fused", [True, False])
def test_heads_folded_into_the_batch_are_told_apart(fused: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 5, 4, dtype=torch.float64)
    attention = FoldedHeads(fused)
    edit_attention(attention, 3)
    mixes = torch.randn(2, 3, 3, dtype=torch.float64)
    attention.logits_mix, attention.weights_mix = (nn.Parameter(mix) for mix in mixes)
    maps = torch.softmax(torch.einsum("hi,bind,bimd->bhnm", mixes[0], q, k) / 2, -1)
    expected = torch.einsum("hi,binm,bhmd->bhnd", mixes[1], maps, v)
    torch.testing.assert_close(attention(q, k, v), expected)


@pytest.mark.parametrize("name", GLOBAL)
def test_a_copy_has_an_edit_of_its_own_and_a_pickled_network_comes_back(name: str) -> None:
    network = treat(build(name), "local_attention", "talking_heads")
    x = images(network)
    expected = logits(network, x)
    twin = copy.deepcopy(network)
    with torch.no_grad():
        for key, parameter in twin.named_parameters():
            if key.endswith("weights_mix"):
                parameter.mul_(2.0)
    assert torch.equal(logits(network, x), expected)
    assert (logits(twin, x) - expected).abs().max() > 1e-4
    assert torch.equal(logits(pickle.loads(pickle.dumps(network)), x), expected)  # noqa: S301 (our own)


@pytest.mark.parametrize("name", [*GLOBAL, *WINDOWED])
@pytest.mark.parametrize("treatment", ["talking_heads", "no_softmax", "uniform_heads", "local_attention"])
def test_second_derivatives_and_checkpointing_see_the_edit(name: str, treatment: str) -> None:
    network = treat(build(name), treatment)
    x = images(network, batch=1).requires_grad_()
    weight = next(p for key, p in network.named_parameters() if p.ndim == 2)

    def loss(x: Tensor) -> Tensor:
        return logits(network, x).tanh().square().sum()

    with double_differentiable():
        (gradient,) = torch.autograd.grad(loss(x), weight, create_graph=True, materialize_grads=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), weight, materialize_grads=True)
    assert second.isfinite().all()
    (again,) = torch.autograd.grad(checkpoint(loss, x, use_reentrant=False), weight, materialize_grads=True)
    torch.testing.assert_close(again, gradient.detach())


def test_an_interrupt_inside_an_attention_leaves_no_edit_behind() -> None:
    network = treat(build("own"), "no_softmax")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    network.blocks[0].attention.to_out.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        network(images(network))
    assert _get_current_function_mode_stack() == []


def test_tokens_before_images_are_broadcast_image_by_image() -> None:
    network = treat(build("tokens first"), {"context_broadcasting": {"layers": "all", "position": "both"}})
    x = images(network, batch=3)
    together = network(x)
    for one, alone in zip(x, together, strict=True):
        torch.testing.assert_close(network(one[None])[0], alone)
    assert (together - build("tokens first")(x)).abs().max() > 1e-4


def test_a_compiled_network_has_the_edit() -> None:
    network = treat(build("own"), "talking_heads", {"context_broadcasting": {"scaled": True}}, "relu_activation")
    x = images(network)
    torch.testing.assert_close(torch.compile(network, backend="eager", fullgraph=True)(x), network(x))


def test_the_number_of_heads_is_read_from_the_map() -> None:
    for name in ("own", "torchvision vit", "swin, not square, padded"):
        network = build(name)
        found = find_attentions(TalkingHeads(), Anatomy.of(network), ImageSpec(5, *_chans_and_size(network)))
        assert [attention.heads for attention in found] == [2] * len(found)
        assert found


def _chans_and_size(network: nn.Module) -> tuple[int, tuple[int, int]]:
    core, family = recognise(network)
    channels, height, width = family.input_size(core)
    return channels, (height, width)
