"""Networks as users write them: no library's classes around the parts, every habit of layout, naming and return value.

All take images of 3 x 32 x 32 and know ten classes. Legend: B images, N tokens, C channels, H x W grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEADS, DEPTH, PATCH, SIZE, CLASSES = 48, 3, 2, 8, 32, 10
TOKENS = (SIZE // PATCH) ** 2


def split_patches(images: Tensor, patch: int = PATCH) -> Tensor:
    """Cut images into patches by reshaping alone: [B, N, patch * patch * channels]."""
    b, c, h, w = images.shape
    x = images.reshape(b, c, h // patch, patch, w // patch, patch)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(b, (h // patch) * (w // patch), patch * patch * c)


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int, dropout: float = 0.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, hidden),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.net(x)


class Attention(nn.Module):
    """Attention with its norm inside and its softmax written out."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.norm = nn.LayerNorm(dim)
        self.attend = nn.Softmax(dim=-1)
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.to_qkv(self.norm(x)).chunk(3, dim=-1))
        weights = self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale)
        return self.to_out(torch.matmul(weights, v).transpose(1, 2).reshape(b, n, c))


class Transformer(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([Attention(dim, heads), FeedForward(dim, dim * 2)]) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.norm(x)


class LinearPatchViT(nn.Module):
    """Patches by reshaping, norm, Linear, norm; a class token; pairs of modules in a ModuleList."""

    def __init__(self):
        super().__init__()
        width = 3 * PATCH**2
        self.to_patch_embedding = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, DIM), nn.LayerNorm(DIM))
        self.cls_token = nn.Parameter(torch.randn(1, 1, DIM))
        self.pos_embedding = nn.Parameter(torch.randn(1, TOKENS + 1, DIM))
        self.transformer = Transformer(DIM, DEPTH, HEADS)
        self.mlp_head = nn.Linear(DIM, CLASSES)

    def forward_features(self, img):
        x = self.to_patch_embedding(split_patches(img))
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embedding
        return self.transformer(x)

    def forward(self, img):
        return self.mlp_head(self.forward_features(img)[:, 0])


@dataclass
class Prediction:
    features: Tensor
    logits: Tensor


class Scores(NamedTuple):
    logits: Tensor
    features: Tensor


class DictViT(LinearPatchViT):
    def forward(self, img):
        features = self.forward_features(img)
        return {"features": features, "logits": self.mlp_head(features[:, 0])}


class TupleViT(LinearPatchViT):
    def forward(self, img):
        features = self.forward_features(img)
        return self.mlp_head(features[:, 0]), features


class NamedTupleViT(LinearPatchViT):
    def forward(self, img):
        return Scores(*TupleViT.forward(self, img))


class DataclassViT(LinearPatchViT):
    def forward(self, img):
        logits, features = TupleViT.forward(self, img)
        return Prediction(features=features, logits=logits)


class EncoderViT(nn.Module):
    """`nn.TransformerEncoder` behind a patch convolution, batch first or not, with either order of norms."""

    def __init__(self, batch_first: bool = True, norm_first: bool = True):
        super().__init__()
        self.batch_first = batch_first
        self.patchify = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.pos = nn.Parameter(0.02 * torch.randn(TOKENS, DIM))
        layer = nn.TransformerEncoderLayer(
            DIM, HEADS, 2 * DIM, activation="gelu", batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
        self.fc = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        x = self.patchify(x).flatten(2)
        x = x.permute(0, 2, 1) + self.pos if self.batch_first else x.permute(2, 0, 1) + self.pos[:, None]
        return self.fc(self.encoder(x).mean(1 if self.batch_first else 0))


class Normalize(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))

    def forward(self, x):
        return (x - self.mean) / self.std


def timm_vit(**keywords):
    small = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": DIM, "depth": DEPTH, "num_heads": HEADS}
    return timm.models.VisionTransformer(**{"num_classes": CLASSES, **small, **keywords})


class BackboneWithHead(nn.Module):
    """A library's backbone without its head, and one's own Linear."""

    def __init__(self):
        super().__init__()
        self.backbone = timm_vit(num_classes=0)
        self.classifier = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        return self.classifier(self.backbone(x))


