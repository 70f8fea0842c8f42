"""The hybrid ViT: grids of any image size, size in closed form, and that it is a ViT to everything else."""

import math

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import vitclinic
from vitclinic._core.errors import ModelError
from vitclinic.anatomy import Anatomy
from vitclinic.models import ConvTokenizer, create_model
from vitclinic.models.hybrid import SIZES, fit_stride


@pytest.mark.parametrize("side", [4, 7, 8, 16, 28, 32, 33, 64, 100, 105, 224])
def test_the_stride_leaves_four_to_seven_tokens_along_a_side(side):
    stride = fit_stride(side)
    assert 4 <= math.ceil(side / stride) <= 8
    tokens = ConvTokenizer(side, stride, 1, 16)(torch.rand(2, 1, side, side))
    assert tokens.shape == (2, math.ceil(side / stride) ** 2, 16)


def test_every_pixel_counts_also_at_a_border_that_is_no_whole_patch():
    image = torch.rand(2, 1, 13, 10, requires_grad=True)
    ConvTokenizer((13, 10), 4, 1, 16)(image).square().sum().backward()
    assert (image.grad != 0).all()


def tokenizer_parameters(stages, width, channels):
    total, entering = 0, channels
    for stage in range(stages):
        leaving = width if stage == stages - 1 else min(width, max(32, width // 4) * 2**stage)
        total += 9 * entering * leaving + 2 * leaving
        if stage < stages - 1:
            total += 2 * (9 * leaving**2 + 2 * leaving)
        entering = leaving
    return total


@pytest.mark.parametrize("size", SIZES)
def test_the_number_of_parameters_in_closed_form(size):
    width, depth, ratio = (SIZES[size][key] for key in ("embed_dim", "depth", "mlp_ratio"))
    hidden = int(width * ratio)
    block = 4 * width + 4 * width**2 + 4 * width + 2 * width * hidden + hidden + width
    others = 16 * width + 2 * width + 10 * (width + 1)  # positions, final norm, classifier
    network = create_model("hybrid_vit", size=size, img_size=32, num_classes=10)
    assert sum(p.numel() for p in network.parameters()) == tokenizer_parameters(3, width, 3) + depth * block + others


def test_it_is_a_vit_to_anatomy_probes_and_treatments():
    network = create_model("hybrid_vit", img_size=32, num_classes=5)
    assert isinstance(network.backbone, VisionTransformer)
    kinds = [unit.kind for unit in Anatomy.of(network).units]
    assert kinds == ["stem", "position", "msa", "mlp", "head"]
    treated = vitclinic.treat(network.backbone, "context_broadcasting")
    assert treated(torch.rand(2, 3, 32, 32)).shape == (2, 5)


def test_the_residual_convolutions_start_as_the_identity():
    block = ConvTokenizer(16, 4, 3, 64).proj[3]
    x = torch.rand(2, 32, 8, 8)
    assert torch.equal(block.eval()(x), x)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"size": "huge"}, "model.size is 'huge'; choose one of tiny, small, base."),
        ({"patch_size": 6}, "patch_size is 6; the convolutions of this network need a power of 2."),
        ({"pretrained": True}, "'hybrid_vit' has no published weights."),
    ],
)
def test_what_cannot_be_built_is_a_sentence(keywords, message):
    with pytest.raises(ModelError, match=message):
        create_model("hybrid_vit", img_size=32, **keywords)


def test_without_data_and_time_an_automatic_size_is_the_smallest():
    sizes = [create_model("hybrid_vit", size=size, img_size=32) for size in ("auto", "tiny")]
    assert len({sum(p.numel() for p in network.parameters()) for network in sizes}) == 1
