"""A network that answers questions about images: ViLT [Kim et al. 2021], with any of timm's ViTs as its transformer.

Words and patches are tokens of one sequence, which the blocks of the ViT see together; the answer is read from the
first of them. So treatments of the ViT act in it as they do on images alone, and weights of ViTs fit. transformers has
the same network, but puts the patches in random order.

Shapes: B images, P questions about them, W words, N patches with the class token, D channels, K answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vitclinic._core.errors import ModelError
from vitclinic.data.text import TextSpec
from vitclinic.models.headed import Headed
from vitclinic.models.tokens import TokenKinds, announce_tokens


class Words(nn.Module):
    """Embedding of words: token, position and normalization.

    Args:
        spec: The vocabulary and the length of questions.
        width: Channels D.
    """

    def __init__(self, spec: TextSpec, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(spec.tokens), width)
        self.positions = nn.Parameter(torch.empty(1, spec.length, width))
        self.norm = nn.LayerNorm(width)
        for weight in (self.tokens.weight, self.positions):
            nn.init.trunc_normal_(weight, std=0.02)

    def forward(self, numbers_pw: Tensor) -> Tensor:
        x_pwd: Tensor = self.norm(self.tokens(numbers_pw) + self.positions)
        return x_pwd


class Answerer(Headed):
    """A ViT that reads a question with the image and scores the answers.

    Args:
        backbone: One of timm's `VisionTransformer`s.
        text: The vocabulary of the questions.
        answers: Number of answers K.

    Raises:
        ModelError: The network is no such ViT.

    Example:
        >>> import timm
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=0)
        >>> network = Answerer(vit, TextSpec.of_questions(["is there a star"]), answers=2)
        >>> network(torch.zeros(1, 3, 32, 32), ["is there a star"]).shape
        torch.Size([1, 2])
    """

    num_classes = 0
    """Without a question it returns features of the image."""

    def __init__(self, backbone: nn.Module, text: TextSpec, answers: int) -> None:
        super().__init__(backbone)
        if not isinstance(backbone, VisionTransformer):
            raise ModelError(
                f"Words join the patches of timm's VisionTransformer, and the network is a {type(backbone).__name__}:"
                " choose a ViT, such as vit_tiny_fitted."
            )
        width = backbone.embed_dim
        self.text = text
        self.words = Words(text, width)
        self.kinds = nn.Parameter(torch.empty(2, width))
        self.pooler = nn.Linear(width, width)
        hidden, last = nn.Linear(width, 2 * width), nn.Linear(2 * width, answers)
        self.classifier = nn.Sequential(hidden, nn.LayerNorm(2 * width), nn.GELU(), last)
        nn.init.trunc_normal_(self.kinds, std=0.02)
        for layer in (self.pooler, hidden, last):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor, questions: str | Sequence[str] | Tensor | None = None) -> Tensor:
        """Return the scores of the answers; without questions, the ViT's features of the images alone [B, D].

        Args:
            images: Normalized images.
            questions: A question about all images, or the same number about each, those of an image together, or the
                numbers of their tokens [P, W] (`encode`).

        Returns:
            The scores of the answer to each question, [P, K].
        """
        if isinstance(questions, str):
            questions = [questions] * len(images)
        if questions is None:
            features: Tensor = self.backbone(images)
            return features
        x_pd = self.join(images, questions)[:, 0]
        scores_pk: Tensor = self.classifier(torch.tanh(self.pooler(x_pd)))
        return scores_pk

    def encode(self, questions: Sequence[str]) -> Tensor:
        """Return the numbers of the tokens of questions, [B, W]."""
        return torch.tensor([self.text.encode(question) for question in questions], device=self.kinds.device)

    def join(self, images: Tensor, questions: Sequence[str] | Tensor) -> Tensor:
        """Return words and patches after the last block, [P, W + N, D]."""
        numbers_pw = questions if isinstance(questions, Tensor) else self.encode(questions)
        if len(numbers_pw) % max(1, len(images)):
            raise ModelError(
                f"There are {len(numbers_pw)} questions for {len(images)} images; ask the same number of each."
            )
        vit: Any = self.backbone  # timm's VisionTransformer, whose parts have no types
        words = self.words(numbers_pw) + self.kinds[0]
        patches = vit.patch_drop(vit._pos_embed(vit.patch_embed(images))) + self.kinds[1]
        if len(numbers_pw) > len(images):  # the patches of an image are made once for all that is asked about it
            patches = patches.repeat_interleave(len(numbers_pw) // len(images), dim=0)
        x_pnd = vit.norm_pre(torch.cat([words.to(patches.dtype), patches], dim=1))
        kinds = TokenKinds(numbers_pw == self.text.padding, patches.shape[1])
        mask = kinds.of("all")[:, None, None, :]
        with announce_tokens(kinds):
            for block in vit.blocks:
                x_pnd = block(x_pnd, attn_mask=mask)
        joined: Tensor = vit.fc_norm(vit.norm(x_pnd))  # one of the two is no layer
        return joined