class FunctionalViT(nn.Module):
    """No modules at all: weights in a ParameterDict, everything in one forward, fused attention."""

    def __init__(self):
        super().__init__()
        shapes = {"patch": (DIM, 3, PATCH, PATCH), "pos": (TOKENS, DIM), "head": (CLASSES, DIM)}
        for i in range(DEPTH):
            shapes |= {f"qkv{i}": (3 * DIM, DIM), f"out{i}": (DIM, DIM)}
            shapes |= {f"up{i}": (2 * DIM, DIM), f"down{i}": (DIM, 2 * DIM)}
        self.w = nn.ParameterDict(
            {k: nn.Parameter(torch.randn(s) / math.sqrt(math.prod(s[1:]))) for k, s in shapes.items()}
        )

    def forward(self, x):
        x = F.conv2d(x, self.w["patch"], stride=PATCH).flatten(2).transpose(1, 2) + self.w["pos"]
        b, n, c = x.shape
        for i in range(DEPTH):
            qkv = F.linear(F.layer_norm(x, (c,)), self.w[f"qkv{i}"]).view(b, n, 3, HEADS, c // HEADS)
            mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
            x = x + F.linear(mixed.transpose(1, 2).reshape(b, n, c), self.w[f"out{i}"])
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (c,)), self.w[f"up{i}"])), self.w[f"down{i}"])
        return F.linear(F.layer_norm(x, (c,)).mean(1), self.w["head"])


class SharedBlockViT(nn.Module):
    """One attention and one MLP, each called three times."""

    def __init__(self, calls: int = 3):
        super().__init__()
        self.calls = calls
        self.stem = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.attn = Attention(DIM, HEADS)
        self.mlp = FeedForward(DIM, 2 * DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        for _ in range(self.calls):
            x = x + self.attn(x)
            x = x + self.mlp(x)
        return self.head(x.mean(1))


class MixerLayer(nn.Module):
    """Tokens mixed by convolutions of width 1 whose channels are the tokens."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.tokens = nn.Sequential(nn.Conv1d(TOKENS, 2 * TOKENS, 1), nn.GELU(), nn.Conv1d(2 * TOKENS, TOKENS, 1))
        self.channels = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x))
        return x + self.channels(self.norm2(x))


class ConvMixerMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.layers = nn.Sequential(*(MixerLayer() for _ in range(DEPTH)))
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES))

    def forward(self, x):
        return self.head(self.layers(self.embed(x).flatten(2).transpose(1, 2)).mean(dim=1))


class SequenceFirstBlock(nn.Module):
    """Tokens on the first axis, as `nn.MultiheadAttention` has them by default: [N, B, C]."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = nn.MultiheadAttention(DIM, HEADS)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class SequenceFirstViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, DIM, PATCH, PATCH, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(DIM))
        self.positional_embedding = nn.Parameter(torch.randn(TOKENS + 1, DIM))
        self.resblocks = nn.ModuleList(SequenceFirstBlock() for _ in range(DEPTH))
        self.proj = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        x = self.conv1(x).flatten(2).permute(2, 0, 1)
        x = torch.cat([self.class_embedding.expand(1, x.shape[1], -1), x]) + self.positional_embedding[:, None]
        for block in self.resblocks:
            x = block(x)
        return self.proj(x[0])


class ParallelBlock(nn.Module):
    """Attention and MLP side by side on one norm, added at once."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attn = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.SiLU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        y = self.norm(x)
        return x + self.attn(y, y, y)[0] + self.ff(y)


class GatedBlock(nn.Module):
    """Branches let in by learned gates: x + sigmoid(g) * f(x)."""

    def __init__(self):
        super().__init__()
        self.attn, self.mlp = Attention(DIM, HEADS), FeedForward(DIM, 2 * DIM)
        self.gates = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        x = x + torch.sigmoid(self.gates[0]) * self.attn(x)
        return x + torch.sigmoid(self.gates[1]) * self.mlp(x)


class BlockViT(nn.Module):
    """A patch convolution, blocks of any class in a Sequential, the mean of the tokens."""

    def __init__(self, block):
        super().__init__()
        self.stem = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.pos = nn.Parameter(torch.randn(1, TOKENS, DIM))
        self.blocks = nn.Sequential(*(block() for _ in range(DEPTH)))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x).flatten(2).transpose(1, 2) + self.pos).mean(1))


class FlipAveraged(nn.Module):
    """Runs its network on the image and on its mirror image."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return (self.network(x) + self.network(x.flip(-1))) / 2
