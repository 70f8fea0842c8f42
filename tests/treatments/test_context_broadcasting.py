"""Context Broadcasting against its formula, written out with the network's own pieces, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.anatomy.networks import NETWORKS, cut, shaken, tiny_vit
from vitclinic._core.errors import RecipeError, TreatmentError
from vitclinic.anatomy import Anatomy, Unit, taps
from vitclinic.anatomy.families import recognise
from vitclinic.treatments import ContextBroadcasting, ScaledContextBroadcasting, treat

SMALL = [
    *("vit, not square, registers", "vit, no class token", "vit, post-norm", "vit, layer scale and drop path"),
    *("timm pit", "swin, not square, padded", "timm swinv2", "mixer", "torchvision vit", "torchvision swin, padded"),
    *(name for name in ("huggingface vit", "huggingface deit", "huggingface swin") if name in NETWORKS),
]
GLOBAL = [name for name in SMALL if not any(word in name for word in ("swin", "mixer"))]
SCALED = ["vit, not square, registers", "swin, not square, padded", "mixer", "torchvision vit"]
POST_NORM = ("vit, post-norm", "timm swinv2")
MLP_POSITIONS = ["mlp_front", "mlp_mid", "mlp_end"]

MORE: dict[str, Callable[[], nn.Module]] = {
    "timm pit": lambda: cut("pit", "pit_b_224"),
    "timm swinv2": lambda: cut("swin_transformer_v2", "swinv2_tiny_window8_256"),
    "mixer": lambda: cut("mlp_mixer", "mixer_s16_224"),
    "gmlp": lambda: cut("mlp_mixer", "gmlp_s16_224"),
}

Formula = Callable[[Tensor], Tensor]


def build(name: str) -> nn.Module:
    return shaken((NETWORKS | MORE)[name]()).double().eval()


def images(network: nn.Module) -> Tensor:
    core, family = recognise(network)
    return torch.randn(2, *family.input_size(core), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def broadcast(x: Tensor) -> Tensor:
    """Eq. 1, token by token."""
    tokens = x.reshape(len(x), -1, x.shape[-1])
    mean = sum(tokens.unbind(1)) / tokens.shape[1]
    return torch.stack([(token + mean) / 2 for token in tokens.unbind(1)], dim=1).reshape(x.shape)


def scaled_broadcast(scale: Tensor) -> Formula:
    """CB_S, token by token."""

    def formula(x: Tensor) -> Tensor:
        tokens = x.reshape(len(x), -1, x.shape[-1])
        mean = sum(tokens.unbind(1)) / tokens.shape[1]
        return torch.stack([token + scale * mean for token in tokens.unbind(1)], dim=1).reshape(x.shape)

    return formula


def mlp_layers(mlp: Any) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The two layers of an MLP of any library and the activation between them."""
    if isinstance(mlp, nn.Sequential):
        return mlp[0], mlp[1], mlp[3]
    return mlp.fc1, mlp.act if hasattr(mlp, "act") else mlp.activation_fn, mlp.fc2


def layer_scale(network: nn.Module, unit: Unit) -> nn.Module:
    block: Any = network.get_submodule(str(unit.block))
    return getattr(block, {"msa": "ls1", "mlp": "ls2"}[unit.kind], nn.Identity())


def mlp_branch(unit: Unit, x: Tensor, position: str, formula: Formula, *, post_norm: bool) -> Tensor:
    """The branch of an untreated network's MLP with `formula` put in at `position`, by hand."""
    first, activation, second = mlp_layers(unit.module)
    at = {name: formula if name == position else (lambda y: y) for name in MLP_POSITIONS}
    assert unit.norm is not None
    y = at["mlp_front"](x if post_norm else unit.norm(x))
    y = at["mlp_end"](second(at["mlp_mid"](activation(first(y)))))
    return unit.norm(y) if post_norm else y


def states(network: nn.Module, x: Tensor) -> dict[tuple[str, str], Tensor]:
    """What goes into each unit of a block, and its branch."""
    sites = {}
    for unit in Anatomy.of(network).of_kind("msa", "mlp", "token_mlp"):
        sites |= {(unit.name, "input"): unit.input, (unit.name, "branch"): unit.branch}
    with torch.no_grad(), taps(sites) as seen:
        network(x)
    return dict(seen)


