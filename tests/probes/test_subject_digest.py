"""Two networks that compute different things never share results."""

import os
import subprocess
import sys
import types
from functools import partial

import pytest
import timm
import torch
from torch import nn

from vitclinic._core.errors import AnatomyError
from vitclinic.anatomy import Anatomy
from vitclinic.probes.digest import network_digest


def vit(**changes):
    torch.manual_seed(0)
    small = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_classes": 4, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", **{**small, **changes})


def test_settings_that_modules_do_not_print_count():
    assert network_digest(vit()) == network_digest(vit())
    assert network_digest(vit()) != network_digest(vit(num_heads=4))
    assert network_digest(vit().eval()) == network_digest(vit().train())


def test_a_known_class_whose_replaced_parts_do_not_work_gets_the_clear_error():
    network = vit()
    network.patch_embed = nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.Flatten(2))
    with pytest.raises(AnatomyError, match="takes images of none of the usual sizes"):
        Anatomy.of(network)


def test_a_converted_or_operated_network_comes_back_as_it_was():
    from vitclinic.probes import preserve_state

    network = timm.create_model("resnet18", channels=[4, 4, 8, 8], num_classes=3)
    network.fc.weight.grad = torch.ones_like(network.fc.weight)
    hook = network.conv1.register_forward_hook(lambda *_: None)
    before, head, names = network_digest(network), network.fc, list(dict(network.named_modules()))
    with preserve_state(network):
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


GAIN = 2.0


def amplified(x):
    return GAIN * x


class Own(nn.Module):
    """A network of a user's: settings, a counter, and code that calls other code."""

    def __init__(self, k=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(3, 2)
        self.k = k
        self.calls = 0

    def forward(self, x):
        self._count()
        return self.k * amplified(self.head(x))

    def _count(self):
        self.calls += 1


def other_forward(self, x):
    return 3 * self.head(x)


def hooked(hook, network=None):
    network = network or Own()
    network.head.register_forward_hook(hook)
    return network


def patched():
    network = Own()
    network.forward = types.MethodType(other_forward, network)
    return network


def with_attribute(name, value):
    network = Own()
    setattr(network, name, value)
    return network


class Steering:
    """A hook with settings, which counts."""

    def __init__(self, by):
        self.by, self.calls = by, 0

    def __call__(self, module, args, output):
        self.calls += 1
        return output + self.by


def steered(by):
    return lambda module, args, output: output + by


CHANGES = {
    "a setting": lambda: Own(3.0),
    "a forward of its own": patched,
    "a hook": lambda: hooked(lambda module, args, output: 100 * output),
    "another hook": lambda: hooked(lambda module, args, output: 101 * output),
    "a hook's default": lambda: hooked(lambda module, args, output, by=7: by * output),
    "a hook's closure": lambda: hooked(steered(torch.ones(2))),
    "another closure": lambda: hooked(steered(torch.zeros(2))),
    "an object": lambda: hooked(Steering(1.0)),
    "another object": lambda: hooked(Steering(2.0)),
    "an argument": lambda: hooked(partial(Steering.__call__, Steering(1.0))),
    "a tensor": lambda: with_attribute("k", torch.tensor(2.0)),
    "another tensor": lambda: with_attribute("k", torch.tensor(4.0)),
    "a function": lambda: with_attribute("act", lambda x: x),
    "a dictionary": lambda: with_attribute("options", {"k": 3, "kinds": {"a", "b", "c"}}),
    "a module outside": lambda: with_attribute("parts", [nn.Linear(2, 2, bias=False)]),
}


def test_settings_hooks_and_code_of_ones_own_count():
    digests = {name: network_digest(build()) for name, build in CHANGES.items()}
    assert network_digest(Own()) == network_digest(Own())
    assert len({*digests.values(), network_digest(Own())}) == len(CHANGES) + 1
    assert digests == {name: network_digest(build()) for name, build in CHANGES.items()}


def test_edited_code_counts_wherever_forward_reaches_it(monkeypatch):
    before = network_digest(Own())
    monkeypatch.setattr(sys.modules[__name__], "GAIN", 5.0)
    assert network_digest(Own()) != before
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules[__name__], "amplified", lambda x: 3 * x)
    assert network_digest(Own()) != before
    monkeypatch.undo()
    assert network_digest(Own()) == before
    monkeypatch.setattr(Own, "_count", lambda self: None)
    assert network_digest(Own()) != before
    library = network_digest(vit())
    monkeypatch.setattr(timm.models.VisionTransformer, "forward", lambda self, x: x)
    assert network_digest(vit()) != library


def test_what_a_pass_changes_does_not_count():
    def noting(module, args):
        module.last = float(args[0].sum())

    network = hooked(Steering(1.0))
    network.head.register_forward_pre_hook(noting)
    before = network_digest(network)
    network(torch.rand(1, 3))
    assert (network.calls, hasattr(network.head, "last")) == (1, True)
    assert network_digest(network) == before


def test_the_digest_is_the_same_in_another_process():
    script = (
        "from tests.probes.test_subject_digest import *\n"
        "import vitclinic\n"
        "torch.manual_seed(0)\n"
        "print(*(network_digest(build()) for build in CHANGES.values()), sep='\\n')\n"
        "treated = vitclinic.treat(vit(img_size=32, depth=2), 'local_attention', 'context_broadcasting')\n"
        "print(network_digest(treated))\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
