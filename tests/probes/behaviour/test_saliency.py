"""Saliency: maps against loops and attention differentiated by timm's own code, curves against pixels one by one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.anatomy.networks import shaken
from tests.anatomy.token_orders import OrderedViT
from tests.probes.attention.networks import swin
from tests.probes.behaviour import trained
from tests.probes.subjects import CLASSES, SIZE, subject, vit
from vitclinic import functional as F
from vitclinic.probes import measure, parse_probes
from vitclinic.probes.behaviour.saliency_maps import blur


def saliency(patient: Any, **options: Any) -> Any:
    (found,) = measure(patient, parse_probes([{"saliency": {"steps": 4, "draws": 1, **options}}]))
    assert found.status == "ok", found.reason
    return found


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rollout_is_the_product_of_matrices() -> None:
    layers = [drawn(2, 3, 5, 5, seed=seed).softmax(-1) for seed in range(3)]
    found = F.attention_rollout(layers)
    for image in range(2):
        rolled = np.eye(5)
        for layer in layers:
            rolled = (0.5 * np.eye(5) + 0.5 * np.mean([layer[image, head].numpy() for head in range(3)], 0)) @ rolled
        np.testing.assert_allclose(found[image], rolled)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 5).double())


def test_gradient_rollout_adds_what_helps_the_class() -> None:
    layers = [drawn(2, 3, 5, 5, seed=seed).softmax(-1) for seed in range(3)]
    gradients = [drawn(2, 3, 5, 5, seed=10 + seed) for seed in range(3)]
    found = F.gradient_rollout(layers, gradients)
    for image in range(2):
        relevance = np.eye(5)
        for layer, gradient in zip(layers, gradients, strict=True):
            weighted = np.maximum(0, layer[image].numpy() * gradient[image].numpy()).mean(0)
            relevance = relevance + weighted @ relevance
        np.testing.assert_allclose(found[image], relevance)


def test_grad_cam_is_the_sum_over_channels() -> None:
    maps, gradient = drawn(2, 3, 4, 5), drawn(2, 3, 4, 5, seed=1)
    found = F.grad_cam(maps, gradient)
    for image in range(2):
        total = sum(gradient[image, c].mean() * maps[image, c] for c in range(3))
        torch.testing.assert_close(found[image], total.clamp_min(0))


class _Linear(nn.Module):
    """Two classes: the first by a weighted sum of the pixels."""

    def __init__(self, weights_chw: Tensor) -> None:
        super().__init__()
        self.weights = weights_chw

    def forward(self, x: Tensor) -> Tensor:
        total = (x * self.weights).sum((1, 2, 3))
        return torch.stack([total, 0 * total], 1)


@pytest.mark.parametrize("insertion", [True, False])
def test_curves_are_those_of_pixels_replaced_one_by_one(insertion: bool) -> None:
    images, maps = drawn(2, 3, 4, 4).sigmoid(), drawn(2, 4, 4, seed=1)
    network = _Linear(drawn(3, 4, 4, seed=2))
    classes = torch.tensor([0, 1])
    found = (F.insertion_curve if insertion else F.deletion_curve)(network, images, classes, maps, steps=5)
    for image in range(2):
        start = blur(images)[image] if insertion else images[image]
        end = images[image] if insertion else images[image].mean((1, 2))[:, None, None].expand(3, 4, 4)
        order = sorted(np.ndindex(4, 4), key=lambda place: -float(maps[image][place]))
        for step in range(6):
            x = start.clone()
            for row, column in order[: round(step * 16 / 5)]:
                x[:, row, column] = end[:, row, column]
            expected = network(x[None]).softmax(1)[0, classes[image]]
            assert found[image, step].item() == pytest.approx(expected.item(), rel=1e-9)


def test_a_map_of_the_evidence_beats_its_opposite() -> None:
    weights = torch.zeros(1, 8, 8)
    weights[:, :4, :4] = 1.0
    images, classes = drawn(6, 1, 8, 8).sigmoid() * weights, torch.zeros(6).long()
    truth = torch.tensor([[1.0, 0.0], [0.0, 0.0]]).expand(6, -1, -1)
    curves = {
        name: F.deletion_curve(_Linear(weights), images, classes, maps)
        for name, maps in (("true", truth), ("false", -truth))
    }
    areas = {name: torch.trapezoid(curve, dx=1 / 16).mean() for name, curve in curves.items()}
    assert areas["true"] < areas["false"]


def test_the_blur_keeps_flat_images_and_the_mean() -> None:
    flat = torch.full((1, 3, 16, 12), 0.3)
    torch.testing.assert_close(blur(flat), flat)
    noise = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert blur(noise).std() < 0.25 * noise.std()


def by_hand(network: Any, images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and its gradient in every layer, [L, B, H, N, N], by timm's unfused attention and its dropout."""
    network = copy.deepcopy(network).eval()
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    for block in network.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(keep)
    network(images).gather(1, classes[:, None]).sum().backward()
    return torch.stack([each.detach() for each in kept]), torch.stack([each.grad for each in kept])


