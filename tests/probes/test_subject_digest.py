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
