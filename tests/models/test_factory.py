import pytest
import torch

from vitclinic._core.errors import ModelError
from vitclinic.models import check_fit, create_model
from vitclinic.models.factory import fit_patch_size

SMALL = {
    "vit_tiny_patch16_224": {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2},
    "mixer_s16_224": {"patch_size": 4, "embed_dim": 24, "num_blocks": 2},
    "pit_ti_224": {
        "patch_size": 4,
        "stride": 2,
        "base_dims": [8, 8, 8],
        "depth": [1, 1, 1],
        "heads": [1, 2, 2],
    },
    "swin_tiny_patch4_window7_224": {"patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": [1, 1]},
    "resnet18": {"channels": [4, 4, 8, 8]},
    "convnext_atto": {"depths": [1, 1, 1, 1], "dims": [4, 4, 8, 8]},
    "vit_tiny_fitted": {"embed_dim": 24, "depth": 1, "num_heads": 2},
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_family_takes_its_keywords_and_the_data_s_shape(name, channels):
    network = create_model(name, img_size=32, in_chans=channels, num_classes=7, **SMALL[name])
    check_fit(network, channels, (32, 32), 7)
    assert network.training


def test_normalisation_is_part_of_the_network():
    network = create_model("resnet18", channels=[4, 4, 8, 8], mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7]).eval()
    pixels = torch.rand(2, 3, 32, 32)
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7])
    by_hand = network.backbone((pixels - mean[:, None, None]) / std[:, None, None])
    assert torch.equal(network(pixels), by_hand)
    assert {"mean", "std"} <= set(network.state_dict())


def test_published_statistics_unless_given():
    assert torch.allclose(create_model("vit_tiny_patch16_224", depth=1).mean.flatten(), torch.tensor(0.5))
    grey = create_model("resnet18", channels=[4, 4, 8, 8], in_chans=1)
    assert grey.mean.shape == (1, 1, 1)


def test_our_patch_gives_way_to_a_given_one():
    assert create_model("vit_tiny_fitted", img_size=32).backbone.patch_embed.patch_size == (4, 4)
    assert create_model("vit_tiny_fitted", img_size=32, patch_size=8).backbone.patch_embed.patch_size == (
        8,
        8,
    )


@pytest.mark.parametrize("side", range(1, 300))
def test_the_fitted_patch_divides_every_image(side):
    patch = fit_patch_size(side)
    assert side % patch == 0
    assert side // patch >= min(side, 8)


@pytest.mark.parametrize(
    ("name", "keywords", "message"),
    [
        ("vit_tny_patch16_224", {}, "Did you mean 'vit_tiny_patch16_224'"),
        ("vit_tiny_patch16_224", {"colour": 1}, "does not accept model.colour"),
        ("resnet18", {"colour": 1, "img_size": 32}, "does not accept model.colour"),
        ("vit_tiny_patch16_224", {"num_heads": 7}, "divisible by num_heads"),
        ("vit_tiny_patch16_224", {"class_token": "no, thanks"}, "class_token must be true or false"),
        ("vit_tiny_fitted", {"qkv_bias": 7, "img_size": 32}, r"qkv_bias must be true or false \(got 7\)"),
    ],
)
def test_timm_s_complaint_becomes_a_sentence(name, keywords, message):
    with pytest.raises(ModelError, match=message):
        create_model(name, **keywords)


def test_a_network_that_does_not_fit_the_images():
    network = create_model("vit_tiny_patch16_224", img_size=8, depth=1)
    with pytest.raises(ModelError, match=r"does not accept 3 x 8 x 8 images.*model\.patch_size"):
        check_fit(network, 3, (8, 8), 1000)
    with pytest.raises(ModelError, match="1000"):
        check_fit(create_model("resnet18", channels=[4, 4, 8, 8]), 3, (32, 32), 10)


def test_without_normalization_it_is_timms_own_network():
    torch.manual_seed(0)
    bare = create_model("vit_tiny_fitted", img_size=16, depth=1, num_classes=3, normalize=False).eval()
    torch.manual_seed(0)
    whole = create_model("vit_tiny_fitted", img_size=16, depth=1, num_classes=3).eval()
    pixels = torch.rand(2, 3, 16, 16)
    assert type(bare).__module__.startswith("timm.")
    assert torch.equal(whole(pixels), bare((pixels - whole.mean) / whole.std))
    with pytest.raises(ModelError, match="mean and std are for normalization"):
        create_model("resnet18", normalize=False, mean=[0.5] * 3)
