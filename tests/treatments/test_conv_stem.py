"""The convolutional stem: layers written out, parameters in closed form, its grid, and scaled ReLU's identities."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import timm
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.anatomy.networks import NETWORKS, Builder, cut, shaken, tiny_vit
from vitclinic._core.errors import RecipeError, TreatmentError
from vitclinic.anatomy import Anatomy, taps
from vitclinic.anatomy.families import recognise
from vitclinic.functional import scaled_relu
from vitclinic.treatments import ConvStem, treat
from vitclinic.treatments.conv_stem import Components

ROWS: tuple[Components, ...] = get_args(Components)
PATCHES = (1, 2, 4, 8, 14, 16, 32)
few = settings(max_examples=25, deadline=None, derandomize=True)


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def stem_of(patch: int, components: Components, **options: Any) -> ConvStem:
    torch.manual_seed(0)
    return ConvStem(3, 24, (patch, patch), (patch, patch), components=components, hidden=8, **options)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# Size


def test_deit_small_grows_from_22_to_23_million_parameters() -> None:
    network = timm.create_model("deit_small_patch16_224")
    assert size(network) == 22_050_664
    treat(network, "conv_stem")
    patchify = 16 * 16 * 3 * 384 + 384
    stem = 7 * 7 * 3 * 64 + 2 * 3 * 3 * 64 * 64 + 3 * 2 * 64 + 8 * 8 * 64 * 384 + 384
    assert size(network) == 22_050_664 - patchify + stem == 23_412_136


@pytest.mark.parametrize("patch", PATCHES)
def test_the_number_of_parameters_of_every_row_in_closed_form(patch: int) -> None:
    channels, width, hidden = 3, 24, 8
    convs = 7 * 7 * channels * hidden + 2 * 3 * 3 * hidden * hidden
    half = 1 if patch == 1 else patch // 2
    proj = half * half * hidden * width + width
    patchify = patch * patch * channels * width
    assert {row: size(stem_of(patch, row)) for row in ROWS} == {
        "3Conv+3BN+3ReLU+1Proj": convs + 6 * hidden + proj,
        "3Conv+3BN+1Proj": convs + 6 * hidden + proj,
        "3Conv+3ReLU+1Proj": convs + 3 * hidden + proj,
        "3Conv+1Proj": convs + 3 * hidden + proj,
        "3Conv+1Proj+1ReLU": convs + 3 * hidden + proj,
        "1Proj+1BN+1ReLU": patchify + 2 * width,
        "1Proj+1ReLU": patchify + width,
        "1Proj": patchify + width,
    }


# Grid


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("patch", PATCHES)
def test_every_row_gives_the_patchify_grid_on_an_image_that_is_not_square(patch: int, row: Components) -> None:
    assert stem_of(patch, row)(torch.zeros(1, 3, 2 * patch, 3 * patch)).shape == (1, 24, 2, 3)


@given(
    strides=st.tuples(st.integers(1, 7), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6)),
    given=st.booleans(),
    overlap=st.integers(0, 9),
    rest=st.integers(0, 20),
)
@example(strides=(2, 2, 2, 1), given=True, overlap=0, rest=0)  # half the patch is even, and cannot be centred
@few
def test_any_strides_and_any_image_give_the_grid_of_the_convolution_replaced(
    strides: tuple[int, int, int, int], given: bool, overlap: int, rest: int
) -> None:
    stride = math.prod(strides)
    kernel, length = stride + overlap, 2 * stride + overlap + rest
    replaced = nn.Conv2d(1, 1, kernel, stride)
    stem = ConvStem(1, 1, (kernel, kernel), (stride, stride), strides=strides if given else None, hidden=1)
    image = torch.zeros(2, 1, length, length + stride)
    assert stem(image).shape == replaced(image).shape


def test_a_pixel_that_the_patchify_stem_left_out_is_left_out() -> None:
    stem = stem_of(8, "3Conv+1Proj").double()
    image = noise(1, 3, 23, 16)
    assert torch.equal(stem(image), stem(image[:, :, :16]))


@pytest.mark.parametrize(
    "build",
    [
        NETWORKS["vit, not square, registers"],
        NETWORKS["vit, dynamic size"],
        lambda: cut("deit", "deit_tiny_distilled_patch16_224"),
        lambda: cut("pit", "pit_ti_distilled_224"),
        lambda: cut("pit", "pit_b_224"),
        NETWORKS["swin, not square, padded"],
        NETWORKS["torchvision vit"],
        NETWORKS["torchvision swin, padded"],
    ],
)
def test_the_stem_unit_reads_the_same_grid_before_and_after_and_the_units_stay(build: Builder) -> None:
    def seen(network: nn.Module) -> tuple[list[str], torch.Size, torch.Size]:
        anatomy = Anatomy.of(network)
        stem = anatomy.unit("stem")
        with taps({"stem": stem.output}) as activations, torch.no_grad():
            network(torch.zeros(1, *image))
        activation = activations["stem"]
        return [unit.name for unit in anatomy.units], activation.shape, anatomy.grid(stem.output, activation).shape

    network, family = recognise(build().eval())
    image = family.input_size(network)
    assert seen(network) == seen(treat(network, "conv_stem"))
    assert family.input_size(network) == image


def test_a_dynamic_network_takes_other_sizes_still() -> None:
    network = treat(tiny_vit(dynamic_img_size=True, dynamic_img_pad=True), "conv_stem").eval()
    assert network(torch.zeros(1, 3, 45, 70)).shape == (1, 5)


def test_swin_on_cifar_has_patch_1_and_keeps_every_pixel() -> None:
    network = timm.models.SwinTransformer(
        img_size=32, patch_size=1, window_size=4, embed_dim=8, depths=(1, 1), num_heads=(2, 2), num_classes=5
    )
    stem = treat(network, {"conv_stem": {"hidden": 4}}).patch_embed.proj
    assert [conv.stride for conv in stem.modules() if isinstance(conv, nn.Conv2d)] == [(1, 1)] * 4
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 5)


# Layers


def written_out(stem: ConvStem, x: Tensor, row: str, act: Any, strides: tuple[int, ...], padding: int) -> Tensor:
    """Table 2's rows, one by one, from the stem's own parameters and running statistics."""
    state = {name.removeprefix("layers."): value for name, value in stem.state_dict().items()}

    def conv(y: Tensor, name: str, stride: int, pad: int) -> Tensor:
        return F.conv2d(y, state[f"{name}.weight"], state.get(f"{name}.bias"), stride, pad)

    def norm(y: Tensor, name: str) -> Tensor:
        mean, variance, scale, shift = (
            state[f"{name}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (y - mean) / (variance + 1e-5).sqrt() * scale + shift

    if row.startswith("3Conv"):
        for place, pad in ((1, 3), (2, 1), (3, 1)):
            x = conv(x, f"conv{place}", strides[place - 1], pad)
            x = norm(x, f"norm{place}") if "3BN" in row else x
            x = act(x) if "3ReLU" in row else x
    x = conv(x, "proj", strides[-1], padding)
    x = norm(x, "norm") if "1BN" in row else x
    return act(x) if "1ReLU" in row else x


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_every_row_is_the_layers_that_its_name_says(row: Components, act: Any) -> None:
    stem = shaken(stem_of(8, row, act=act)).double()
    for norm in stem.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    image = noise(2, 3, 16, 24)
    strides = (2, 1, 1, 4) if row.startswith("3Conv") else (8,)
    expected = written_out(stem, image, row, F.relu if act == "relu" else F.gelu, strides, 0)
    torch.testing.assert_close(stem.eval()(image), expected, rtol=1e-12, atol=1e-12)


def test_average_strides_keep_the_kernels_and_pad_the_last_by_3() -> None:
    row: Components = "3Conv+1Proj+1ReLU"
    stem = stem_of(16, row, strides=(2, 2, 2, 2)).double()
    convs = [part for part in stem.modules() if isinstance(part, nn.Conv2d)]
    assert [conv.kernel_size[0] for conv in convs] == [7, 3, 3, 8]
    image = noise(2, 3, 32, 48)
    torch.testing.assert_close(stem(image), written_out(stem, image, row, F.relu, (2, 2, 2, 2), 3))
    assert size(stem) == size(stem_of(16, row))


def test_the_full_stem_is_volos() -> None:
    network = cut("volo", "volo_d1_224").double().eval()
    image, state = noise(2, 3, 64, 64), network.state_dict()
    expected = network(image)
    treat(network, "conv_stem")
    own = [f"conv.{place}" for place in (0, 1, 3, 4, 6, 7)] + ["proj"]
    new = ["conv1", "norm1", "conv2", "norm2", "conv3", "norm3", "proj"]
    names = {f"patch_embed.{old}.": f"patch_embed.proj.layers.{name}." for old, name in zip(own, new, strict=True)}
    renamed = {}
    for key, value in state.items():
        prefix = next((prefix for prefix in names if key.startswith(prefix)), "")
        renamed[names.get(prefix, "") + key.removeprefix(prefix)] = value
    network.load_state_dict(renamed)
    torch.testing.assert_close(network(image), expected, rtol=1e-12, atol=1e-12)


def test_one_projection_re_makes_the_patch_convolution_also_where_it_overlaps() -> None:
    network = cut("pit", "pit_ti_224")
    replaced = network.patch_embed.conv
    (conv,) = treat(network, {"conv_stem": {"components": "1Proj"}}).patch_embed.conv.layers
    assert (replaced.kernel_size, replaced.stride) == ((16, 16), (8, 8))
    assert str(conv) == str(replaced)


def test_the_projection_overlaps_as_pit_does() -> None:
    stem = treat(cut("pit", "pit_ti_224"), "conv_stem").patch_embed.conv
    proj = stem.layers.proj
    assert (proj.kernel_size, proj.stride, proj.padding) == ((8, 8), (4, 4), (0, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_stem_has_the_precision_and_the_mode_of_the_network(dtype: torch.dtype) -> None:
    network = treat(tiny_vit().to(dtype).eval(), "conv_stem")
    assert {parameter.dtype for parameter in network.parameters()} == {dtype}
    assert not any(module.training for module in network.modules())
    assert network(torch.zeros(1, 3, 32, 48, dtype=dtype)).dtype == dtype


def test_a_projection_without_bias_stays_so() -> None:
    network = treat(tiny_vit(pre_norm=True), "conv_stem")
    assert network.patch_embed.proj.layers.proj.bias is None


# Scaled ReLU


def last_block() -> tuple[ConvStem, nn.BatchNorm2d, nn.ReLU]:
    stem = stem_of(8, "3Conv+3BN+3ReLU+1Proj").double()
    return stem, stem.layers.norm3, stem.layers.act3


eight = st.lists(st.floats(0.01, 100), min_size=8, max_size=8).map(lambda v: torch.tensor(v, dtype=torch.float64))
eight_signed = st.lists(st.floats(-9, 9), min_size=8, max_size=8).map(lambda v: torch.tensor(v, dtype=torch.float64))


@given(beta=eight, alpha=eight_signed, seed=st.integers(0, 99))
@few
def test_batch_norm_and_relu_are_the_scaled_relu_of_the_normalised_input(
    beta: Tensor, alpha: Tensor, seed: int
) -> None:
    """Eq. 1: with scale beta > 0 and shift alpha, ReLU(BN(x)) = ReLU_{alpha / beta, beta}((x - mean) / sd)."""
    _, norm, relu = last_block()
    norm.weight.data, norm.bias.data = beta, alpha
    x = torch.randn(4, 8, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3 + 1
    centred = x - x.mean((0, 2, 3), keepdim=True)
    normalised = centred / (centred.square().mean((0, 2, 3), keepdim=True) + norm.eps).sqrt()
    expected = scaled_relu(normalised, (alpha / beta)[:, None, None], beta[:, None, None])
    torch.testing.assert_close(relu(norm.train()(x)), expected, rtol=1e-9, atol=1e-9)


@given(eta=eight, seed=st.integers(0, 99))
@few
def test_the_rescaling_of_theorem_1_leaves_the_function_and_bounds_its_weight_decay(eta: Tensor, seed: int) -> None:
    """Proof of Theorem 1: beta_c, alpha_c times eta_c > 0 and W_c divided by eta_c is the same function.

    W is what follows the last scaled ReLU, here the stem's projection (Remark 1). The decay of both,
    sum_c alpha_c^2 + beta_c^2 + |W_c|_2^2, is at least 2 sum_c |W_c|_2 sqrt(alpha_c^2 + beta_c^2), which the rescaling
    does not change and which is reached at eta_c = (|W_c|_2^2 / (alpha_c^2 + beta_c^2))^(1/4). The theorem's l1 norm,
    2 / sqrt(m) sum_c |W_c|_1 sqrt(alpha_c^2 + beta_c^2) with m weights a channel, is a lower bound of that; it is
    reached only where all weights of a channel have the same magnitude.
    """
    stem, norm, _ = last_block()
    shaken(stem)
    weight = stem.layers.proj.weight  # [D, hidden, k, k]
    image = torch.randn(3, 3, 16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    channel = weight.detach().transpose(0, 1).flatten(1)  # [hidden, m]
    gain = torch.hypot(norm.weight, norm.bias).detach()
    group = 2 * (channel.norm(dim=1) * gain).sum()
    lasso = 2 / channel.shape[1] ** 0.5 * (channel.abs().sum(1) * gain).sum()

    def rescaled(by: Tensor) -> tuple[Tensor, Tensor]:
        """Output and decay after rescaling; the parameters come back."""
        with torch.no_grad():
            for factor in (by, 1 / by):
                norm.weight *= factor
                norm.bias *= factor
                weight.div_(factor[:, None, None])
                if factor is by:
                    result = stem(image), norm.weight.square().sum() + norm.bias.square().sum() + weight.square().sum()
        return result

    with torch.no_grad():
        expected = stem(image)
    output, decay = rescaled(eta)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    assert decay >= group * (1 - 1e-9)
    assert group >= lasso
    _, least = rescaled((channel.norm(dim=1) / gain).sqrt())
    torch.testing.assert_close(least, group, rtol=1e-9, atol=0)


# Errors


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"strides": [2, 2, 2, 2]},
            r"the strides \[2, 2, 2, 2\] multiply to 16, but the patch stride of .* is 8; choose",
        ),
        ({"strides": [1, 1, 1, 1]}, "multiply to 1, but the patch stride of this network is 8"),
    ],
)
def test_strides_that_do_not_multiply_to_the_patch_are_a_sentence(options: dict[str, Any], sentence: str) -> None:
    network = tiny_vit()
    before = str(network)
    with pytest.raises(TreatmentError, match=sentence):
        treat(network, {"conv_stem": options})
    assert str(network) == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"strides": [8, 1, 1, 1]}, "skip pixels: the kernels of the first three layers are"),
        ({"strides": [2, 4, 1, 1]}, "skip pixels"),
        ({"strides": [2, 1, 4]}, "at least 4 items"),
        ({"components": "1Proj", "strides": [2, 1, 1, 4]}, "1Proj has one convolution .*: remove strides"),
        ({"components": "3Conv+3BN+1Proj", "act": "gelu"}, "act gelu has no effect: 3Conv.3BN.1Proj"),
        ({"components": "2Conv+1Proj"}, "conv_stem.components"),
    ],
)
def test_options_at_odds_are_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        treat(tiny_vit(), {"conv_stem": options})


def test_patches_that_are_not_square_have_derived_strides_and_refuse_given_ones() -> None:
    assert treat(tiny_vit(patch_size=(8, 16)), "conv_stem")(torch.zeros(2, 3, 32, 48)).shape == (2, 5)
    with pytest.raises(TreatmentError, match="patch stride of this network is 16"):
        treat(tiny_vit(patch_size=(8, 16)), {"conv_stem": {"strides": [2, 1, 1, 4]}})


def test_a_hybrid_has_a_convolutional_stem_already() -> None:
    network = timm.create_model("vit_tiny_r_s16_p8_224", img_size=64, depth=1)
    with pytest.raises(TreatmentError, match=r"patches; patch_embed\.backbone\.conv has kernel \(7, 7\), stride"):
        treat(network, "conv_stem")


def test_a_resnet_is_a_sentence() -> None:
    with pytest.raises(
        TreatmentError,
        match="conv_stem does not fit ResNet: it needs a convolution that cuts the image into patches; conv1 has",
    ):
        treat(cut("resnet", "resnet18"), "conv_stem")