@pytest.mark.parametrize("position", MLP_POSITIONS)
@pytest.mark.parametrize(("name", "scaled"), [*((name, False) for name in SMALL), *((name, True) for name in SCALED)])
def test_the_mlp_branch_is_the_formula(name: str, scaled: bool, position: str) -> None:
    untreated = build(name)
    x = images(untreated)
    anatomy = Anatomy.of(untreated)
    last = anatomy.of_kind("mlp")[-1]
    settings = {"scaled": scaled, "position": position, "layers": "all"}
    treated = treat(copy.deepcopy(untreated), {"context_broadcasting": settings})
    formula: Formula = broadcast
    if scaled:
        parts = [module for module in treated.modules() if isinstance(module, ScaledContextBroadcasting)]
        assert len(parts) == len(anatomy.blocks)
        width = mlp_layers(last.module)[2 if position == "mlp_mid" else 0].in_features
        with torch.no_grad():
            parts[-1].scale.copy_(torch.linspace(-1, 2, int(width)))
        formula = scaled_broadcast(parts[-1].scale.detach())
    seen = states(treated, x)
    with torch.no_grad():
        expected = mlp_branch(last, seen[last.name, "input"], position, formula, post_norm=name in POST_NORM)
        expected = layer_scale(anatomy.network, last)(expected)
    torch.testing.assert_close(seen[last.name, "branch"], expected.reshape(seen[last.name, "branch"].shape))


@pytest.mark.parametrize("position", ["msa_end", "both"])
@pytest.mark.parametrize("name", GLOBAL)
def test_the_attention_branch_is_the_formula(name: str, position: str) -> None:
    untreated = build(name)
    x = images(untreated)
    anatomy = Anatomy.of(untreated)
    treated = treat(copy.deepcopy(untreated), {"context_broadcasting": {"position": position}})
    seen = states(treated, x)
    msa, mlp = anatomy.blocks[-1].unit("msa"), anatomy.blocks[-1].unit("mlp")
    assert msa is not None
    assert msa.norm is not None
    assert mlp is not None
    with torch.no_grad():
        state = seen[msa.name, "input"]
        y = state if name in POST_NORM else msa.norm(state)
        y = msa.module(y, y, y) if isinstance(msa.module, nn.MultiheadAttention) else msa.module(y)
        y = broadcast(y if isinstance(y, Tensor) else y[0])
        y = layer_scale(anatomy.network, msa)(msa.norm(y) if name in POST_NORM else y)
        where = "mlp_end" if position == "both" else "nowhere"
        branch = mlp_branch(mlp, seen[mlp.name, "input"], where, broadcast, post_norm=name in POST_NORM)
        branch = layer_scale(anatomy.network, mlp)(branch)
    torch.testing.assert_close(seen[msa.name, "branch"], y)
    torch.testing.assert_close(seen[mlp.name, "branch"], branch)


@pytest.mark.parametrize("name", SMALL)
def test_mid_equals_end_exactly(name: str) -> None:
    """The second layer is affine and the weights of the average sum to 1, so that even its bias passes unchanged."""
    logits = []
    for position in ("mlp_mid", "mlp_end"):
        network = treat(build(name), {"context_broadcasting": {"position": position, "layers": "all"}})
        with torch.no_grad():
            output = network(images(network))
        logits.append(output if isinstance(output, Tensor) else output.logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 8), st.integers(1, 8), st.booleans(), st.integers(0, 10**6))
def test_broadcasting_commutes_with_an_affine_layer(n: int, width: int, out: int, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    layer = nn.Linear(width, out, bias=bias).double()
    x = 10 * torch.randn(2, n, width, dtype=torch.float64)
    cb = ContextBroadcasting()
    torch.testing.assert_close(layer(cb(x)), cb(layer(x)), rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 8), st.integers(0, 10**6))
