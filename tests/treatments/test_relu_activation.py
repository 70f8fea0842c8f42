"""GELU becomes ReLU wherever a GELU can be found."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.anatomy.networks import NETWORKS, tiny_vit
from tests.treatments.attentions import images, vit
from tests.treatments.test_contract import FITS, ONE_EACH
from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy.families import recognise
from vitclinic.treatments import gelu_to_relu, treat


def test_a_vit_computes_what_timm_s_own_with_relu_computes() -> None:
    network = vit()
    own = tiny_vit(img_size=(16, 24), patch_size=4, act_layer=nn.ReLU).double().eval()
    own.load_state_dict(network.state_dict())
    x = images(network)
    before = network(x)
    treated = treat(network, "relu_activation")
    assert torch.equal(treated(x), own(x))
    assert (treated(x) - before).abs().max() > 1e-6


BUILDS = [network for family in FITS["relu_activation"] for network in ONE_EACH.get(family, [])]


@pytest.mark.parametrize("network", ["timm mixer_l32_224", *(name for name in BUILDS if name in NETWORKS)])
def test_no_gelu_is_called_any_more(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    treated = treat(NETWORKS[network](), "relu_activation").eval()

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a GELU was called")

    monkeypatch.setattr(F, "gelu", forbidden)
    monkeypatch.setattr(torch._C._nn, "gelu", forbidden)
    core, family = recognise(treated)
    core(torch.randn(1, *family.input_size(core)))
    assert any(isinstance(module, nn.ReLU) for module in core.modules())


def test_a_gelu_that_is_shared_or_kept_as_a_function_is_found() -> None:
    shared = nn.GELU()
    network = nn.Sequential(shared, nn.Linear(4, 4), shared)
    assert gelu_to_relu(network) == 2
    assert not any(isinstance(module, nn.GELU) for module in network)

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True).eval()
    twin = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="relu", batch_first=True).eval()
    twin.load_state_dict(layer.state_dict())
    assert gelu_to_relu(layer) == 1
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # the fast path, which looks at a number instead of the function
        torch.testing.assert_close(layer(x), twin(x))
    torch.testing.assert_close(layer(x), twin(x))

    class Approximate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = functools.partial(F.gelu, approximate="tanh")

    approximate = Approximate()
    assert gelu_to_relu(approximate) == 1
    assert approximate.act is F.relu


def test_a_network_without_gelu_is_a_sentence() -> None:
    network = tiny_vit(act_layer=nn.SiLU)
    with pytest.raises(TreatmentError, match=r"does not fit VisionTransformer: it needs a GELU; .* calls none, .*\.$"):
        treat(network, "relu_activation")
