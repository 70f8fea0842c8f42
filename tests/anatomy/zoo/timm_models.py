"""timm's architectures, every module of it at least once, cut down where their classes allow it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import timm
from torch import nn

from tests.anatomy.zoo.entry import Entry

NUM_CLASSES = 10


def _create(name: str, cuts: dict[str, Any]) -> nn.Module:
    """Build a registered network with `cuts` put last, because many entry points refuse to have them overridden."""
    home = importlib.import_module(timm.models.model_entrypoint(name).__module__)
    build = getattr(home, "build_model_with_cfg", None)
    if build is None:  # built by another module's function, whose entry point takes the keywords
        return timm.create_model(name, num_classes=NUM_CLASSES, **cuts)

    def build_cut(*arguments: Any, **keywords: Any) -> nn.Module:
        return build(*arguments, **(keywords | cuts))

    with mock.patch.object(home, "build_model_with_cfg", build_cut):
        return timm.create_model(name, num_classes=NUM_CLASSES)


def _entry(name: str, size: int, attention: bool, notes: str = "", **cuts: Any) -> tuple[str, Entry]:
    construct: Callable[[], nn.Module] = lambda: _create(name, cuts)  # noqa: E731
    return name, Entry(construct, (3, size, size), "timm", attention, notes)


def _attentive(name: str, size: int, notes: str = "", **cuts: Any) -> tuple[str, Entry]:
    return _entry(name, size, True, notes, **cuts)


def _plain(name: str, size: int, notes: str = "", **cuts: Any) -> tuple[str, Entry]:
    return _entry(name, size, False, notes, **cuts)


def _vit(name: str, notes: str = "", **cuts: Any) -> tuple[str, Entry]:
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    return _entry(name, 32, True, notes, **(small | cuts))


_DEPTHS = (2, 1, 1, 1)
_DIMS = (16, 32, 48, 64)
_HEADS = (1, 2, 3, 4)

_TRANSFORMERS = (
    _vit("vit_tiny_patch16_224"),
    _vit("vit_base_patch16_gap_224", "no class token"),
    _vit("vit_base_patch16_rpn_224", "norms behind the branches"),
    _vit("vit_small_patch16_18x2_224", "two attentions side by side, then two MLPs"),
    _vit("vit_pwee_patch16_reg1_gap_256", "attention and MLP in parallel from one projection"),
    _vit("vit_dpwee_patch16_reg1_gap_256", "differential attention, parallel"),
    _vit("vit_dwee_patch16_reg1_gap_256", "differential attention: the difference of two maps"),
    _vit("vit_medium_patch16_reg4_gap_256", "four registers, no class token"),
    _vit("vit_small_patch14_reg4_dinov2", "class token, registers, layer scale"),
    _vit("vit_base_patch16_clip_quickgelu_224", "norm before the blocks, QuickGELU"),
    _vit("vit_base_patch16_siglip_256", "attention-pooling head"),
    _vit("vit_base_patch16_xp_224", "norms inside attention and MLP"),
    _vit("aimv2_large_patch14_224", "RMSNorm, SwiGLU"),
    _vit("beit3_base_patch16_224", "norms inside attention and MLP"),
    _vit("flexivit_small", "position embedding without the class token"),
    _vit("vit_intern300m_patch14_448", "RMSNorm of queries and keys"),
    _vit("test_vit4"),
    _vit("deit_tiny_patch16_224"),
    _vit("deit_tiny_distilled_patch16_224", "distillation token, two heads averaged"),
    _vit("deit3_small_patch16_224", "layer scale"),
    _vit("beit_base_patch16_224", "relative position bias, no absolute one"),
    _vit("beitv2_base_patch16_224", "relative position bias"),
    _vit("eva02_tiny_patch14_224", "rotary positions, SwiGLU", embed_dim=48, num_heads=3),
    _vit("eva_giant_patch14_224", "absolute positions"),
    _vit("vit_small_patch16_dinov3", "rotary positions, registers"),
    _vit("vit_small_patch16_rope_mixed_224", "learned rotary frequencies"),
    _vit("vit_pe_core_tiny_patch16_384", "rotary positions, attention pooling"),
    _vit("vit_relpos_small_patch16_224", "relative positions by an MLP"),
    _vit("vit_srelpos_small_patch16_224", "relative positions shared by all blocks"),
    _vit("vit_relpos_base_patch16_clsgap_224", "class token that the head ignores"),
    _vit(
        "samvit_base_patch16_224",
        "windows, global in one block, NHWC, convolutional neck",
        window_size=2,
        global_attn_indexes=(1,),
    ),
    _attentive("vit_tiny_r_s16_p8_224", 64, "convolutional stem of ResNetV2", embed_dim=48, depth=2, img_size=64),
    _attentive("vit_small_r26_s32_224", 64, "ResNetV2-26 before the patches", embed_dim=48, depth=2, img_size=64),
    _vit("cait_xxs24_224", "talking heads; class attention in blocks of its own"),
    _vit("convit_tiny", "gated positional attention, then ordinary", local_up_to_layer=1),
    _vit("xcit_nano_12_p16_224", "attention over channels; class attention over tokens", cls_attn_layers=1),
    _attentive(
        "tnt_s_patch16_224",
        32,
        "attention among the pixels of a patch, and among patches",
        img_size=32,
        patch_size=8,
        embed_dim=48,
        inner_dim=12,
        depth=2,
        num_heads_inner=2,
        num_heads_outer=3,
    ),
    _attentive(
        "crossvit_tiny_240",
        120,
        "two branches of patch sizes, fused by cross attention",
        img_size=120,
        embed_dim=(24, 48),
        depth=((1, 2, 0), (1, 2, 0)),
        num_heads=(3, 3),
    ),
    _attentive("pit_ti_224", 64, "pooling between stages", img_size=64, base_dims=(8, 8, 8), depth=(2, 1, 1)),
    _attentive("pit_ti_distilled_224", 64, "pooling, two tokens", img_size=64, base_dims=(8, 8, 8), depth=(2, 1, 1)),
    _vit("naflexvit_base_patch16_gap", "sequences of any grid"),
    _vit("naflexvit_base_patch16_map", "attention pooling"),
    _vit("naflexvit_base_patch16_par_gap", "aspect-preserving positions"),
    _vit("deepseek_vit_412m", "rotary, SwiGLU"),
    _vit("qwen3_vit_88m", "merges tokens"),
    _vit("gemma4_vit_167m", "four norms a block", num_heads=3, head_dim=16, intermediate_size=96),
)

_HIERARCHICAL = (
    _attentive(
        "swin_tiny_patch4_window7_224", 64, "windows", img_size=64, embed_dim=12, depths=_DEPTHS, num_heads=_HEADS
    ),
    _attentive("swin_s3_tiny_224", 64, "windows by stage", img_size=64, embed_dim=12, depths=_DEPTHS, num_heads=_HEADS),
    _attentive(
        "swinv2_tiny_window8_256",
        64,
        "cosine attention, norms behind",
        img_size=64,
        window_size=4,
        embed_dim=12,
        depths=_DEPTHS,
        num_heads=_HEADS,
    ),
    _attentive(
        "swinv2_cr_tiny_224", 64, "cosine attention", img_size=64, embed_dim=12, depths=_DEPTHS, num_heads=_HEADS
    ),
    _attentive(
        "twins_pcpvt_small",
        64,
        "reduced keys, convolutional positions",
        img_size=64,
        embed_dims=_DIMS,
        depths=_DEPTHS,
        num_heads=_HEADS,
    ),
    _attentive(
        "twins_svt_small",
        64,
        "windows and reduced keys in turn",
        img_size=64,
        embed_dims=_DIMS,
        depths=(2, 2, 2, 2),
        num_heads=_HEADS,
    ),
    _attentive("pvt_v2_b0", 64, "reduced keys", embed_dims=_DIMS, depths=_DEPTHS, num_heads=_HEADS),
    _attentive("pvt_v2_b2_li", 64, "pooled keys", embed_dims=_DIMS, depths=_DEPTHS, num_heads=_HEADS),
    _attentive("mvitv2_tiny", 64, "pooled queries and keys", img_size=64),
    _attentive("mvitv2_small_cls", 64, "pooled, class token", img_size=64),
    _attentive(
        "nest_tiny",
        64,
        "blocks of an image as batch",
        img_size=64,
        embed_dims=(16, 32, 48),
        depths=(1, 1, 2),
        num_heads=(1, 2, 3),
    ),
    _attentive(
        "hiera_tiny_224",
        64,
        "mask units, pooled queries",
        img_size=(64, 64),
        embed_dim=16,
        stages=(1, 1, 2, 1),
        q_pool=3,
        mask_unit_size=(8, 8),
    ),
    _attentive("sam2_hiera_tiny", 64, "windows, NHWC", embed_dim=16, stages=(1, 1, 2, 1), global_att_blocks=(3,)),
    _attentive(
        "gcvit_xxtiny",
        64,
        "windows and global queries",
        img_size=64,
        embed_dim=16,
        depths=(2, 2, 2, 2),
        num_heads=(1, 2, 4, 8),
    ),
    _attentive(
        "davit_tiny", 64, "windows and channels in turn", embed_dims=_DIMS, depths=(1, 1, 2, 1), num_heads=_HEADS
    ),
    _plain(
        "coat_tiny",
        64,
        "factorised attention: a softmax of the keys, no map",
        img_size=64,
        embed_dims=(16, 16, 16, 16),
        serial_depths=(1, 1, 1, 1),
    ),
    _plain(
        "coat_lite_tiny",
        64,
        "factorised attention: a softmax of the keys, no map",
        img_size=64,
        embed_dims=_DIMS,
        serial_depths=_DEPTHS,
    ),
    _attentive(
        "volo_d1_224",
        64,
        "outlook attention, class blocks",
        img_size=64,
        layers=(1, 1, 1, 1),
        embed_dims=(16, 32, 32, 32),
        num_heads=(2, 2, 2, 2),
    ),
    _attentive("test_maxvit", 64, "convolution, windows, grid", img_size=64),
    _attentive("test_coatnet", 64, "convolution stages, then attention", img_size=64),
    _attentive("coatnet_nano_rw_224", 64, "relative position bias", img_size=64),
    _attentive("maxxvit_rmlp_nano_rw_256", 64, "ConvNeXt blocks, windows, grid", img_size=64),
    _attentive("caformer_s18", 64, "convolution stages, then attention", dims=(16, 32, 64, 64), depths=_DEPTHS),
    _attentive("levit_128s", 128, "attention bias, subsampling attention", img_size=128),
    _attentive("levit_conv_128s", 128, "NCHW, attention bias", img_size=128),
    _attentive("mobilevit_xxs", 128, "unfolded patches", img_size=128),
    _attentive("tiny_vit_5m_224", 64, "windows, MBConv", embed_dims=_DIMS, depths=_DEPTHS, num_heads=_HEADS),
    _attentive("visformer_tiny", 64, "convolution stage, NCHW attention", img_size=64),
    _attentive("efficientformer_l1", 224, "pooling stages, attention at the end", depths=_DEPTHS, embed_dims=_DIMS),
    _attentive("efficientformerv2_s0", 64, "talking heads, strided attention", img_size=64),
    _attentive("efficientvit_m0", 128, "cascaded groups", img_size=128),
    _attentive("nextvit_small", 64, "pooled keys, convolutional attention", depths=(1, 1, 5, 1)),
    _attentive("vitamin_small_224", 64, "MBConv stem, GeGLU", img_size=64, depth=2),
    _attentive("fastvit_sa12", 64, "reparametrised mixers, attention at the end", embed_dims=(32, 32, 64, 64)),
    _attentive("mobilenetv4_hybrid_medium_075", 64, "multi-query attention"),
    _attentive("mobilenetv5_base", 64, "multi-query attention, fusion of scales"),
    _attentive("shvit_s1", 128, "one head on part of the channels"),
    _attentive("lowformer_b0", 64, "attention on a smaller grid"),
    _attentive("cpubone_nano", 64, "attention on a smaller grid"),
    _attentive("iformer_t", 64, "one modulated head"),
    _attentive("csatv2", 128, "DCT stem", depths=(1, 1, 2, 2), transformer_depths=(0, 0, 1, 1)),
    _attentive("botnet26t_256", 64, "attention in the bottleneck", img_size=64),
    _attentive("halonet26t", 256, "blocks with halo"),
    _attentive("resnet50_clip", 64, "attention-pooling head", img_size=64),
)

_MIXERS = (
    _plain("mixer_s16_224", 32, img_size=32, patch_size=8, embed_dim=48, num_blocks=2),
    _plain("gmixer_12_224", 32, "gated", img_size=32, patch_size=8, embed_dim=48, num_blocks=2),
    _plain("resmlp_12_224", 32, "affine norms", img_size=32, patch_size=8, embed_dim=48, num_blocks=2),
    _plain(
        "gmlp_ti16_224", 32, "spatial gating inside one branch", img_size=32, patch_size=8, embed_dim=48, num_blocks=2
    ),
    _plain("convmixer_768_32", 32, dim=48, depth=2, kernel_size=3, patch_size=4),
    _plain("poolformer_s12", 64, dims=_DIMS, depths=_DEPTHS),
    _plain("convformer_s18", 64, dims=_DIMS, depths=_DEPTHS),
    _plain(
        "sequencer2d_s",
        56,
        "LSTMs along both axes",
        embed_dims=(24, 48, 48, 48),
        hidden_sizes=(6, 12, 12, 12),
        layers=_DEPTHS,
    ),
    _plain("focalnet_tiny_srf", 64, "focal modulation", embed_dim=16, depths=_DEPTHS),
    _plain("mambaout_femto", 64, dims=_DIMS, depths=_DEPTHS),
    _plain("swiftformer_xs", 64, "additive attention", embed_dims=_DIMS, layers=_DEPTHS),
    _plain("efficientvit_b0", 64, "linear attention"),
    _plain("efficientvit_l1", 64, "linear attention"),
    _plain("efficientvim_m1", 128, "state-space mixing"),
    _plain("mobilevitv2_050", 128, "separable linear attention"),
    _plain("edgenext_xx_small", 64, "attention over channels"),
    _plain("fastvit_t8", 64, "reparametrised mixers", embed_dims=(16, 32, 64, 128)),
    _plain("inception_next_atto", 64, dims=_DIMS, depths=_DEPTHS),
    _plain("convnext_atto", 64, dims=_DIMS, depths=_DEPTHS),
    _plain("convnextv2_atto", 64, "global response norm", dims=_DIMS, depths=_DEPTHS),
    _plain("rdnet_tiny", 64, "dense connections"),
    _plain("starnet_s050", 64, "products of branches"),
    _plain("fasternet_t0", 64, "partial convolutions"),
    _plain("repvit_m0_9", 64, "reparametrised"),
    _plain("lambda_resnet26t", 64, "lambda layers"),
    _plain("lambda_resnet26rpt_256", 64, "lambda layers, relative positions", img_size=64),
)

_CONVNETS = (
    _plain("resnet18", 64),
    _plain("resnet26t", 64, "bottleneck"),
    _plain("resnetblur18", 64),
    _plain("seresnet18", 64),
    _plain("ecaresnet26t", 64),
    _plain("resnext50_32x4d", 64, layers=_DEPTHS),
    _plain("resnetv2_18", 64, "pre-activation"),
    _plain("resnetv2_50x1_bit", 64, "pre-activation, standardised weights", layers=_DEPTHS),
    _plain("gcresnet33ts", 64, "global context"),
    _plain("bat_resnext26ts", 256, "bilinear attention"),
    _plain("repvgg_a0", 64),
    _plain("mobileone_s0", 64),
    _plain("gernet_s", 64),
    _plain("regnetz_b16", 64),
    _plain("regnetx_002", 64),
    _plain("regnety_002", 64),
    _plain("test_nfnet", 64),
    _plain("nf_resnet26", 64),
    _plain("res2net50_14w_8s", 64, layers=_DEPTHS),
    _plain("resnest14d", 64),
    _plain("skresnet18", 64),
    _plain("legacy_seresnet18", 64),
    _plain("tresnet_m", 64, layers=_DEPTHS),
    _plain("selecsls42", 64, "no residuals"),
    _plain("dla46_c", 64),
    _plain("dpn48b", 64, "residual and dense"),
    _plain("densenet121", 64, "no residuals", growth_rate=8, block_config=(2, 2, 2, 2)),
    _plain("cspresnet50", 64),
    _plain("cs3darknet_s", 64),
    _plain("darknet17", 64),
    _plain("cspnext_tiny", 64),
    _plain("hrnet_w18_small", 64, "four resolutions side by side"),
    _plain("vgg11", 64, "no residuals", mlp_ratio=1 / 32),
    _plain("vgg11_bn", 64, "no residuals", mlp_ratio=1 / 32),
    _plain("vovnet39a", 64, "one-shot aggregation"),
    _plain("ese_vovnet19b_slim", 64, "one-shot aggregation"),
    _plain("xception41", 64),
    _plain("legacy_xception", 64),
    _plain("inception_v3", 160, "no residuals"),
    _plain("inception_v4", 160, "no residuals"),
    _plain("inception_resnet_v2", 160, "scaled residuals"),
    _plain("nasnetalarge", 96, "cells of sums"),
    _plain("pnasnet5large", 96, "cells of sums"),
    _plain("rexnet_100", 64, "residuals on part of the channels"),
    _plain("ghostnet_050", 64),
    _plain("ghostnetv2_100", 128),
    _plain("repghostnet_050", 64),
    _plain("hgnetv2_b0", 64),
    _plain("hardcorenas_a", 64),
    _plain("lcnet_050", 64, "no residuals"),
    _plain("lcnetv2_small", 64),
    _plain("mobilenetv3_small_050", 64),
    _plain("mobilenetv4_conv_small_050", 64),
    _plain("mobilenetv2_050", 64),
    _plain("mobilenetv1_100", 64, "no residuals"),
    _plain("mixnet_s", 64),
    _plain("mnasnet_small", 64),
    _plain("tinynet_e", 64),
    _plain("test_efficientnet", 64),
    _plain("efficientnet_b0", 64),
)

TIMM: dict[str, Entry] = dict([*_TRANSFORMERS, *_HIERARCHICAL, *_MIXERS, *_CONVNETS])
