"""Attention recorded with gradients: the network continues with the recorded map, whatever way it attends."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torchvision.models as tv
from torch import nn

from tests.anatomy.networks import NETWORKS, shaken, tiny_vit
from vitclinic.anatomy import Anatomy, AttentionMap, record_attention
from vitclinic.anatomy.families import recognise
from vitclinic.treatments import treat

BUILDERS: dict[str, Any] = {
    "fused": tiny_vit,
    "plain softmax": lambda: timm.models.SwinTransformer(
        img_size=16, patch_size=2, window_size=4, embed_dim=12, depths=(2, 2), num_heads=(2, 3), num_classes=5
    ),
    "multi_head_attention_forward": lambda: tv.VisionTransformer(16, 4, 2, 2, 16, 32, num_classes=5),
    "uniform heads": lambda: treat(tiny_vit(), {"uniform_heads": {"variant": "append"}}),
    **{name: NETWORKS[name] for name in ("huggingface vit",) if name in NETWORKS},
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return shaken(BUILDERS[name]()).double().eval()


def images(network: nn.Module) -> torch.Tensor:
    core, family = recognise(network)
    return torch.randn(2, *family.input_size(core), generator=torch.Generator().manual_seed(1)).double()


def logits(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = network(x)
    return output if isinstance(output, torch.Tensor) else output.logits


def recorded(network: nn.Module, x: torch.Tensor, grad: bool) -> tuple[torch.Tensor, list[AttentionMap]]:
    maps: list[AttentionMap] = []
    with record_attention(Anatomy.of(network).of_kind("msa"), maps.append, grad=grad):
        output = logits(network, x)
    return output, maps


@pytest.mark.parametrize("name", BUILDERS)
def test_outputs_and_maps_are_those_without_gradients(name: str) -> None:
    network = built(name)
    x = images(network)
    output, maps = recorded(network, x, grad=True)
    torch.testing.assert_close(output, logits(network, x))
    _, plain = recorded(network, x, grad=False)
    for ours, theirs in zip(maps, plain, strict=True):
        assert not ours.weights.requires_grad
        assert ours.source is not None
        assert theirs.source is None
        torch.testing.assert_close(ours.weights, theirs.weights)


class Nudge:
    """Adds a number to one entry of the map of one unit, before the network goes on with it."""

    def __init__(self, unit: Any, entry: tuple[int, ...], by: float) -> None:
        self.unit, self.entry, self.by = unit, entry, by

    def consume(self, seen: AttentionMap) -> None:
        if seen.unit.name == self.unit and seen.source is not None:
            seen.source.data[self.entry] += self.by  # unnoticed by autograd, and by the check that nobody writes


@pytest.mark.parametrize("name", BUILDERS)
def test_the_gradient_is_the_slope_of_the_output_in_the_map(name: str) -> None:
    """Against a difference quotient: the recorded map is changed in place before the network goes on with it."""
    network = built(name)
    x = images(network)
    output, maps = recorded(network, x, grad=True)
    sources = [one.source for one in maps]
    gradients = torch.autograd.grad(output[:, 0].sum(), sources)
    units = Anatomy.of(network).of_kind("msa")
    steepest = max(range(len(maps)), key=lambda at: float(gradients[at].abs().max()))
    for at in {0, steepest}:
        gradient = maps[at].arrange(gradients[at])
        assert gradient.shape == maps[at].weights.shape
        flat = int(gradients[at].abs().argmax())
        entry = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), gradients[at].shape))
        assert gradient[entry] == gradients[at][entry]
        ends = []
        for by in (1e-4, -1e-4):
            nudge = Nudge(units[at].name, entry, by)
            with torch.no_grad(), record_attention(units, nudge.consume, grad=True):
                ends.append(float(logits(network, x)[:, 0].sum()))
        assert (ends[0] - ends[1]) / 2e-4 == pytest.approx(float(gradient[entry]), rel=1e-4, abs=1e-8)


def test_uniform_heads_have_no_gradient() -> None:
    network = built("uniform heads")
    output, maps = recorded(network, images(network), grad=True)
    (gradient,) = torch.autograd.grad(output.sum(), [maps[0].source])
    arranged = maps[0].arrange(gradient)
    assert arranged.shape[1] == gradient.shape[1] + 1
    assert (arranged[:, -1] == 0).all()


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_torch_s_attention_returns_what_it_was_asked_for(need_weights: bool, average: bool) -> None:
    class Head(tv.vision_transformer.EncoderBlock):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            x, weights = self.self_attention(
                *[self.ln_1(input)] * 3, need_weights=need_weights, average_attn_weights=average
            )
            self.seen = weights
            x = self.dropout(x) + input
            return x + self.mlp(self.ln_2(x))

    network = built("multi_head_attention_forward")
    for block in network.encoder.layers:
        block.__class__ = Head
    x = images(network)
    expected = network(x)
    weights = network.encoder.layers[0].seen
    output, _ = recorded(network, x, grad=True)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(network.encoder.layers[0].seen, weights)
