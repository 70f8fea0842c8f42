"""ViT-Tiny whose patch follows the image: a default that works from 8 x 8 digits to 224 x 224 photographs."""

from __future__ import annotations

from typing import Any

from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer

_TIMM_ONLY = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")


def fitted_patch(side: int) -> int:
    """The largest patch, up to 16, that divides the image into at least 8 x 8 patches.

    Example:
        >>> [fitted_patch(side) for side in (8, 28, 32, 64, 96, 224)]
        [1, 2, 4, 8, 12, 16]
    """
    return next(patch for patch in range(min(16, max(1, side // 8)), 0, -1) if side % patch == 0)


@register_model  # type: ignore[untyped-decorator]
def vit_tiny_fitted(**keywords: Any) -> VisionTransformer:
    """ViT-Tiny (width 192, depth 12, 3 heads) with `patch_size` derived from `img_size` unless given."""
    for name in _TIMM_ONLY:
        keywords.pop(name, None)
    size = keywords.setdefault("img_size", 224)
    side = size if isinstance(size, int) else min(size)
    defaults = {"patch_size": fitted_patch(side), "embed_dim": 192, "depth": 12, "num_heads": 3}
    return VisionTransformer(**{**defaults, **keywords})
