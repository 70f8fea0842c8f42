"""Pre-activation ResNet: its size in closed form, its arithmetic written out, and timm's conventions."""

import pytest
import timm
import torch
from torch.nn import functional as F

from vitclinic._core.errors import ModelError
from vitclinic.models import PreActResNet, check_fit, create_model
from vitclinic.models.preact_resnet import PreActBasicBlock, PreActBottleneck

LAYERS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
SMALL = {"layers": (2, 1, 1, 2), "channels": (4, 4, 8, 8), "num_classes": 5}


def conv_parameters(depth: int, in_channels: int, width: int, first: bool) -> int:
    """Of one block, its norms (two numbers a channel) and the projection of a stage's first block included."""
    if depth >= 50:
        convs = in_channels * width + 9 * width * width + width * 4 * width
        norms, out_channels = 2 * (in_channels + width + width), 4 * width
    else:
        convs, norms, out_channels = 9 * in_channels * width + 9 * width * width, 2 * (in_channels + width), width
    projection = in_channels * out_channels if first and (width > 64 or in_channels != out_channels) else 0
    return convs + norms + projection


def network_parameters(depth: int, layers: tuple[int, ...], stem: str, classes: int) -> int:
    expansion = 4 if depth >= 50 else 1
    total = 3 * 64 * (49 if stem == "imagenet" else 9)
    channels = 64
    for stage, blocks in enumerate(layers):
        width = 64 * 2**stage
        for index in range(blocks):
            total += conv_parameters(depth, channels, width, index == 0)
            channels = width * expansion
    return total + 2 * channels + channels * classes + classes


@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
@pytest.mark.parametrize("depth", LAYERS)
def test_the_number_of_parameters_in_closed_form(depth, stem):
    with torch.device("meta"):
        network = timm.create_model(f"preact_resnet{depth}", stem=stem, num_classes=100)
    assert sum(p.numel() for p in network.parameters()) == network_parameters(depth, LAYERS[depth], stem, 100)


def test_the_convs_of_timm_s_pre_activation_resnet():
    with torch.device("meta"):
        ours, theirs = timm.create_model("preact_resnet50"), timm.create_model("resnetv2_50", num_classes=0)
    shapes = [sorted(tuple(p.shape) for p in net.parameters() if p.ndim == 4) for net in (ours, theirs)]
    assert shapes[0] == shapes[1]


def norm(x, module):
    return F.batch_norm(x, module.running_mean, module.running_var, module.weight, module.bias)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kind", [PreActBasicBlock, PreActBottleneck])
def test_a_block_written_out(kind, stride):
    torch.manual_seed(0)
    channels = 8
    block = kind(channels, channels // kind.expansion, stride).double()
    block.train()(torch.randn(4, channels, 6, 6, dtype=torch.float64))  # running statistics other than 0 and 1
    block.eval()
    x = torch.randn(2, channels, 6, 6, dtype=torch.float64)
    activated = norm(x, block.bn1).relu()
    skip = x if stride == 1 else F.conv2d(activated, block.downsample.weight, stride=2)
    if kind is PreActBasicBlock:
        y = F.conv2d(activated, block.conv1.weight, stride=stride, padding=1)
        y = F.conv2d(norm(y, block.bn2).relu(), block.conv2.weight, padding=1)
    else:
        y = F.conv2d(activated, block.conv1.weight)
        y = F.conv2d(norm(y, block.bn2).relu(), block.conv2.weight, stride=stride, padding=1)
        y = F.conv2d(norm(y, block.bn3).relu(), block.conv3.weight)
    assert torch.allclose(block(x), skip + y, rtol=1e-12)


@pytest.mark.parametrize(("stem", "grids"), [("imagenet", (16, 8, 4, 2)), ("cifar", (64, 32, 16, 8))])
def test_grids_of_the_stages_and_feature_extraction(stem, grids):
    features = timm.create_model("preact_resnet50", stem=stem, features_only=True, **SMALL)
    outputs = features(torch.randn(2, 3, 64, 96))
    assert [tuple(x.shape[2:]) for x in outputs] == [(grid, grid * 3 // 2) for grid in grids]
    assert [x.shape[1] for x in outputs] == features.feature_info.channels()
    assert [64 // grid for grid in grids] == features.feature_info.reduction()


def test_timm_s_conventions():
    network = timm.create_model("preact_resnet50", in_chans=1, drop_rate=0.5, drop_path_rate=0.3, **SMALL).eval()
    x = torch.randn(2, 1, 64, 64)
    features = network.forward_features(x)
    assert features.shape == (2, 32, 2, 2)
    assert torch.equal(network.forward_head(features), network(x))
    assert torch.allclose(network.forward_head(features, pre_logits=True), features.mean((2, 3)))
    assert network.get_classifier() is network.fc
    assert network.pretrained_cfg["classifier"] == "fc"
    rates = [getattr(network.stage(stage)[-1].drop_path, "drop_prob", 0.0) for stage in range(4)]
    assert rates == pytest.approx([0.06, 0.12, 0.18, 0.3])
    network.reset_classifier(7)
    assert network(x).shape == (2, 7)
    network.reset_classifier(0)
    assert network(x).shape == (2, 32)


@pytest.mark.parametrize("name", ["preact_resnet18", "preact_resnet50"])
@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
def test_every_parameter_gets_a_gradient_and_the_state_comes_back(name, stem):
    network = timm.create_model(name, stem=stem, **SMALL)
    x = torch.randn(2, 3, 32, 32)
    network(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    again = timm.create_model(name, stem=stem, **SMALL)
    again.load_state_dict(network.state_dict())
    assert torch.equal(again.eval()(x), network.eval()(x))


def test_through_our_factory():
    network = create_model("preact_resnet18", img_size=32, stem="cifar", in_chans=1, **SMALL)
    check_fit(network, 1, (32, 32), 5)
    assert isinstance(network.backbone, PreActResNet)
    assert network.backbone.conv1.kernel_size == (3, 3)


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"stem": "tiny"}, r"stem is 'tiny'; write 'imagenet' or 'cifar'\."),
        ({"layers": (2, 2)}, r"layers and channels must have one number per stage"),
        ({"colour": 1}, r"does not accept model\.colour"),
        ({"pretrained": True}, r"No pretrained weights exist for preact_resnet50"),
    ],
)
def test_what_cannot_be_built_is_a_sentence(keywords, sentence):
    with pytest.raises(ModelError, match=sentence):
        create_model("preact_resnet50", **keywords)
