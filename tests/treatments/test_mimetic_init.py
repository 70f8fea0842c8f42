"""Mimetic initialization: products by numpy's decomposition, in weights whose places are stated here by hand.

Where a layout is one's own, no place is stated: with alpha 0 the attention itself must be minus a mean of what it sees.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as functional
from torch.nn.utils.parametrizations import weight_norm

from tests.anatomy.networks import NETWORKS, cut, shaken, tiny_vit
from tests.anatomy.zoo import ZOO
from tests.treatments.handwritten import EncoderViT
from vitclinic import functional as F
from vitclinic._core.errors import RecipeError, TreatmentError
from vitclinic.data import ImageSpec
from vitclinic.treatments import treat
from vitclinic.treatments.mimetic_init import OFFSETS, impulse_scores, sinusoidal_positions

ENTRY = "mimetic_init"
SPEC = ImageSpec(5, 3, (32, 32))
Weights = tuple[list[Tensor], list[Tensor], Tensor, Tensor]
"""W_Q and W_K of each head, [D, K], W_V [D, D] and W_proj [D, D], as in the paper: x W."""


def heads_of(weight: Tensor, heads: int) -> list[Tensor]:
    return [part.detach().double().T for part in weight.chunk(heads)]


def of_timm(attention: Any) -> Weights:
    q, k, v = attention.qkv.weight.chunk(3)
    heads = attention.num_heads
    return heads_of(q, heads), heads_of(k, heads), *(x.detach().double().T for x in (v, attention.proj.weight))


def of_torch(attention: nn.MultiheadAttention) -> Weights:
    q, k, v = attention.in_proj_weight.chunk(3)
    heads, proj = attention.num_heads, attention.out_proj.weight
    return heads_of(q, heads), heads_of(k, heads), *(x.detach().double().T for x in (v, proj))


def of_separate(q: nn.Linear, k: nn.Linear, v: nn.Linear, proj: nn.Linear, heads: int = 2) -> Weights:
    weights = (v.weight, proj.weight)
    return heads_of(q.weight, heads), heads_of(k.weight, heads), *(x.detach().double().T for x in weights)


def of_huggingface(network: Any) -> list[Weights]:
    found = []
    for name, module in network.named_modules():
        if hasattr(module, "query"):
            output = network.get_submodule(name.rpartition(".")[0]).output.dense
            found.append(of_separate(module.query, module.key, module.value, output))
        elif hasattr(module, "q_proj"):
            found.append(of_separate(module.q_proj, module.k_proj, module.v_proj, module.o_proj))
    return found


def of_modules(kind: Any, read: Any) -> Any:
    return lambda network: [read(module) for module in network.modules() if isinstance(module, kind)]


def with_qkv(network: nn.Module) -> list[Weights]:
    return [of_timm(module) for module in network.modules() if hasattr(module, "qkv") and hasattr(module, "proj")]


PLACES: dict[str, tuple[Any, Any]] = {
    "timm vit": (tiny_vit, with_qkv),
    "timm vit, unfused, normed": (lambda: unfused(tiny_vit(qk_norm=True)), with_qkv),
    "timm swin": (NETWORKS["swin, not square, padded"], with_qkv),
    "timm pit": (lambda: cut("pit", "pit_ti_224"), with_qkv),
    "timm beit": (ZOO["timm/beit_base_patch16_224"].build, with_qkv),
    "timm eva02, rotated": (ZOO["timm/eva02_tiny_patch14_224"].build, with_qkv),
    "torchvision swin": (NETWORKS["torchvision swin, padded"], with_qkv),
    "torchvision vit": (NETWORKS["torchvision vit"], of_modules(nn.MultiheadAttention, of_torch)),
    "encoder layers": (EncoderViT, of_modules(nn.MultiheadAttention, of_torch)),
}
PLACES |= {f"huggingface {n}": (NETWORKS[f"huggingface {n}"], of_huggingface) for n in ("vit", "deit")
           if f"huggingface {n}" in NETWORKS}  # fmt: skip


def unfused(network: nn.Module) -> nn.Module:
    for block in network.blocks:
        block.attn.fused_attn = False
    return network


def spec_of(name: str) -> ImageSpec | None:
    key = {"timm beit": "timm/beit_base_patch16_224", "timm eva02, rotated": "timm/eva02_tiny_patch14_224"}.get(name)
    if key is None:
        return SPEC if name == "encoder layers" else None
    return ImageSpec(10, ZOO[key].image[0], ZOO[key].image[1:])


def nearest(width: int, rank: int, alpha: float, beta: float) -> np.ndarray:
    """The best approximation of that rank of alpha Z + beta I, by numpy, with the next Z that torch draws."""
    z = torch.randn(width, width, dtype=torch.float64).numpy() / np.sqrt(width)
    u, s, vt = np.linalg.svd(alpha * z + beta * np.eye(width))
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


@pytest.mark.parametrize("name", PLACES)
def test_the_products_of_every_head_are_near_the_identity_and_of_the_values_near_minus_it(name: str) -> None:
    build, read = PLACES[name]
    network = build()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    torch.manual_seed(3)
    treat(network, ENTRY, spec=spec_of(name))
    torch.manual_seed(3)
    found = read(network)
    assert found
    touched = set()
    for queries, keys, values, proj in found:
        assert len(queries) == len(keys) > 0
        for query, key in zip(queries, keys, strict=True):
            expected = nearest(*query.shape, 0.7, 0.7)
            np.testing.assert_allclose((query @ key.T).numpy(), expected, atol=3e-6)
            trace, width = (query @ key.T).trace().item(), query.shape[1]
            assert trace > 0.5 * width  # at least that of the noise's own projection on the identity
        expected = nearest(len(values), values.shape[1], 0.4, -0.4)
        np.testing.assert_allclose((values @ proj).numpy(), expected, atol=3e-6)
        assert -0.6 * len(values) < (values @ proj).trace().item() < -0.2 * len(values)
    after = network.state_dict()
    assert {key: value.shape for key, value in before.items()} == {key: value.shape for key, value in after.items()}
    touched = {key for key, value in after.items() if not torch.equal(value, before[key])}
    assert len(touched) == len(found) * (4 if "huggingface" in name else 2)
    assert all("bias" not in key and value.is_floating_point() for key, value in after.items() if key in touched)


# The formula


def test_all_of_the_product_is_there_at_full_rank() -> None:
    noise = torch.randn(20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 20**0.5
    left, right = F.mimetic_factors(noise, 20, 0.4, -0.4)
    torch.testing.assert_close(left @ right.T, 0.4 * noise - 0.4 * torch.eye(20).double(), rtol=0, atol=1e-12)


def test_factors_are_balanced_and_no_other_pair_of_their_rank_is_nearer() -> None:
    noise = torch.randn(20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 20**0.5
    product = 0.7 * noise + 0.7 * torch.eye(20).double()
    left, right = F.mimetic_factors(noise, 5)
    torch.testing.assert_close(left.T @ left, right.T @ right, rtol=0, atol=1e-12)
    singular = torch.linalg.svdvals(product)
    torch.testing.assert_close(left.square().sum(), singular[:5].sum())
    torch.testing.assert_close((product - left @ right.T).square().sum(), singular[5:].square().sum())


def test_wrong_shapes_are_a_sentence() -> None:
    with pytest.raises(ValueError, match="must be square"):
        F.mimetic_factors(torch.zeros(2, 3), 2)
    with pytest.raises(ValueError, match="rank at most"):
        F.mimetic_factors(torch.zeros(3, 3), 4)
    with pytest.raises(ValueError, match=r"scores must be \[4, 4\]"):
        F.convolution_factors(torch.zeros(4, 3), torch.zeros(3, 3), 2)


def test_noise_has_the_deviation_of_the_paper() -> None:
    torch.manual_seed(0)
    network = treat(tiny_vit(embed_dim=128, num_heads=1, depth=1), {ENTRY: {"alpha1": 0.5, "beta1": 0.0}})
    (query,), (key,), *_ = of_timm(network.blocks[0].attn)
    assert (query @ key.T).std().item() == pytest.approx(0.5 / 128**0.5, rel=0.02)


# Attention as one writes it

WIDTH, HEADS = 12, 3


class OwnAttention(nn.Module):
    """Attention whose queries, keys and values lie as `layout` says in the rows of one layer, or in three layers."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH if layout == "three layers" else 3 * WIDTH, bias=False)
            for _ in range(3 if layout == "three layers" else 1)
        )
        self.gate, self.out = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.shape[:2]
        if self.layout == "three layers":
            q, k, v = (layer(x).view(*wide, HEADS, -1) for layer in self.layers)
            q = q.mul_(1.0)  # in place, as some do
        elif self.layout == "heads first":
            q, k, v = self.layers[0](x).view(*wide, HEADS, 3, -1).unbind(3)
        elif self.layout == "values first":
            v, k, q = self.layers[0](x).view(*wide, 3, HEADS, -1).unbind(2)
        else:  # channels first: a channel of every head, then the next; the projection reads head after head
            q, k, v = (part.mT for part in self.layers[0](x).view(*wide, 3, -1, HEADS).unbind(2))
        q = q * (WIDTH // HEADS) ** -0.5
        mixed = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1) @ v.transpose(1, 2)
        closed = 0 * self.gate(x)  # a layer between the map and the projection that reads the state
        return self.out(mixed.transpose(1, 2).flatten(2) + closed)


