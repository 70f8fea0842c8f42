"""The presets of conv_stem for small images: layers written out, costs in closed form, the grid."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.anatomy.networks import cut, shaken, tiny_vit
from tests.anatomy.zoo import ZOO
from vitclinic._core.errors import RecipeError, TreatmentError
from vitclinic.anatomy import Anatomy, taps
from vitclinic.data import ImageSpec
from vitclinic.treatments import ConvStem, PoolingStem, ResidualStem, treat

PRESETS = ("small", "residual")
few = settings(max_examples=25, deadline=None, derandomize=True)


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def stem_of(preset: str, width: int, patch: int, channels: int = 3) -> nn.Module:
    torch.manual_seed(0)
    kind = {"small": PoolingStem, "residual": ResidualStem}[preset]
    return kind(channels, width, (patch, patch))


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def conv_parameters(widths: list[int]) -> int:
    return sum(9 * into * out for into, out in pairwise(widths))


# Size and cost


@pytest.mark.parametrize(
    ("patch", "widths"),
    [(2, [3, 96]), (4, [3, 48, 96]), (8, [3, 24, 48, 96]), (16, [3, 12, 24, 48, 96])],
)
def test_the_channels_of_the_small_preset_double_up_to_the_width(patch: int, widths: list[int]) -> None:
    stem = stem_of("small", 96, patch)
    convs = [part for part in stem.modules() if isinstance(part, nn.Conv2d)]
    assert [stem.in_channels, *(conv.out_channels for conv in convs)] == widths
    assert size(stem) == conv_parameters(widths)


@pytest.mark.parametrize("patch", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("hidden", [8, 64])
def test_the_residual_preset_has_five_convolutions_and_a_projection(patch: int, hidden: int) -> None:
    stem = ResidualStem(3, 96, (patch, patch), hidden=hidden)
    convolutions = 9 * 3 * hidden + 4 * 9 * hidden**2
    assert size(stem) == convolutions + 5 * 2 * hidden + (patch // 2) ** 2 * hidden * 96 + 96


def test_parameters_and_multiply_adds_are_those_of_the_page() -> None:
    """docs/treatments/conv_stem.md, for width 96, patch 4 and an image of 32 x 32."""
    at_16, at_8 = 16 * 16, 8 * 8
    paper = at_16 * (49 * 3 * 64 + 2 * 9 * 64 * 64) + at_8 * 4 * 64 * 96
    residual = at_16 * (9 * 3 * 64 + 4 * 9 * 64 * 64) + at_8 * 4 * 64 * 96
    expected = {
        "patchify": (4_704, at_8 * 48 * 96),
        "paper": (108_192, paper),
        "small": (42_768, 32 * 32 * 9 * 3 * 48 + at_16 * 9 * 48 * 96),
        "residual": (174_496, residual),
    }
    stems = {"patchify": nn.Conv2d(3, 96, 4, 4), "paper": ConvStem(3, 96, (4, 4), (4, 4))}
    stems |= {preset: stem_of(preset, 96, 4) for preset in PRESETS}
    counted = {}
    for name, stem in stems.items():
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            stem.eval()(torch.zeros(1, 3, 32, 32))
        counted[name] = size(stem), counter.get_total_flops() // 2
    assert counted == expected
    assert [adds for _, adds in expected.values()] == [294_912, 22_855_680, 11_943_936, 39_763_968]


# Layers


def test_the_small_preset_is_convolutions_with_relu_and_max_pooling() -> None:
    stem, image = stem_of("small", 12, 4).double(), noise(2, 3, 16, 24)
    convs = [part for part in stem.modules() if isinstance(part, nn.Conv2d)]
    expected = image
    for conv in convs:
        expected = F.conv2d(F.pad(expected, (1, 1, 1, 1)), conv.weight).clamp(min=0)
        # The largest of nine, by hand; what lies beyond the border never is.
        patches = F.unfold(F.pad(expected, (1, 1, 1, 1), value=-1.0), 3, stride=2)
        height, width = (length // 2 for length in expected.shape[-2:])
        expected = patches.unflatten(1, (-1, 9)).amax(2).unflatten(-1, (height, width))
    torch.testing.assert_close(stem(image), expected, rtol=1e-12, atol=1e-12)


def test_the_small_preset_starts_from_hes_normal_distribution() -> None:
    torch.manual_seed(0)
    conv = PoolingStem(3, 256, (4, 4)).layers.proj
    assert conv.weight.std().item() == pytest.approx((2 / (9 * 128)) ** 0.5, rel=0.01)


def test_the_residual_preset_adds_two_branches() -> None:
    stem = shaken(ResidualStem(3, 10, (8, 8), hidden=6)).double().eval()
    for norm in stem.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_(generator=torch.Generator().manual_seed(2))
            norm.running_var.uniform_(0.5, 2, generator=torch.Generator().manual_seed(3))
    state = stem.state_dict()

    def conv(x: Tensor, name: str, **geometry: Any) -> Tensor:
        return F.conv2d(x, state[f"layers.{name}.weight"], state.get(f"layers.{name}.bias"), **geometry)

    def norm(x: Tensor, name: str) -> Tensor:
        mean, variance, scale, shift = (
            state[f"layers.{name}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (variance + 1e-5).sqrt() * scale + shift

    image = noise(2, 3, 16, 24)
    x = norm(conv(image, "conv1", stride=2, padding=1), "norm1").relu()
    for block in ("block1", "block2"):
        y = norm(conv(x, f"{block}.conv1", padding=1), f"{block}.norm1").relu()
        x = (x + norm(conv(y, f"{block}.conv2", padding=1), f"{block}.norm2")).relu()
    torch.testing.assert_close(stem(image), conv(x, "proj", stride=4), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("preset", PRESETS)
def test_gelu_takes_the_place_of_every_relu(preset: str) -> None:
    stem = treat(tiny_vit(), {"conv_stem": {"preset": preset, "act": "gelu"}}).patch_embed.proj
    kinds = [type(part) for part in stem.modules()]
    assert kinds.count(nn.GELU) == (3 if preset == "small" else 5)
    assert nn.ReLU not in kinds


# Grid


@given(
    preset=st.sampled_from(PRESETS),
    patch=st.tuples(st.sampled_from((2, 4, 8)), st.sampled_from((2, 4, 8))),
    rest=st.integers(0, 15),
    cells=st.integers(1, 5),
)
@few
def test_any_image_has_the_grid_of_the_convolution_replaced(
    preset: str, patch: tuple[int, int], rest: int, cells: int
) -> None:
    stem = {"small": PoolingStem, "residual": ResidualStem}[preset](1, 4, patch)
    image = torch.zeros(2, 1, cells * patch[0] + rest, (cells + 1) * patch[1] + rest)
    assert stem(image).shape == nn.Conv2d(1, 4, patch, patch)(image).shape


@pytest.mark.parametrize("preset", PRESETS)
def test_a_pixel_that_the_patchify_stem_left_out_is_left_out(preset: str) -> None:
    stem, image = stem_of(preset, 12, 8).double().eval(), noise(1, 3, 23, 16)
    assert torch.equal(stem(image), stem(image[:, :, :16]))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("patch", [2, 4, 8])
@pytest.mark.parametrize("image", [32, 33, 36])
def test_a_vit_keeps_its_positions_its_units_and_its_grid(preset: str, patch: int, image: int) -> None:
    network = tiny_vit(img_size=image, patch_size=patch)
    before = {name: p.shape for name, p in network.named_parameters() if not name.startswith("patch_embed")}
    units = [unit.name for unit in Anatomy.of(network).units]
    treat(network, {"conv_stem": {"preset": preset}})
    assert before == {name: p.shape for name, p in network.named_parameters() if not name.startswith("patch_embed")}
    anatomy = Anatomy.of(network)
    stem = anatomy.unit("stem")
    with taps({"stem": stem.output}) as seen, torch.no_grad():
        network.eval()(torch.zeros(1, 3, image, image))
    assert [unit.name for unit in anatomy.units] == units
    assert anatomy.grid(stem.output, seen["stem"]).shape[-2:] == (image // patch, image // patch)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["hand-written/sequence_first_vit", "hand-written/encoder_vit"])
def test_a_stem_with_residual_blocks_is_one_unit_of_an_observed_network(name: str, preset: str) -> None:
    network, images = ZOO[name].build(), ZOO[name].images()
    before = [unit.name for unit in Anatomy.of(network, images).units]
    channels, height, width = ZOO[name].image
    treat(network, {"conv_stem": {"preset": preset}}, spec=ImageSpec(10, channels, (height, width)))
    anatomy = Anatomy.of(network, images)
    assert [unit.name for unit in anatomy.units] == before
    stem = anatomy.unit("stem")
    assert set(stem.parameters) >= set(next(m for m in network.modules() if hasattr(m, "is_stem")).parameters())


@pytest.mark.parametrize("preset", PRESETS)
def test_volo_has_the_preset_instead_of_its_own_convolutions(preset: str) -> None:
    network = treat(cut("volo", "volo_d1_224"), {"conv_stem": {"preset": preset}})
    assert network(torch.zeros(2, 3, 64, 64)).shape == (2, 5)
    assert network.patch_embed.conv is None


# Training


@pytest.mark.parametrize("preset", PRESETS)
def test_two_steps_of_training_move_every_weight_of_the_stem(preset: str) -> None:
    torch.manual_seed(0)
    network = timm.models.VisionTransformer(
        img_size=32, patch_size=4, embed_dim=96, depth=2, num_heads=3, num_classes=10
    )
    network = treat(network, {"conv_stem": {"preset": preset}}).train()
    images, labels = torch.rand(8, 3, 32, 32), torch.arange(8)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    stem = dict(network.patch_embed.named_parameters())
    before = {name: value.detach().clone() for name, value in stem.items()}
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(network(images), labels)
        loss.backward()
        assert all(value.grad is not None and value.grad.any() for value in stem.values())
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    assert all(not torch.equal(value, before[name]) for name, value in stem.items())


@pytest.mark.parametrize("preset", PRESETS)
def test_the_stem_has_precision_and_mode_of_the_network_and_widens_with_it(preset: str) -> None:
    network = tiny_vit().to(torch.bfloat16).eval()
    treat(network, {"conv_stem": {"preset": preset}})
    assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}
    assert not any(module.training for module in network.modules())
    wider = treat(tiny_vit(), {"conv_stem": {"preset": preset}}, {"uniform_heads": {"variant": "append"}})
    assert wider.patch_embed.proj.out_channels == 24 + 12
    assert wider(torch.zeros(2, 3, 32, 48)).shape == (2, 5)


def test_a_projection_without_bias_stays_so() -> None:
    network = treat(tiny_vit(pre_norm=True), {"conv_stem": {"preset": "residual"}})
    assert network.patch_embed.proj.layers.proj.bias is None


# Errors


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"preset": "small", "components": "3Conv+1Proj"}, "components has no effect with preset small"),
        ({"preset": "small", "strides": [2, 1, 1, 4]}, "strides has no effect with preset small"),
        ({"preset": "small", "hidden": 32}, "hidden has no effect with preset small"),
        ({"preset": "residual", "components": "1Proj"}, "components has no effect with preset residual"),
        ({"preset": "residual", "strides": [2, 1, 1, 4]}, "strides has no effect with preset residual"),
        ({"preset": "tiny"}, "conv_stem.preset"),
    ],
)
def test_options_without_effect_are_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        treat(tiny_vit(), {"conv_stem": options})


def test_hidden_is_an_option_of_the_residual_preset() -> None:
    network = treat(tiny_vit(), {"conv_stem": {"preset": "residual", "hidden": 8}})
    assert network.patch_embed.proj.layers.conv1.out_channels == 8


@pytest.mark.parametrize(
    ("preset", "network", "sentence"),
    [
        ("small", lambda: tiny_vit(patch_size=6), "patch stride of this network is 6; use preset paper, or a patch"),
        ("small", lambda: tiny_vit(patch_size=(8, 6)), "is 8 x 6; use preset paper"),
        ("small", lambda: cut("pit", "pit_b_224"), r"overlap \(kernel \(14, 14\), stride \(7, 7\)\); use preset"),
        ("residual", lambda: tiny_vit(patch_size=5), "patch stride of this network is 5; use preset paper, or an even"),
        ("residual", lambda: cut("pit", "pit_ti_224"), r"overlap \(kernel \(16, 16\), stride \(8, 8\)\); use preset"),
    ],
)
def test_a_stride_that_a_preset_cannot_have_is_a_sentence(preset: str, network: Any, sentence: str) -> None:
    untreated = network()
    before = str(untreated)
    with pytest.raises(TreatmentError, match=f"^conv_stem: preset {preset} .*{sentence}"):
        treat(untreated, {"conv_stem": {"preset": preset}})
    assert str(untreated) == before
