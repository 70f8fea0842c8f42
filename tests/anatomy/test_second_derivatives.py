"""Second derivatives under the probes' context, against differences of gradients in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.anatomy.networks import NETWORKS, shaken
from tests.anatomy.test_contract import logits
from vitclinic.anatomy import double_differentiable
from vitclinic.anatomy.families import recognise

SMOOTH = [
    "vit, not square, registers",
    "swin, not square, padded",
    "timm pit_b_224",
    "timm mixer_l32_224",
    "torchvision vit",
    "torchvision swin_v2",
    "torchvision convnext",
    *(name for name in NETWORKS if name == "huggingface vit"),
]
"""Networks without ReLU, one of each kind of attention: gradients have a derivative everywhere."""


@pytest.mark.parametrize("smooth", SMOOTH)
def test_second_derivatives_are_differences_of_gradients(smooth: str) -> None:
    torch.manual_seed(0)
    network = shaken(NETWORKS[smooth]()).eval().double()
    core, family = recognise(network)
    images = torch.randn(2, *family.input_size(core), dtype=torch.float64)
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    direction = [torch.randn_like(parameter) for parameter in parameters]

    def gradient(create_graph: bool = False) -> list[Tensor]:
        loss = logits(network, images, grad=True).log_softmax(-1)[:, 0].sum()
        return list(torch.autograd.grad(loss, parameters, create_graph=create_graph, materialize_grads=True))

    with double_differentiable():
        slope = sum((g * v).sum() for g, v in zip(gradient(create_graph=True), direction, strict=True))
        product = torch.autograd.grad(slope, parameters, materialize_grads=True)
    step = 1e-6
    ends = []
    for side in (step, -2 * step):  # there, and back to the other side, by the network's own kernels
        with torch.no_grad():
            for parameter, v in zip(parameters, direction, strict=True):
                parameter += side * v
        ends.append(gradient())
    scale = max(h.abs().max() for h in product)
    assert scale > 0
    for h, plus, minus in zip(product, *ends, strict=True):
        torch.testing.assert_close(h, (plus - minus) / (2 * step), rtol=0, atol=float(1e-5 * scale))