class OwnNetwork(nn.Module):
    """Two blocks of such an attention, without an MLP between them."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attentions = nn.ModuleList(make() for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        for norm, attention, up, down in zip(self.norms, self.attentions, self.ups, self.downs, strict=True):
            x = x + attention(norm(x))
            x = x + down(functional.gelu(up(x)))
        return self.head(x.mean(1))


FIRST_HEAD = {
    "heads first": range(4),
    "values first": range(24, 28),
    "channels first": range(0, 12, 3),
    "three layers": range(4),
}
"""The rows of the first head's queries."""


@pytest.mark.parametrize("layout", FIRST_HEAD)
def test_a_layout_of_ones_own_is_found(layout: str) -> None:
    """With alpha 0 each head scores by the same K channels, so that the attention is -0.4 softmax(0.7 x x^T / 2) x."""
    torch.manual_seed(0)
    network = OwnNetwork(lambda: OwnAttention(layout)).double()
    treat(network, {ENTRY: {"alpha1": 0.0, "alpha2": 0.0}}, spec=SPEC)
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    for attention in network.attentions:
        query = attention.layers[0].weight[list(FIRST_HEAD[layout])].detach()
        seen = query.norm(dim=0) > 1e-6  # the channels of an identity of rank K
        assert int(seen.sum()) == WIDTH // HEADS
        scores = 0.7 * x[..., seen] @ x[..., seen].mT / (WIDTH // HEADS) ** 0.5
        torch.testing.assert_close(attention(x), -0.4 * scores.softmax(-1) @ x, rtol=1e-6, atol=1e-6)


def test_a_block_that_runs_three_times_is_initialized_once() -> None:
    name = "hand-written/shared_block_vit"
    network = ZOO[name].build().double()
    torch.manual_seed(1)
    treat(network, ENTRY, spec=ImageSpec(10, ZOO[name].image[0], ZOO[name].image[1:]))
    torch.manual_seed(1)
    width = network.attn.to_qkv.in_features
    q, k, _ = (part.detach().double() for part in network.attn.to_qkv.weight.chunk(3))
    heads = 3
    expected = nearest(width, width // heads, 0.7, 0.7)
    np.testing.assert_allclose((q[: width // heads].T @ k[: width // heads]).numpy(), expected, atol=1e-9)


# Determinism, and what stays


def test_the_same_seed_gives_the_same_weights_and_another_others() -> None:
    def weights(seed: int) -> Tensor:
        network = shaken(tiny_vit())
        torch.manual_seed(seed)
        return treat(network, ENTRY).blocks[1].attn.qkv.weight

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_network_is_left_as_it_was_but_for_its_attention(dtype: torch.dtype) -> None:
    network = tiny_vit().to(dtype).train()
    network.blocks[0].mlp.fc1.weight.requires_grad_(False)
    learned = {name: p.requires_grad for name, p in network.named_parameters()}
    treat(network, ENTRY)
    assert {name: p.requires_grad for name, p in network.named_parameters()} == learned
    assert all(p.grad is None and p.dtype == dtype for p in network.parameters())
    assert all(module.training and not module._forward_hooks for module in network.modules())
    assert not any(module._forward_pre_hooks for module in network.modules())
    assert network(torch.rand(2, 3, 32, 48, dtype=dtype)).isfinite().all()


def test_attention_looks_at_its_own_place_from_the_start() -> None:
    """What the paper is about: with position embeddings of ordinary size, maps have a diagonal."""
    torch.manual_seed(0)
    network = tiny_vit(embed_dim=64, num_heads=2).eval()
    treat(network, {ENTRY: {"positions": "sinusoidal"}})
    x = network.blocks[0].norm1(network.pos_embed)
    q, k, _ = network.blocks[0].attn.qkv(x).view(25, 3, 2, 32).permute(1, 2, 0, 3)
    own = (q @ k.mT * 32**-0.5).softmax(-1).diagonal(dim1=1, dim2=2)[:, 1:].mean()
    assert own > 2 / 25


# Positions


def test_sinusoidal_positions_are_the_formula() -> None:
    found = sinusoidal_positions((3, 4), 8)
    for row in range(3):
        for column in range(4):
            expected = [
                f(place / 10000**share) for place in (column, row) for f in (np.sin, np.cos) for share in (0, 1)
            ]
            np.testing.assert_allclose(found[4 * row + column].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("build", "embedding"),
    [
        (tiny_vit, "pos_embed"),
        (lambda: tiny_vit(no_embed_class=True, reg_tokens=2), "pos_embed"),
        (NETWORKS["torchvision vit"], "encoder.pos_embedding"),
    ],
)
def test_the_patches_have_sinusoidal_positions_and_the_class_token_keeps_its_own(build: Any, embedding: str) -> None:
    network = build()
    before = network.get_parameter(embedding).detach().clone()
    treat(network, {ENTRY: {"positions": "sinusoidal"}})
    after = network.get_parameter(embedding)
    grid = (4, 6) if embedding == "pos_embed" else (4, 4)
    prefix = before.shape[1] - grid[0] * grid[1]
    assert prefix in (0, 1)
    assert torch.equal(after[:, :prefix], before[:, :prefix])
    torch.testing.assert_close(after[0, prefix:], sinusoidal_positions(grid, before.shape[2]).float())
    assert after.requires_grad


# A convolution


@pytest.mark.parametrize("offset", OFFSETS, ids=str)
def test_an_impulse_is_at_the_patch_that_lies_there(offset: tuple[int, int]) -> None:
    scores = impulse_scores((3, 4), offset, torch.zeros(12, 12).double())
    for query in range(12):
        for key in range(12):
            apart = (key // 4 - query // 4, key % 4 - query % 4)
            assert scores[query, key] == (1000 if apart == offset else 0)


def test_its_factors_are_those_of_a_pseudo_inverse() -> None:
    generator = torch.Generator().manual_seed(0)
    positions, scores = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((9, 20), (9, 9)))
    p = positions.numpy() - positions.numpy().mean(1, keepdims=True)
    p = p / np.sqrt((p**2).mean(1, keepdims=True) + 1e-5)
    u, s, vt = np.linalg.svd(p, full_matrices=False)
    inverse = np.linalg.pinv((u[:, :6] * s[:6]) @ vt[:6])
    u, s, vt = np.linalg.svd(inverse @ scores.numpy() @ inverse.T)
    query, key = F.convolution_factors(positions, scores, 6)
    expected = (u[:, :6] * s[:6]) @ vt[:6]
    np.testing.assert_allclose((query @ key.T).numpy(), 49 / s[:6].sum() * expected, atol=1e-9)
    torch.testing.assert_close(query.norm(), torch.tensor(7.0).double())
    torch.testing.assert_close(key.norm(), torch.tensor(7.0).double())


def test_channels_that_no_position_needs_keep_their_values() -> None:
    """Of 6 patches 6 channels are enough; queries and keys that are both zero would never learn."""
    network = tiny_vit(img_size=(16, 24))
    before = network.blocks[0].attn.qkv.weight.detach().clone()
    treat(network, {ENTRY: {"kind": "convolution"}})
    rows = (network.blocks[0].attn.qkv.weight != before).any(1).view(3, 2, 12)
    assert rows[:2, :, :6].all()
    assert not rows[:2, :, 6:].any()
    assert rows[2].all()


@pytest.mark.parametrize("options", [{}, {"positions": "sinusoidal"}], ids=str)
def test_every_head_attends_to_its_neighbour(options: dict[str, str]) -> None:
    torch.manual_seed(0)
    heads, width = 5, 5 * 32
    network = tiny_vit(img_size=(32, 40), embed_dim=width, num_heads=heads)  # a grid of 4 x 5
    treat(network, {ENTRY: {"kind": "convolution", **options}})
    positions = network.pos_embed[0, 1:]
    assert positions.square().mean().sqrt().item() == pytest.approx(0.5**0.5 if options else 0.36, rel=1e-4)
    x = functional.layer_norm(positions, (width,))
    for block in network.blocks:
        queries, keys, values, proj = of_timm(block.attn)
        for head, (query, key) in enumerate(zip(queries, keys, strict=True)):
            if not options:  # 20 of the 32 channels of a head tell 20 patches apart
                assert query[:, :20].norm().item() == pytest.approx(7, rel=1e-5)
            scores = (x.double() @ query) @ (x.double() @ key).T
            row, column = OFFSETS[head]
            inside = [n for n in range(20) if 0 <= n // 5 + row < 4 and 0 <= n % 5 + column < 5]
            right = [int(scores[n].argmax()) == n + 5 * row + column for n in inside]
            assert np.mean(right) >= (0.5 if options else 1)  # sines of long waves hardly tell neighbours apart
        assert (values @ proj).trace().item() < -0.2 * width


def zero_positions() -> nn.Module:
    network = tiny_vit()
    nn.init.zeros_(network.pos_embed)
    return network


def test_a_convolution_needs_positions_and_attention_over_all_of_them() -> None:
    entry = {ENTRY: {"kind": "convolution"}}
    for build, sentence in (
        (lambda: tiny_vit(pos_embed="none"), r"^mimetic_init: kind convolution needs one learned position embedding"),
        (NETWORKS["swin, not square, padded"], r"^mimetic_init: kind convolution needs one learned position"),
        (lambda: cut("pit", "pit_ti_224"), r"needs one position of 16 channels for each of 7 x 7 patches"),
        (
            zero_positions,
            r"tells patches apart by their positions, which are all the same: add positions: sinusoidal\.$",
        ),
        (lambda: treat(tiny_vit(), "registers"), r"."),
    ):
        network = build()
        before = {name: value.clone() for name, value in network.state_dict().items()}
        if sentence == ".":
            assert treat(network, entry) is network
            continue
        with pytest.raises(TreatmentError, match=sentence):
            treat(network, entry)
        assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


# Options, company, errors


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "convolution", "alpha1": 0.5}, "alpha1 and beta1 have no effect with kind convolution"),
        ({"alpha1": 0.0, "beta1": 0.0}, "cannot both be 0"),
        ({"alpha2": 0.0, "beta2": 0.0}, "cannot both be 0"),
        ({"beta1": -0.7}, "beta1"),
        ({"positions": "learned"}, "positions"),
    ],
)
def test_options_at_odds_are_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        treat(tiny_vit(), {ENTRY: options})


@pytest.mark.parametrize(
    "others",
    [
        ["conv_stem", "gap_head", ENTRY, "registers", "local_attention"],
        ["local_attention", ENTRY],
        ["talking_heads", ENTRY],
        ["sequence_pooling", ENTRY, "uniform_heads"],
        ["extra_block", ENTRY, "context_broadcasting"],
    ],
    ids=str,
)
def test_it_goes_with_others(others: list[str]) -> None:
    network = treat(tiny_vit(), *others)
    output = network(torch.rand(2, 3, 32, 48))
    assert output.isfinite().all()
    output.sum().backward()


@pytest.mark.parametrize("first", ["no_softmax", "uniform_heads"])
def test_an_attention_that_was_changed_is_a_sentence(first: str) -> None:
    network = treat(tiny_vit(), first)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with pytest.raises(TreatmentError, match=r"^mimetic_init does not fit VisionTransformer: it needs .*\.$"):
        treat(network, ENTRY)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


class WithoutProjection(OwnAttention):
    """Attention of which the next layer is the MLP."""

    def __init__(self) -> None:
        super().__init__("three layers")
        self.out, self.gate = nn.Identity(), nn.Linear(WIDTH, 1)


class InPlace(OwnAttention):
    """Attention that cannot be trained: it changes what is a view of several."""

    def __init__(self) -> None:
        super().__init__("values first")

    def forward(self, x: Tensor) -> Tensor:
        v, *_ = self.layers[0](x).unbind(1)
        v.mul_(2)
        return super().forward(x)


def computed() -> nn.Module:
    network = tiny_vit()
    weight_norm(network.blocks[0].attn.qkv)
    return network


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: tiny_vit(scale_attn_norm=True), r"the values of blocks\.0\.msa are not what its projection reads"),
        (computed, r"the weight of the queries of blocks\.0\.msa is computed from others"),
        (lambda: OwnNetwork(WithoutProjection), r"no projection follows the values of attentions"),
        (lambda: OwnNetwork(InPlace), r"a pass with gradients fails \(Output 0 of"),
        (NETWORKS["vitclinic alternet, cifar"], r"values and projection of \S+ lead from \d+ channels over \d+ to \d+"),
        (ZOO["timm/cait_xxs24_224"].build, r"only its class token attends to the grid"),
        (NETWORKS["timm mixer_l32_224"], r"this network has none"),
    ],
)
def test_weights_that_cannot_be_told_apart_are_a_sentence(build: Any, sentence: str) -> None:
    network = build()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    spec = SPEC if isinstance(network, OwnNetwork) else None
    with pytest.raises(TreatmentError, match=rf"^mimetic_init does not fit \w+: it needs attention .*; {sentence}"):
        treat(network, ENTRY, spec=spec)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.requires_grad for parameter in network.parameters())
