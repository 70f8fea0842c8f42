"""Two networks as users write them, of no library's classes, for treatments that ask for a part and not for a name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitclinic.anatomy import AttentionSpec, Family, Layout, Residual, Silence, Unit, into, out_of, register_family
from vitclinic.anatomy.families import family as registry
from vitclinic.anatomy.families.family import Step, head, position, residual_block, stem

WIDTH, HEADS, SIZE, PATCH, CLASSES = 24, 2, 32, 8, 5
TOKENS = (SIZE // PATCH) ** 2


class WrittenOutAttention(nn.Module):
    """Attention by einsum and a Softmax module whose name an edit must not touch."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).view(*x.shape[:2], 3, HEADS, -1).unbind(2)
        weights = self.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5)
        return self.to_out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


class OwnBlock(nn.Module):
    """A block without a module for its MLP, whose GELU is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = WrittenOutAttention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class _ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos = nn.Parameter(torch.randn(1, TOKENS + 1, WIDTH))
        self.drop, self.norm, self.fc = nn.Identity(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def embed(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.drop(torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1) + self.pos)


class OwnViT(_ViT):
    """Own blocks in a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OwnBlock() for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.fc(self.norm(x)[:, 0])


class EncoderViT(_ViT):
    """PyTorch's own encoder layers, which have a fused path that never calls their parts."""

    def __init__(self) -> None:
        super().__init__()
        layers = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, **layers) for _ in range(2)))

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.norm(self.blocks(self.embed(images)))[:, 0])


def _units(network: Any) -> list[Unit]:
    tokens = Layout(prefix=1, grid_at=out_of(network.patches))
    walk = [stem(network.patches, network, out_of(network.patches))]
    walk.append(position(network.pos, network.drop, walk[-1].output, out_of(network.drop, tokens)))
    for index, block in enumerate(network.blocks):
        name = f"blocks.{index}"
        if not isinstance(block, OwnBlock | nn.TransformerEncoderLayer):  # an extra block
            walk += registry.extra_step(name, 0, block, tokens)
            continue
        own = isinstance(block, OwnBlock)
        attention = block.attention if own else block.self_attn
        spec = None if getattr(attention, "softmax_free", False) else AttentionSpec(attention, tokens)
        branches = (attention, block.down) if own else (block.dropout1, block.dropout2)
        ends = [out_of(module, tokens) for module in branches]
        states = [into(block, tokens), into(block.norm2, tokens), out_of(block, tokens)]
        steps = [Step("msa", attention, block.norm1, ends[0], spec), Step("mlp", block, block.norm2, ends[1])]
        walk += residual_block(name, 0, states, steps)
    return [*walk, head(network.fc, network, walk[-1], network.norm)]


class SequenceFirstBlock(nn.Module):
    """Tokens on the first axis, [N, B, C]: a map of heads by PyTorch's module, an MLP of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x_nbc: Tensor) -> Tensor:
        y = self.norm1(x_nbc)
        x_nbc = x_nbc + self.attention(y, y, y)[0]
        return x_nbc + self.mlp(self.norm2(x_nbc))


class SequenceFirstViT(_ViT):
    """Blocks that have the tokens before the images."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(SequenceFirstBlock() for _ in range(2)))

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.norm(self.blocks(self.embed(images).transpose(0, 1))[0]))


def _sequence_first_units(network: Any) -> list[Unit]:
    tokens = Layout(prefix=1, grid_at=out_of(network.patches))
    walk = [stem(network.patches, network, out_of(network.patches))]
    for index, block in enumerate(network.blocks):
        ends = {"msa": out_of(block.attention, tokens), "mlp": out_of(block.mlp, tokens)}
        states = [into(block, tokens), into(block.norm2, tokens), out_of(block, tokens)]
        for kind, before, after in (("msa", *states[:2]), ("mlp", *states[1:])):
            module = block.attention if kind == "msa" else block.mlp
            spec = AttentionSpec(module, tokens) if kind == "msa" else None
            walk.append(
                Unit(
                    f"blocks.{index}.{kind}", kind, 0, module, before, after, block=f"blocks.{index}", attention=spec,
                    residual=Residual(before, ends[kind], after), removal=Silence(ends[kind]),
                )
            )  # fmt: skip
    return [*walk, head(network.fc, network, walk[-1])]


@contextmanager
def families_of_handwritten_networks() -> Iterator[None]:
    """Register the networks above, as their user would, until the context ends."""
    before = list(registry._families)
    walks = {OwnViT: _units, EncoderViT: _units, SequenceFirstViT: _sequence_first_units}
    for kind, units in walks.items():
        name = f"{kind.__module__}.{kind.__qualname__}"
        register_family(Family(kind.__name__, (name,), units, lambda _: (3, SIZE, SIZE)))
    try:
        yield
    finally:
        registry._families[:] = before