def test_broadcasting_keeps_the_mean_and_halves_the_rest(n: int, width: int, seed: int) -> None:
    x = torch.randn(2, n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    y, mean = ContextBroadcasting()(x), x.mean(1, keepdim=True)
    torch.testing.assert_close(y.mean(1, keepdim=True), mean)
    torch.testing.assert_close(y - mean, (x - mean) / 2)


def test_gradients_are_those_of_finite_differences() -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    scaled = ScaledContextBroadcasting(4, 0.3).double()
    assert torch.autograd.gradcheck(ContextBroadcasting(), x)
    assert torch.autograd.gradgradcheck(ContextBroadcasting(), x)
    assert torch.autograd.gradcheck(
        lambda x, scale: torch.func.functional_call(scaled, {"scale": scale}, (x,)), (x, scaled.scale)
    )


@pytest.mark.parametrize(
    ("options", "treated"),
    [
        ({}, [2, 3, 4]),
        ({"scaled": True}, [0, 1, 2, 3, 4]),
        ({"scaled": True, "layers": "upper"}, [2, 3, 4]),
        ({"layers": "all"}, [0, 1, 2, 3, 4]),
        ({"layers": [3, 0]}, [0, 3]),
    ],
)
def test_which_blocks_are_treated(options: dict[str, Any], treated: list[int]) -> None:
    network = treat(tiny_vit(depth=5), {"context_broadcasting": options})
    parts = [i for i, block in enumerate(network.blocks) if hasattr(block.mlp, "context_broadcasting")]
    assert parts == treated


def test_the_upper_half_counts_over_stages() -> None:
    network = treat(build("timm pit"), "context_broadcasting")
    paths = [name for name, module in network.named_modules() if isinstance(module, ContextBroadcasting)]
    assert [path.split(".mlp")[0] for path in paths] == ["transformers.1.blocks.0", "transformers.2.blocks.0"]


def test_blocks_below_are_untouched() -> None:
    network = shaken(tiny_vit(depth=4))
    x = torch.randn(2, 3, 32, 48)
    before = states(network, x)
    after = states(treat(network, {"context_broadcasting": {"layers": [2]}}), x)
    same = {key: torch.equal(before[key], after[key]) for key in before}
    assert all(same[f"blocks.{i}.{kind}", "branch"] for i in (0, 1) for kind in ("msa", "mlp"))
    assert same["blocks.2.msa", "branch"]
    assert not same["blocks.2.mlp", "branch"]


def test_parameters_of_deit_small() -> None:
    """CB has none; CB_S one per channel and layer, 0.02% of ViT-S [Sec. 3.2]."""
    network = timm.create_model("deit_small_patch16_224")
    before = {name: p.shape for name, p in network.named_parameters()}
    number = sum(p.numel() for p in network.parameters())
    treat(network, {"context_broadcasting": {"scaled": True}})
    after = {name: p.shape for name, p in network.named_parameters()}
    added = sum(p.numel() for p in network.parameters()) - number
    assert added == 12 * 384
    assert round(100 * added / number, 2) == 0.02
    assert before.items() <= after.items()
    assert set(after) - set(before) == {f"blocks.{i}.mlp.context_broadcasting.scale" for i in range(12)}


def test_plain_cb_changes_no_name_and_loads_weights_trained_without_it() -> None:
    network = tiny_vit()
    weights = network.state_dict()
    treated = treat(tiny_vit(), "context_broadcasting")
    treated.load_state_dict(weights)
    again = treat(network, "context_broadcasting")
    x = torch.randn(2, 3, 32, 48)
    assert torch.equal(treated.eval()(x), again.eval()(x))


def test_scales_start_at_the_untreated_network_and_learn_from_the_first_step() -> None:
    network = shaken(tiny_vit()).eval()
    x = torch.randn(2, 3, 32, 48)
    expected = network(x)
    treat(network, {"context_broadcasting": {"scaled": True}})
    assert torch.equal(network(x), expected)
    network(x).square().sum().backward()
    scales = [module.scale for module in network.modules() if isinstance(module, ScaledContextBroadcasting)]
    assert len(scales) == 2
    assert all((scale.grad != 0).all() for scale in scales)


def test_the_initial_scale_is_a_setting() -> None:
    network = treat(tiny_vit(), {"context_broadcasting": {"scaled": True, "initial_scale": 0.25}})
    assert torch.equal(network.blocks[0].mlp.context_broadcasting.scale, torch.full((24,), 0.25))


def test_a_copy_has_a_scale_of_its_own() -> None:
    network = treat(shaken(tiny_vit()), {"context_broadcasting": {"scaled": True}}).eval()
    x = torch.randn(2, 3, 32, 48)
    expected = network(x)
    twin = copy.deepcopy(network)
    with torch.no_grad():
        twin.blocks[0].mlp.context_broadcasting.scale.fill_(3.0)
    assert torch.equal(network(x), expected)
    assert not torch.allclose(twin(x), expected)


@pytest.mark.parametrize("scaled", [False, True])
def test_tokens_keep_their_type_under_autocast(scaled: bool) -> None:
    part = ScaledContextBroadcasting(8, 0.5) if scaled else ContextBroadcasting()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert part(torch.randn(2, 3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_training_network_stays_one_and_its_batch_norms_see_nothing() -> None:
    network = tiny_vit(norm_layer=nn.LayerNorm).train()
    network.patch_embed.proj = nn.Sequential(network.patch_embed.proj, nn.BatchNorm2d(24))
    treat(network, {"context_broadcasting": {"scaled": True}})
    assert all(module.training for module in network.modules())
    assert network.patch_embed.proj[1].num_batches_tracked == 0


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("mixer", {"position": "msa_end"}, r"blocks.1 has no attention; use an mlp position\.$"),
        ("swin, not square, padded", {"position": "both"}, r"sees one window at a time.*use an mlp position\.$"),
        ("mixer", {"layers": [7]}, r"'layers' lists block 7, but this network has blocks 0 to 1\."),
        ("gmlp", {}, r"MlpMixer: it needs an MLP over channels that sees all tokens; this network has none\.$"),
    ],
)
def test_what_does_not_fit_is_a_sentence_and_changes_nothing(name: str, options: dict[str, Any], sentence: str) -> None:
    network = build(name)
    before = str(network)
    with pytest.raises(TreatmentError, match=sentence):
        treat(network, {"context_broadcasting": options})
    assert str(network) == before


def test_an_mlp_that_ends_outside_its_module_is_treated_at_the_end_of_its_branch() -> None:
    network = shaken(tiny_vit()).double().eval()
    expected = treat(copy.deepcopy(network), "context_broadcasting")
    for block in network.blocks:  # as transformers 4: the second layer is not part of the MLP's module
        block.ls2, block.mlp = block.mlp.fc2, nn.Sequential(block.mlp.fc1, block.mlp.act)
    treated = treat(network, "context_broadcasting")
    x = torch.rand(2, 3, 32, 48, dtype=torch.float64)
    torch.testing.assert_close(treated(x), expected(x))
    assert torch.equal(copy.deepcopy(treated)(x), treated(x))
    with pytest.raises(TreatmentError, match=r"blocks.1.mlp has no two linear layers; use mlp_end\.$"):
        treat(network, {"squeeze_excitation": {"position": "mlp_mid"}})


def test_no_blocks_at_all_is_a_mistake() -> None:
    with pytest.raises(RecipeError, match="layers"):
        treat(tiny_vit(), {"context_broadcasting": {"layers": []}})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"layers": "uppr"}, r"^'treatments\.context_broadcasting\.layers': must be upper, all .* \(got 'uppr'\)\.$"),
        ({"layers": [1, "2"]}, r"^'treatments\.context_broadcasting\.layers': must be upper, all or .*\.$"),
        ({"layers": [1, 0, 1]}, r"layers': must be .* distinct block numbers \(got \[1, 0, 1\]\)\.$"),
        ({"initial_scale": 0.5}, r"initial_scale is only for CB_S; add scaled: true"),
        ({"scaled": True, "initial_scale": float("nan")}, r"initial_scale': input should be a finite number"),
    ],
)  # fmt: skip
def test_an_option_that_means_nothing_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        treat(tiny_vit(), {"context_broadcasting": options})
