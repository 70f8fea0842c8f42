"""One small ViT whose tokens lie in several orders: all compute the same from the same seed."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

WIDTH, HEADS, SIDE, PATCH, CLASSES = 24, 2, 16, 4, 5
GRID = SIDE // PATCH
TOKENS = GRID * GRID + 1
Order = Literal["plain", "columns", "class last"]


def token_order(order: Order) -> Tensor:
    """Return which token of the plain order comes where."""
    cells = torch.arange(1, TOKENS).view(GRID, GRID)
    first = torch.zeros(1, dtype=torch.long)
    if order == "class last":
        return torch.cat((cells.flatten(), first))
    return torch.cat((first, (cells.T if order == "columns" else cells).flatten()))


class Attention(nn.Module):
    """Attention, with keys in an order of their own if `shuffled`."""

    def __init__(self, shuffled: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shuffle = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(3)) if shuffled else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.shuffle is not None:
            k, v = k[:, :, self.shuffle], v[:, :, self.shuffle]
        weights = (q @ k.transpose(-2, -1) * (WIDTH // HEADS) ** -0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, shuffled: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(shuffled)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class OrderedViT(nn.Module):
    """A ViT with tokens in an order; the numbers that it computes do not depend on it."""

    def __init__(self, order: Order = "plain", shuffled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos = nn.Parameter(torch.randn(1, TOKENS, WIDTH)[:, token_order(order)])
        self.blocks = nn.Sequential(*(Block(shuffled) for _ in range(2)))
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        x = (x.transpose(2, 3) if self.order == "columns" else x).flatten(2).transpose(1, 2)
        cls = self.cls.expand(len(x), -1, -1)
        x = torch.cat((x, cls) if self.order == "class last" else (cls, x), dim=1) + self.pos
        x = self.norm(self.blocks(x))
        return self.fc(x[:, -1] if self.order == "class last" else x[:, 0])
