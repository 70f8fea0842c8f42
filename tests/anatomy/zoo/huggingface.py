"""Hugging Face's architectures from small configurations: classifiers where there are, else encoders without a head."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.anatomy.zoo.entry import Entry

_VIT = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
}
_SWIN = {"image_size": 64, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
_STAGES = {"depths": [2, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64]}
_HEADS = {"num_attention_heads": [1, 2, 3, 4]}


def _entry(model: str, config: str, size: int, attention: bool, notes: str = "", **settings: Any) -> tuple[str, Entry]:
    """An entry named after its class; classifiers get ten labels."""

    def construct() -> nn.Module:
        import transformers  # slow to import, and absent from a base install

        labels = {"num_labels": 10} if "ForImageClassification" in model else {}
        return getattr(transformers, model)(getattr(transformers, config)(**labels, **settings))

    return model, Entry(construct, (3, size, size), "transformers", attention, notes)


def _classifier(family: str, size: int, attention: bool, notes: str = "", **settings: Any) -> tuple[str, Entry]:
    return _entry(f"{family}ForImageClassification", f"{family}Config", size, attention, notes, **settings)


def _vit(family: str, notes: str = "", **settings: Any) -> tuple[str, Entry]:
    return _classifier(family, 32, True, notes, **(_VIT | settings))


_PLAIN = (
    _vit("ViT"),
    _vit("DeiT", "distillation token"),
    _vit("Beit", "no position embedding"),
    _vit("Data2VecVision", "relative position bias", use_relative_position_bias=True),
    _vit("Dinov2", "layer scale"),
    _vit("Dinov2WithRegisters", "layer scale, registers"),
    _vit("ViTMSN"),
    _vit("IJepa", "no class token"),
    _classifier("CLIP", 32, True, "vision half alone", vision_config=_VIT),
    _classifier("Siglip", 32, True, "vision half alone", vision_config=_VIT),
    _entry("DINOv3ViTModel", "DINOv3ViTConfig", 32, True, "rotary positions, no head", num_register_tokens=2, **_VIT),
    _entry("CLIPVisionModel", "CLIPVisionConfig", 32, True, "no head", **_VIT),
    _entry("SiglipVisionModel", "SiglipVisionConfig", 32, True, "attention pooling, no head", **_VIT),
    _entry("Aimv2VisionModel", "Aimv2VisionConfig", 32, True, "RMSNorm, SwiGLU, no head", **_VIT),
    _entry("BlipVisionModel", "BlipVisionConfig", 32, True, "fused queries, keys and values, no head", **_VIT),
    _entry("MLCDVisionModel", "MLCDVisionConfig", 32, True, "rotary positions, no head", **_VIT),
    _entry("YolosModel", "YolosConfig", 32, True, "detection tokens behind", **(_VIT | {"image_size": [32, 32]})),
    _entry("ViTMAEModel", "ViTMAEConfig", 32, True, "draws an order of patches at every call", mask_ratio=0.0, **_VIT),
    _entry(
        "VitDetModel",
        "VitDetConfig",
        32,
        True,
        "NHWC, windows, no head",
        **_VIT | {"window_size": 2, "window_block_indices": [0]},
    ),
)

_HIERARCHICAL = (
    _classifier("Swin", 64, True, "windows", **_SWIN),
    _classifier("Swinv2", 64, True, "windows, cosine attention, norms behind", **_SWIN),
    _classifier("DonutSwin", 64, True, "windows", **_SWIN),
    _classifier(
        "Hiera", 64, True, "mask units", embed_dim=16, image_size=[64, 64], depths=[1, 1, 2, 1], num_heads=[1, 2, 4, 8]
    ),
    _classifier(
        "Cvt", 64, True, "convolutional projections", embed_dim=[16, 32, 48], num_heads=[1, 2, 3], depth=[1, 2, 3]
    ),
    _classifier("Levit", 128, True, "attention bias, subsampling attention", image_size=128, depths=[1, 1, 1]),
    _classifier("MobileViT", 128, True, "unfolded patches", image_size=128, hidden_sizes=[32, 48, 64]),
    _classifier("Pvt", 64, True, "reduced keys", image_size=64, **_STAGES, **_HEADS),
    _classifier("PvtV2", 64, True, "reduced keys", image_size=64, **_STAGES, **_HEADS),
    _classifier("Segformer", 64, True, "reduced keys", **_STAGES, **_HEADS),
)

_CONVOLUTIONAL = (
    _classifier("MobileViTV2", 128, False, "separable linear attention", image_size=128, width_multiplier=0.5),
    _classifier("PoolFormer", 64, False, "", **_STAGES),
    _classifier("SwiftFormer", 64, False, "additive attention", image_size=64, depths=[1, 1, 1, 1]),
    _classifier("FocalNet", 64, False, "focal modulation", image_size=64, embed_dim=16, depths=[2, 1, 1, 1]),
    _classifier("ConvNext", 64, False, "", **_STAGES),
    _classifier("ConvNextV2", 64, False, "global response norm", **_STAGES),
    _entry("DINOv3ConvNextModel", "DINOv3ConvNextConfig", 64, False, "no head", **_STAGES),
    _classifier("ResNet", 64, False, "", **_STAGES),
    _classifier("RegNet", 64, False, "", depths=[2, 1, 1, 1], hidden_sizes=[16, 32, 48, 64], groups_width=8),
    _classifier("Bit", 64, False, "pre-activation", depths=[2, 1, 1, 1], hidden_sizes=[32, 64, 96, 128], num_groups=4),
    _classifier("EfficientNet", 64, False, "", width_coefficient=0.5, depth_coefficient=0.5, hidden_dim=640),
    _classifier("MobileNetV1", 64, False, "no residuals", depth_multiplier=0.25),
    _classifier("MobileNetV2", 64, False, "", depth_multiplier=0.35),
    _classifier("HGNetV2", 64, False, "", stage_num_blocks=[1, 1, 1, 1]),
    _classifier("TextNet", 64, False, "branches of convolutions", image_size=[64, 64]),
    _classifier("PPLCNet", 64, False, "no residuals", scale=0.5),
)

HUGGING_FACE: dict[str, Entry] = dict([*_PLAIN, *_HIERARCHICAL, *_CONVOLUTIONAL])