@pytest.mark.parametrize("keywords", [{}, {"reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}])
def test_maps_of_a_vit_are_those_by_hand(keywords: dict[str, Any]) -> None:
    torch.manual_seed(0)
    network = shaken(vit(**keywords))
    patient = subject(network, count=5, batch_size=2)
    images = torch.cat([batch.images for batch in patient.batches()])
    with torch.no_grad():
        classes = network.eval()(images).argmax(1)
    attention, gradients = by_hand(network, images, classes)
    prefix = network.num_prefix_tokens
    for method in ("rollout", "gradient_attention"):
        result = torch.eye(attention.shape[-1]).expand(5, -1, -1)
        for weights, gradient in zip(attention, gradients, strict=True):
            if method == "rollout":
                result = (weights.mean(1) + torch.eye(weights.shape[-1])) / 2 @ result
            else:
                result = result + (weights * gradient).clamp_min(0).mean(1) @ result
        row = result[:, 0] if "class_token" not in keywords else result[:, prefix:].mean(1)
        found = saliency(patient, method=method)
        np.testing.assert_allclose(found.arrays["all_grid_maps"].reshape(5, 16), row[:, prefix:], rtol=1e-3, atol=1e-6)
        assert found.arrays["method"].tolist() == [method]
    assert saliency(patient).arrays["method"].tolist() == ["gradient_attention"]


def test_grad_cam_reads_the_last_state_that_matters() -> None:
    found = saliency(subject("vit", count=3), method="grad_cam")
    assert [row.name for row in found.units] == [
        "blocks.1.mlp"
    ]  # patches of the last block do not reach the class token
    pooled = saliency(subject(shaken(vit(class_token=False, global_pool="avg")), count=3), method="grad_cam")
    assert [row.name for row in pooled.units] == ["blocks.2.mlp"]
    chosen = saliency(subject("vit", count=3), method="grad_cam", unit="blocks.0.msa")
    assert [row.name for row in chosen.units] == ["blocks.0.msa"]


def test_grad_cam_of_a_cnn_is_that_by_hand() -> None:
    patient = subject("resnet", count=3)
    found = saliency(patient, unit="layer2.0.conv")
    assert found.arrays["method"].tolist() == ["grad_cam"]
    network = copy.deepcopy(patient.network).eval()
    kept: list[Tensor] = []
    network.layer2[0].register_forward_hook(lambda module, args, output: (output.retain_grad(), kept.append(output))[1])
    images = torch.cat([batch.images for batch in patient.batches()])
    network(images).amax(1).sum().backward()
    weights = kept[0].grad.mean((2, 3), keepdim=True)
    expected = (weights * kept[0]).sum(1).clamp_min(0).detach()
    np.testing.assert_allclose(found.arrays["all_grid_maps"], expected, rtol=1e-3, atol=1e-6)


def test_grad_cam_reads_no_map_of_a_single_position() -> None:
    patient = subject("resnet", count=3)  # its last two stages have one at 16 pixels
    found = saliency(patient)
    assert found.arrays["all_grid_maps"][0].size > 1
    (chosen,) = measure(patient, parse_probes([{"saliency": {"unit": "layer4.0.conv"}}]))
    assert chosen.status == "does_not_apply"


@pytest.mark.parametrize("method", ["rollout", "gradient_attention"])
def test_attention_in_windows_does_not_apply_and_auto_finds_another_way(method: str) -> None:
    patient = subject(shaken(swin()), count=2)
    (found,) = measure(patient, parse_probes([{"saliency": {"method": method}}]))
    assert found.status == "does_not_apply"
    assert "use method=grad_cam" in found.reason
    assert saliency(patient).arrays["method"].tolist() == ["grad_cam"]


def test_torchvision_s_vit_and_a_frozen_network() -> None:
    found = saliency(subject("torchvision vit", count=3))
    assert found.arrays["method"].tolist() == ["gradient_attention"]
    patient = subject("vit", count=3)
    expected = saliency(patient)
    patient.network.requires_grad_(False)
    np.testing.assert_array_equal(saliency(patient).arrays["all_grid_maps"], expected.arrays["all_grid_maps"])


@pytest.mark.parametrize("method", ["gradient_attention", "rollout"])
@pytest.mark.parametrize("other", [{"order": "columns"}, {"order": "class last"}, {"shuffled": True}])
def test_the_order_of_tokens_changes_nothing(method: str, other: dict[str, Any]) -> None:
    networks = OrderedViT().eval(), OrderedViT(**other).eval()
    images = torch.rand(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(networks[0](images), networks[1](images), atol=1e-5, rtol=1e-5)
    plain, moved = (saliency(subject(network), method=method).arrays["all_grid_maps"] for network in networks)
    np.testing.assert_allclose(moved, plain, rtol=1e-3, atol=1e-6)


def test_scores_are_areas_and_the_gain_is_paired() -> None:
    found = saliency(subject("vit", count=6), draws=3)
    scalars, arrays = found.scalars, found.arrays
    for name in ("insertion", "deletion", "shuffled_insertion", "shuffled_deletion"):
        assert scalars[name].value == pytest.approx(np.trapezoid(arrays[name], dx=0.25))
    expected = scalars["insertion"].value - scalars["deletion"].value
    expected -= scalars["shuffled_insertion"].value - scalars["shuffled_deletion"].value
    assert scalars["gain"].value == pytest.approx(expected)
    assert scalars["gain"].low < scalars["gain"].value < scalars["gain"].high
    assert arrays["deletion"][0] == arrays["insertion"][-1] == pytest.approx(scalars["confidence"].value)
    assert arrays["deletion"][-1] == pytest.approx(arrays["shuffled_deletion"][-1])
    assert arrays["insertion"][0] == pytest.approx(arrays["shuffled_insertion"][0])


def test_the_batch_size_changes_nothing() -> None:
    one, other = (saliency(subject("vit", count=6, batch_size=size)) for size in (2, 6))
    np.testing.assert_allclose(one.arrays["all_grid_maps"], other.arrays["all_grid_maps"], rtol=1e-3, atol=1e-6)
    assert one.scalars["gain"].value == pytest.approx(other.scalars["gain"].value, abs=1e-5)


def test_maps_of_a_network_that_has_learnt_mean_something() -> None:
    patient = trained.subject(trained.vit, limit=48)
    found = saliency(patient, steps=8, draws=2)
    assert found.scalars["gain"].low > 0.05
    (labelled,) = measure(patient, parse_probes([{"saliency": {"target": "label", "steps": 4}}]))
    assert labelled.status == "ok"
    assert labelled.scalars["confidence"].value <= found.scalars["confidence"].value


def test_labels_of_other_classes_do_not_apply() -> None:
    patient = subject(shaken(vit(num_classes=CLASSES + 1)), count=3)
    (found,) = measure(patient, parse_probes([{"saliency": {"target": "label"}}]))
    assert found.status == "does_not_apply"
    assert saliency(patient).scalars["gain"].n == 3


def test_a_grid_of_one_position_does_not_apply() -> None:
    (found,) = measure(subject(vit(patch_size=SIZE), count=3), parse_probes(["saliency"]))
    assert found.status == "does_not_apply"


def test_pictures_show_the_first_images_beside_their_maps() -> None:
    (probe,) = parse_probes([{"saliency": {"steps": 2}}])
    (found,) = measure(subject("vit", count=11), [probe])
    pictures = probe.pictures(found)
    assert list(pictures) == [f"image-{number}" for number in range(8)]
    assert {picture.shape for picture in pictures.values()} == {(224, 448, 3)}
    assert found.arrays["all_grid_maps"].shape == (11, 4, 4)
