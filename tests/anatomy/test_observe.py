"""Observation agrees with the families made by hand, and describes networks that no family knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.anatomy import handwritten
from tests.anatomy.map_products import Products
from tests.anatomy.networks import NETWORK_PARAMS, NETWORKS, shaken
from tests.anatomy.zoo import ZOO
from tests.anatomy.zoo.kinds import describe_kinds, read_kinds
from vitclinic._core.errors import AnatomyError, UnknownStructureError
from vitclinic.anatomy import Anatomy, AttentionMap, Site, Unit, record_attention, taps
from vitclinic.anatomy.families import recognise
from vitclinic.anatomy.wrappers import unwrap

OTHER_STAGES = ("timm volo",)
"""VOLO's family counts the entries of a list as stages; on the grid, they are one."""


@pytest.fixture(params=NETWORK_PARAMS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pair(name: str) -> tuple[nn.Module, Tensor, Anatomy, Anatomy]:
    """A network with images, its anatomy as its family says, and as one pass shows."""
    torch.manual_seed(0)
    network = shaken(NETWORKS[name]()).eval()
    core, family = recognise(network)
    images = torch.randn(2, *family.input_size(core), generator=torch.Generator().manual_seed(1))
    try:
        by_hand = Anatomy._of_family(core, family, network, images)
    except AnatomyError:
        pytest.skip("its family does not know the network's blocks")
    return network, images, by_hand, Anatomy._by_observation(core, network, images)


def close(actual: Tensor, expected: Tensor) -> bool:
    if actual.numel() != expected.numel():
        return False
    return bool((actual.flatten() - expected.flatten()).abs().max() <= 1e-5 * expected.abs().max())


def sites(anatomy: Anatomy) -> dict[tuple[int, str], Site]:
    found = {}
    for unit in anatomy.units:
        found[unit.depth, "input"], found[unit.depth, "output"] = unit.input, unit.output
        if unit.residual is not None:
            found |= {(unit.depth, part): site for part, site in unit.residual.sites.items()}
        if unit.activation is not None:
            found[unit.depth, "activation"] = unit.activation
    return found


def test_units_are_of_the_same_kinds_and_stages(name: str, pair: tuple[nn.Module, Tensor, Anatomy, Anatomy]) -> None:
    _, _, by_hand, observed = pair
    assert [unit.kind for unit in observed.units] == [unit.kind for unit in by_hand.units]
    if not name.startswith(OTHER_STAGES):
        assert [unit.stage for unit in observed.units] == [unit.stage for unit in by_hand.units]


def test_every_site_shows_the_same_numbers(pair: tuple[nn.Module, Tensor, Anatomy, Anatomy]) -> None:
    network, images, by_hand, observed = pair
    expected, actual = sites(by_hand), sites(observed)
    assert actual.keys() == expected.keys()
    both = {("by hand", *key): site for key, site in expected.items()}
    both |= {("observed", *key): site for key, site in actual.items()}
    with torch.no_grad(), taps(both) as seen:
        network(images)
    for key, site in expected.items():
        ours, theirs = seen["observed", *key], seen["by hand", *key]
        if key[1] in ("input", "output"):
            if not actual[key].layout.spatial:  # the class blocks of VOLO: observed is the state, the class token
                theirs = theirs[:, : ours.shape[1]] if theirs.ndim == 3 else theirs
            elif site.layout.spatial:
                ours, theirs = observed.grid(actual[key], ours), by_hand.grid(site, theirs)
        assert close(ours, theirs), (by_hand.units[key[0]].name, key[1])


def test_attention_maps_are_the_same(pair: tuple[nn.Module, Tensor, Anatomy, Anatomy]) -> None:
    network, images, by_hand, observed = pair
    if not any(unit.attention for unit in by_hand.units):
        pytest.skip("no attention")
    expected, actual = (maps(network, images, anatomy) for anatomy in (by_hand, observed))
    assert [seen.unit.depth for seen in actual] == [seen.unit.depth for seen in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.allclose(ours.weights, theirs.weights, atol=1e-6)
        assert (ours.prefix, ours.prefix_queries, ours.grid) == (theirs.prefix, theirs.prefix_queries, theirs.grid)
        assert torch.equal(ours.positions(), theirs.positions())
        assert torch.equal(ours.visible(), theirs.visible())


def maps(network: nn.Module, images: Tensor, anatomy: Anatomy) -> list[AttentionMap]:
    found: list[AttentionMap] = []
    units = [unit for unit in anatomy.units if unit.attention is not None]
    with torch.no_grad(), record_attention(units, found.append):
        network(images)
    return found


QUICK = (
    *("timm/beit_base_patch16_224", "timm/eva02_tiny_patch14_224", "timm/cait_xxs24_224", "timm/xcit_nano_12_p16_224"),
    *("timm/twins_svt_small", "timm/pvt_v2_b0", "timm/nest_tiny", "timm/hiera_tiny_224", "timm/tnt_s_patch16_224"),
    *("timm/caformer_s18", "timm/test_maxvit", "timm/poolformer_s12", "timm/convmixer_768_32", "timm/mobilenetv2_050"),
    *("timm/densenet121", "timm/res2net50_14w_8s", "timm/vit_relpos_small_patch16_224", "timm/gmlp_ti16_224"),
    *("transformers/Dinov2ForImageClassification", "transformers/CLIPVisionModel", "transformers/SiglipVisionModel"),
    *("transformers/SegformerForImageClassification", "torchvision/maxvit", "torchvision/densenet"),
    *(name for name in ZOO if name.startswith("hand-written/")),
)


KINDS = read_kinds()


def contract(name: str) -> None:
    """Hold what must be true of any network's anatomy."""
    entry = ZOO[name]
    network, images = entry.awake(), entry.images()
    anatomy = observe(network, images)
    assert describe_kinds(anatomy) == KINDS[name]
    plain = logits(network, images)
    reading = {key: site for key, site in sites(anatomy).items() if key[1] != "activation"}
    with torch.no_grad(), taps(reading) as seen:
        assert torch.equal(tensor(run(network, images)), plain)
    for unit in anatomy.units:
        if unit.residual is not None:
            parts = [seen[unit.depth, part] for part in unit.residual.sites if part != "total"]
            assert close(sum(parts), seen[unit.depth, "total"]), unit
        if unit.output.layout.spatial:
            grid = anatomy.grid(unit.output, seen[unit.depth, "output"])
            assert grid.shape[0] == len(images)
            assert grid.shape[2:] == unit.output.layout.size
    found = []
    units = [unit for unit in anatomy.units if unit.attention is not None]
    products = Products()
    with torch.no_grad(), products, record_attention(units, found.append), record_attention(units, products.expect):
        run(network, images)
    assert products.unapplied(1e-5) == []
    for seen_map in found:
        assert torch.allclose(seen_map.weights.sum(-1), torch.ones(()), atol=1e-4)
        assert len(seen_map.by_image()) == len(images)
        assert seen_map.weights.shape[-1] == seen_map.prefix + seen_map.positions().shape[1]
    for unit in some_removable(anatomy):
        with anatomy.remove(unit):
            assert not torch.equal(logits(network, images), plain), unit
    assert torch.equal(logits(network, images), plain)


def some_removable(anatomy: Anatomy, most: int = 4) -> list[Unit]:
    """Return removable units of each kind and way of removal, the first and last among them: each costs a pass.

    benchmarks/anatomies.py removes every unit of every network.
    """
    alike: dict[tuple[str, str], list[Unit]] = {}
    for unit in anatomy.units:
        if unit.removal is not None:
            alike.setdefault((unit.kind, unit.removal.how), []).append(unit)
    places = [(group, np.linspace(0, len(group) - 1, min(most, len(group)))) for group in alike.values()]
    return [group[round(place)] for group, chosen in places for place in chosen]


def observe(network: nn.Module, images: Tensor) -> Anatomy:
    torch.manual_seed(0)
    return Anatomy._by_observation(unwrap(network)[0], network, images)


def run(network: nn.Module, images: Tensor) -> object:
    torch.manual_seed(0)  # ViTMAE draws an order of patches
    return network(images)


def logits(network: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor(run(network, images))


def tensor(output: object) -> Tensor:
    """Return the logits of ten classes among a network's outputs, or the first tensor."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        output = list(output.values())
    elif not isinstance(output, tuple | list):
        output = list(vars(output).values())
    tensors = [value for value in output if isinstance(value, Tensor)]
    return next((value for value in tensors if value.shape[1:] == (10,)), tensors[0])


@pytest.mark.parametrize("name", QUICK)
def test_any_network_has_an_anatomy(name: str) -> None:
    contract(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name not in QUICK])
def test_every_network_of_the_zoo_has_an_anatomy(name: str) -> None:
    contract(name)


def kinds(anatomy: Anatomy) -> Iterator[str]:
    return (unit.kind for unit in anatomy.units)


def test_a_shared_block_is_as_many_units_as_calls_and_each_is_removed_alone() -> None:
    entry = ZOO["hand-written/shared_block_vit"]
    network, images = entry.awake(), entry.images()
    anatomy = Anatomy.of(network, images)
    assert list(kinds(anatomy)) == ["stem", *("msa", "mlp") * 3, "head"]
    mlps = anatomy.of_kind("mlp")
    totals = {unit.name: unit.residual.total for unit in mlps}
    skips = {(unit.name, "skip"): unit.residual.skip for unit in mlps}
    with torch.no_grad(), anatomy.remove(mlps[1]), taps({**totals, **skips}) as seen:
        network(images)
    same = [torch.equal(seen[unit.name], seen[unit.name, "skip"]) for unit in mlps]
    assert same == [False, True, False]


def test_a_network_that_runs_twice_is_read_once_and_says_so() -> None:
    entry = ZOO["hand-written/flip_averaged_vit"]
    network, images = entry.awake(), entry.images(5)
    anatomy = Anatomy.of(network, images)
    assert any("runs 2 times" in note for note in anatomy.notes)
    batches: list[int] = []
    with torch.no_grad(), record_attention(anatomy.of_kind("msa"), lambda seen: batches.append(len(seen.weights))):
        network(images)
    assert batches == [5] * len(anatomy.of_kind("msa"))


def test_a_map_that_is_not_applied_is_found_out() -> None:
    """The check of `contract` can fail: of a map with two keys exchanged, and of one that is mixed unlike any other."""
    entry = ZOO["hand-written/linear_patch_vit"]
    network, images = entry.awake(), entry.images()
    units = Anatomy.of(network, images).of_kind("msa")
    for change in (lambda weights: weights.flip(-1), lambda weights: weights**2):
        products = Products()

        def expect(
            seen: AttentionMap, products: Products = products, change: Callable[[Tensor], Tensor] = change
        ) -> None:
            products.expect(replace(seen, weights=change(seen.weights)))

        with torch.no_grad(), products, record_attention(units, expect):
            network(images)
        assert products.unapplied(1e-5) == [unit.name for unit in units]


def test_a_dense_layer_is_removed_by_zeros_beside_the_features_of_others() -> None:
    entry = ZOO["hand-written/dense_cnn"]
    network, images = entry.awake(), entry.images()
    anatomy = Anatomy.of(network, images)
    convs = anatomy.of_kind("conv")
    assert [unit.removal.how for unit in convs] == ["branch set to zero"] * 4
    state = network.stem(images)
    for number, layer in enumerate(network.layers):
        state = torch.cat([state, layer(state) * (number != 2)], dim=1)
    with torch.no_grad(), anatomy.remove(convs[2]):
        assert close(network(images), network.head(state.mean((2, 3))))


def test_a_convolution_with_a_stride_is_removed_by_subsampling_and_one_that_all_features_pass_only_then() -> None:
    chain = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1, groups=8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )
    images = torch.rand(2, 3, 9, 9)
    anatomy = Anatomy.of(chain, images)
    assert [unit.removal and unit.removal.how for unit in anatomy.of_kind("conv")] == [
        "conv replaced by subsampling",
        None,
    ]
    with torch.no_grad(), anatomy.remove(anatomy.of_kind("conv")[0]):
        assert close(chain(images), chain[3:](chain[:2](images)[..., ::2, ::2]))


@pytest.mark.parametrize("rows", [2, 4])
def test_grids_that_are_not_square_are_told_from_prefix_tokens(rows: int) -> None:
    import timm

    network = timm.create_model("vit_tiny_patch16_224", img_size=(16 * rows, 48), reg_tokens=3, depth=1, embed_dim=48)
    anatomy = Anatomy._by_observation(network, network, torch.randn(1, 3, 16 * rows, 48))
    layout = anatomy.of_kind("mlp")[0].output.layout
    assert (layout.prefix, layout.size) == (4, (rows, 3))


def test_what_is_no_network_of_units_is_refused_by_its_class() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 10))
    with pytest.raises(UnknownStructureError, match="Sequential shows no units"):
        Anatomy.of(network, torch.rand(1, 3, 4, 4))


def test_an_error_of_the_network_is_a_sentence() -> None:
    with pytest.raises(AnatomyError, match=r"LinearPatchViT cannot take 3 x 31 x 31 images: shape"):
        Anatomy.of(ZOO["hand-written/linear_patch_vit"].build(), torch.rand(1, 3, 31, 31))


def test_a_network_without_an_example_is_tried_at_the_usual_sizes() -> None:
    anatomy = Anatomy.of(ZOO["hand-written/encoder_vit"].build())
    assert anatomy.of_kind("msa")


def test_a_wrong_family_registered_by_hand_is_still_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitclinic.anatomy import Family, out_of
    from vitclinic.anatomy.families import family as registry
    from vitclinic.anatomy.units import Residual

    def units(network: nn.Module) -> list[Unit]:
        conv, last = out_of(network[0]), out_of(network[2])
        return [Unit("block", "conv", 0, network[2], conv, last, residual=Residual(conv, last, last))]

    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
    wrong = Family("mine", ("torch.nn.modules.container.Sequential",), units)
    monkeypatch.setattr(registry, "_families", [wrong, *registry._families])
    with pytest.raises(AnatomyError, match=r"output is not skip \+ branch"):
        Anatomy.of(network, torch.rand(1, 3, 8, 8))


class LoopedAttention(handwritten.Attention):
    """Attention computed by a loop over its queries, in two pieces, or over its heads."""

    over = "queries"

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.to_qkv(self.norm(x)).chunk(3, dim=-1))
        axis = 2 if self.over == "queries" else 1
        whole = [(q, k, v)] if self.over == "queries" else zip(*(t.split(1, 1) for t in (q, k, v)), strict=True)
        pieces = [(piece, k, v) for q, k, v in whole for piece in (q.chunk(2, 2) if axis == 2 else [q])]
        out = torch.cat([self.attend(q @ k.mT * self.scale) @ v for q, k, v in pieces], dim=axis)
        return self.to_out(out.transpose(1, 2).reshape(b, n, c))


@pytest.mark.parametrize(("over", "has_maps"), [("heads", True), ("queries", False)])
def test_a_loop_over_heads_makes_one_map_and_one_over_queries_none(over, has_maps):
    network = handwritten.LinearPatchViT().eval()
    image = torch.rand(1, 3, 32, 32)
    expected = network(image)
    for attention, _ in network.transformer.layers:
        attention.__class__ = type("Looped", (LoopedAttention,), {"over": over})
    torch.testing.assert_close(network(image), expected)
    anatomy = Anatomy.of(network, image)
    assert all((unit.attention is not None) == has_maps for unit in anatomy.of_kind("msa"))
    assert any("no map" in note for note in anatomy.notes) != has_maps
