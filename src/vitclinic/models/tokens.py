"""Kinds of tokens of a network that reads words beside patches, told to whoever acts on all tokens of a block.

Treatments and probes sit in the blocks of a network, where a token no longer shows what it is. The network says it for
the time of a pass.

Shapes: B images, N tokens, the words before the patches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenKinds:
    """Which tokens of a sequence are words, and which of these only fill it up.

    Example:
        >>> kinds = TokenKinds(torch.tensor([[False, True]]), patches=3)
        >>> kinds.of("text").tolist(), kinds.of("image").tolist()
        ([[True, False, False, False, False]], [[False, False, True, True, True]])
    """

    padding: Tensor
    """[B, W], true where a word is only there to fill the question up."""
    patches: int
    """Tokens of the image, its class token included."""

    def of(self, kind: str) -> Tensor:
        """Return [B, N], true for the tokens of a kind: `text`, `image` or `all` but padding."""
        words = ~self.padding if kind != "image" else torch.zeros_like(self.padding)
        patches = self.padding.new_full((len(self.padding), self.patches), kind != "text")
        return torch.cat([words, patches], dim=1)


_PASSING: ContextVar[TokenKinds | None] = ContextVar("passing", default=None)


@contextmanager
def announce_tokens(kinds: TokenKinds) -> Iterator[None]:
    """Say which tokens pass through the blocks of a network inside this context."""
    before = _PASSING.set(kinds)
    try:
        yield
    finally:
        _PASSING.reset(before)


def passing_tokens() -> TokenKinds | None:
    """Return the kinds of the tokens that pass through a network with words; None where there are only patches."""
    return _PASSING.get()
