"""What the head of a pyramid reads of its backbone."""

import pytest
import timm
import torch

from vitclinic.data import ImageSpec
from vitclinic.models.pyramid import find_leaves
from vitclinic.models.segmenter import Segmenter

BACKBONES = {
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 3},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": [1, 1, 1, 1]},
    "resnet18": {},
}


@pytest.mark.parametrize("name", BACKBONES)
def test_what_trains_is_what_a_backward_pass_reaches(name):
    backbone = timm.create_model(name, num_classes=0, **BACKBONES[name])
    size = BACKBONES[name].get("img_size", 32)
    network = Segmenter(backbone, ImageSpec(3, 3, (size, size)), width=8, auxiliary=True)
    trained = {key for key, parameter in network.named_parameters() if parameter.requires_grad}
    network.requires_grad_(True)
    network.eval()
    sum(output.sum() for output in network.outputs(torch.rand(2, 3, size, size))).backward()
    assert trained == {key for key, parameter in network.named_parameters() if parameter.grad is not None}


def test_leaves_are_found_wherever_a_graph_joins():
    used, twice, unused = (torch.ones(2, requires_grad=True) for _ in range(3))
    stopped = torch.ones(2, requires_grad=True)
    hidden = used * twice + stopped.detach()
    assert find_leaves([hidden.exp() + hidden, (unused * 0).sum().detach()]) == {used, twice}
