"""A network of a user's own with the weights of timm's gives timm's numbers, with nothing registered."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

import vitclinic
from vitclinic.probes import parse_probes

PROBES = (
    *("accuracy", "norms", "fourier", "variance", "cka", "token_similarity", "token_norms", "sparsity", "lesion"),
    *("attention_entropy", "attention_distance", "attention_maps", "softmax_jacobian", "fgsm", "occlusion"),
)
DEAR = ("sharpness", "hessian_spectrum", "flatness", "ntk", "landscape", "pgd", "frequency_noise", "saliency")
OPTIONS = {
    "sharpness": {"tolerance": 1e-8},
    "hessian_spectrum": {"batches": 2},
    "landscape": {"points": 3},
}


class Attention(nn.Module):
    """Self-attention with its norm inside, as users write it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.to_qkv = nn.Linear(width, 3 * width)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        images, tokens, width = x.shape
        parts = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        query, key, value = (part.view(images, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        weights = (query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5).softmax(dim=-1)
        return self.to_out((weights @ value).transpose(1, 2).reshape(images, tokens, width))


class OwnViT(nn.Module):
    """A ViT in one file: patches by reshaping and a Linear, blocks as pairs in a list, no module for the residuals."""

    def __init__(self, original: timm.models.VisionTransformer) -> None:
        super().__init__()
        width = original.embed_dim
        self.patch = original.patch_embed.patch_size[0]
        projection = original.patch_embed.proj
        self.to_patch = copied(nn.Linear(projection.weight[0].numel(), width), projection)
        self.cls = nn.Parameter(original.cls_token.detach().clone())
        self.pos = nn.Parameter(original.pos_embed.detach().clone())
        self.layers = nn.ModuleList()
        for block in original.blocks:
            attention = Attention(width, block.attn.num_heads)
            for own, theirs in (
                (attention.norm, block.norm1),
                (attention.to_qkv, block.attn.qkv),
                (attention.to_out, block.attn.proj),
            ):
                copied(own, theirs)
            hidden = block.mlp.fc1.out_features
            feed_forward = nn.Sequential(
                copied(nn.LayerNorm(width, eps=1e-6), block.norm2),
                copied(nn.Linear(width, hidden), block.mlp.fc1),
                nn.GELU(),
                copied(nn.Linear(hidden, width), block.mlp.fc2),
            )
            self.layers.append(nn.ModuleList([attention, feed_forward]))
        self.norm = copied(nn.LayerNorm(width, eps=1e-6), original.norm)
        self.head = copied(nn.Linear(width, original.num_classes), original.head)

    def forward(self, x: Tensor) -> Tensor:
        images, channels, height, width = x.shape
        p = self.patch
        x = x.view(images, channels, height // p, p, width // p, p).permute(0, 2, 4, 1, 3, 5)
        x = self.to_patch(x.reshape(images, -1, channels * p * p))
        x = torch.cat([self.cls.expand(images, -1, -1), x], dim=1) + self.pos
        for attention, feed_forward in self.layers:
            x = attention(x) + x
            x = feed_forward(x) + x
        return self.head(self.norm(x)[:, 0])


def copied(own: nn.Module, theirs: nn.Module) -> nn.Module:
    with torch.no_grad():
        own.weight.copy_(theirs.weight.reshape(own.weight.shape))
        own.bias.copy_(theirs.bias)
    return own


@pytest.fixture(scope="module")
def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    original = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3, num_classes=4
    )
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return original.double().eval(), OwnViT(original).double().eval()


@pytest.fixture(scope="module")
def loader() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.rand(8, 3, 32, 32, generator=generator), torch.arange(8) % 4) for _ in range(2)]


@pytest.mark.parametrize("name", [*PROBES, *(pytest.param(name, marks=pytest.mark.slow) for name in DEAR)])
def test_every_probe_gives_the_numbers_of_the_same_network_of_timm(
    name: str, networks: tuple[nn.Module, nn.Module], loader: list[tuple[Tensor, Tensor]]
) -> None:
    (probe,) = parse_probes([{name: OPTIONS.get(name, {})}])
    known, own = (probe(network, loader) for network in networks)
    assert known.scalars.keys() == own.scalars.keys()
    for key in known.scalars.keys() - {"products"}:  # the number of steps to convergence depends on the start
        assert own.scalars[key].value == pytest.approx(known.scalars[key].value, rel=1e-5, abs=1e-9), key
    assert [(row.kind, row.stage) for row in own.units] == [(row.kind, row.stage) for row in known.units]
    for ours, theirs in zip(own.units, known.units, strict=True):
        for key, value in theirs.values.items():
            assert ours.values[key].value == pytest.approx(value.value, rel=1e-5, abs=1e-9), (theirs.name, key)


def test_an_exam_of_it_takes_one_line(
    networks: tuple[nn.Module, nn.Module], loader: list[tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    probes = ["fourier", "attention_entropy", "lesion"]
    exam = vitclinic.examine(networks[1].float(), data=loader, probes=probes, out=tmp_path)
    assert {measurement.status for measurement in exam.measurements.values()} == {"ok"}
