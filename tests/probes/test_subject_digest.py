"""Two networks that compute different things never share results."""

import pytest
import timm
import torch
from torch import nn

from vitclinic.anatomy import Anatomy
from vitclinic.errors import AnatomyError
from vitclinic.probes.subject import network_digest


def vit(**changes):
    torch.manual_seed(0)
    small = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_classes": 4, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", **{**small, **changes})


def test_settings_that_modules_do_not_print_count():
    assert network_digest(vit()) == network_digest(vit())
    assert network_digest(vit()) != network_digest(vit(num_heads=4))
    assert network_digest(vit().eval()) == network_digest(vit().train())


def test_a_known_class_with_replaced_parts_gets_the_clear_error():
    network = vit()
    network.patch_embed = nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.Flatten(2))
    with pytest.raises(AnatomyError, match="not built like it"):
        Anatomy.of(network)


def test_a_converted_or_operated_network_comes_back_as_it_was():
    from vitclinic.probes import left_as_it_was

    network = timm.create_model("resnet18", channels=[4, 4, 8, 8], num_classes=3)
    network.fc.weight.grad = torch.ones_like(network.fc.weight)
    hook = network.conv1.register_forward_hook(lambda *_: None)
    before, head, names = network_digest(network), network.fc, list(dict(network.named_modules()))
    with left_as_it_was(network):
        network.double()
        network.fc = nn.Linear(8, 3)
        hook.remove()
    assert network_digest(network) == before
    assert network.fc is head
    assert list(dict(network.named_modules())) == names
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    assert len(network.conv1._forward_hooks) == 1
    assert torch.equal(network.fc.weight.grad, torch.ones_like(network.fc.weight))
    network(torch.rand(2, 3, 32, 32)).sum().backward()
