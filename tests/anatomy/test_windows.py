"""Windows: the recorded positions are where the network's own windows come from."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from tests.anatomy.attention_oracle import _to_windows
from tests.anatomy.networks import NETWORKS, shaken
from vitclinic.anatomy import Anatomy, AttentionMap, Windows, into, out_of, record_attention, taps


def _swin(kind: type[nn.Module], img_size: tuple[int, int]) -> nn.Module:
    return kind(img_size=img_size, window_size=4, embed_dim=12, depths=(2, 2), num_heads=(2, 2), num_classes=5)


CASES = {
    # A grid of 18 x 26 cells, then 9 x 13: padded at both, and shifted.
    "timm swin": lambda: _swin(timm.models.SwinTransformer, (72, 104)),
    "timm swin v2": lambda: _swin(timm.models.SwinTransformerV2, (64, 96)),
    "huggingface swin": NETWORKS.get("huggingface swin"),
}


@pytest.mark.parametrize("name", CASES)
def test_windows_hold_the_grid_cells_that_their_positions_say(name: str) -> None:
    build = CASES[name] or pytest.skip("transformers is not installed")
    network = shaken(build()).eval()
    anatomy = Anatomy.of(network)
    units = anatomy.of_kind("msa")
    post_norm = isinstance(network, timm.models.SwinTransformerV2)
    sites = {(unit.name, "windows"): into(unit.attention.module) for unit in units}
    sites |= {(unit.name, "grid"): unit.input if post_norm else out_of(unit.norm, unit.input.layout) for unit in units}
    maps: dict[str, AttentionMap] = {}
    images = torch.randn(2, 3, *getattr(getattr(network, "patch_embed", None), "img_size", (64, 64)))
    with (
        taps(sites) as seen,
        record_attention(units, lambda seen: maps.__setitem__(seen.unit.name, seen)),
        torch.no_grad(),
    ):
        network(images)
    assert any(any(maps[unit.name].windows.shift) for unit in units)
    for unit in units:
        grid_bhwc = anatomy.grid(unit.input, seen[unit.name, "grid"]).permute(0, 2, 3, 1)
        assert torch.equal(_to_windows(grid_bhwc, maps[unit.name]), seen[unit.name, "windows"])


@pytest.mark.parametrize("name", [*CASES, "torchvision swin, padded", "torchvision swin_v2"])
def test_tokens_see_each_other_exactly_where_the_regions_say_so(name: str) -> None:
    build = CASES.get(name) or NETWORKS.get(name) or pytest.skip("transformers is not installed")
    network = build().eval()  # not shaken: logits are small, and a mask of -100 leaves a weight of about 1e-44
    units = Anatomy.of(network).of_kind("msa")
    maps: dict[str, AttentionMap] = {}
    images = torch.randn(2, 3, *getattr(getattr(network, "patch_embed", None), "img_size", (64, 64)))
    with record_attention(units, lambda seen: maps.__setitem__(seen.unit.name, seen)), torch.no_grad():
        network(images)
    masked = 0
    for seen in maps.values():
        regions = seen.windows.regions(seen.grid)
        together = regions[:, :, None] == regions[:, None]
        assert torch.equal(seen.by_image() > 1e-30, together[:, None].expand_as(seen.by_image()))
        masked += int((~together).sum())
        real = seen.positions()[..., 0] >= 0
        assert torch.equal(seen.visible(), together & real[:, :, None] & real[:, None])
    assert masked > 0


def test_global_attention_is_one_window_in_reading_order() -> None:
    places = Windows((2, 3)).positions((2, 3))
    assert places.tolist() == [[[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]]


def test_every_cell_is_in_exactly_one_window_whatever_the_padding() -> None:
    for pad_first in (False, True):
        places = Windows((4, 3), (2, 1), pad_first).positions((5, 7)).reshape(-1, 2)
        cells = places[places[:, 0] >= 0]
        assert len(cells) == len(cells.unique(dim=0)) == 5 * 7
        assert len(places) == 8 * 9
