"""AlterNet: the pattern, the size in closed form, and windowed attention against one dense matrix."""

import math
import subprocess
import sys

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.test_preact_resnet import conv_parameters
from vitclinic import load_model, train
from vitclinic._core.errors import ModelError
from vitclinic.anatomy import Anatomy, record_attention
from vitclinic.models import create_model, msa_pattern
from vitclinic.models.msa_block import MsaBlock, PostActMsaBlock, WindowAttention

LAYERS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 4), 50: (3, 4, 6, 4), 101: (3, 4, 23, 4)}
SMALL = {
    "layers": (1, 2, 2, 4),
    "channels": (4, 4, 8, 8),
    "heads": (1, 1, 2, 2),
    "head_width": 4,
    "num_classes": 5,
}


def pattern(network):
    """C and M for the blocks of each stage."""
    return ["".join("M" if isinstance(block, MsaBlock) else "C" for block in network.stage(i)) for i in range(4)]


def msa_parameters(channels, width, heads, window, shared):
    inner = 64 * heads
    norms_and_conv = 2 * channels + channels * width + 2 * width
    tables = (1 if shared else heads) * (2 * window - 1) ** 2
    return norms_and_conv + (width + 1) * 3 * inner + (inner + 1) * channels + tables


def network_parameters(depth, layers, msas, stem, window, shared, classes):
    expansion = 4 if depth >= 50 else 1
    total, channels = 3 * 64 * (49 if stem == "imagenet" else 9), 64
    for stage, blocks in enumerate(layers):
        width = 64 * 2**stage
        for index in range(blocks):
            from_end = blocks - 1 - index
            if from_end % 2 == 0 and from_end // 2 < msas[stage]:
                total += msa_parameters(channels, width, (3, 6, 12, 24)[stage], window, shared)
            else:
                total += conv_parameters(depth, channels, width, index == 0)
            channels = width * expansion
    return total + 2 * channels + channels * classes + classes


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
@pytest.mark.parametrize("depth", LAYERS)
def test_the_number_of_parameters_in_closed_form(depth, stem, shared):
    with torch.device("meta"):
        network = timm.create_model(f"alternet{depth}", stem=stem, num_classes=100, shared_bias=shared)
    c3 = {"imagenet": 1 if depth == 18 else 3, "cifar": 1}[stem]
    msas, window = (0, 1, c3, 1 if depth == 18 else 2), {"imagenet": 7, "cifar": 4}[stem]
    expected = network_parameters(depth, LAYERS[depth], msas, stem, window, shared, 100)
    assert sum(p.numel() for p in network.parameters()) == expected


@pytest.mark.parametrize(
    ("name", "keywords", "stages"),
    [
        ("alternet50", {}, ["CCC", "CCCM", "CMCMCM", "CMCM"]),
        ("alternet50", {"stem": "cifar"}, ["CCC", "CCCM", "CCCCCM", "CMCM"]),
        ("alternet50", {"msas": [1, 2, 3, 2]}, ["CCM", "CMCM", "CMCMCM", "CMCM"]),
        ("alternet50", {"msas": [0, 0, 0, 0]}, ["CCC", "CCCC", "CCCCCC", "CCCC"]),
        ("alternet34", {}, ["CCC", "CCCM", "CMCMCM", "CMCM"]),
        ("alternet18", {}, ["CC", "CM", "CM", "CM"]),
        ("alternet101", {}, ["CCC", "CCCM", "C" * 17 + "CMCMCM", "CMCM"]),
    ],
)
def test_the_pattern_of_each_stage(name, keywords, stages):
    with torch.device("meta"):
        network = timm.create_model(name, **keywords)
    assert pattern(network) == stages
    for stage, heads in enumerate((3, 6, 12, 24)):
        attentions = [block.attn for block in network.stage(stage) if isinstance(block, MsaBlock)]
        assert all((a.heads, a.qkv.out_features) == (heads, 3 * heads * 64) for a in attentions)


@given(blocks=st.integers(1, 40), data=st.data())
def test_from_the_end_of_a_stage_blocks_alternate(blocks, data):
    msas = data.draw(st.integers(0, blocks // 2))
    from_end = msa_pattern(blocks, msas)[::-1]
    assert len(from_end) == blocks
    assert from_end[: 2 * msas] == [True, False] * msas
    assert not any(from_end[2 * msas :])
    assert not from_end[-1], "the block that subsamples"


def dense(attention, x_hwc):
    """The same attention as one float64 matrix over all tokens of one image, by loops over queries and keys."""
    height, width, _ = x_hwc.shape
    side, heads = attention.window, attention.heads
    table = attention.relative_position_bias_table
    qkv = x_hwc @ attention.qkv.weight.T + attention.qkv.bias
    q, k, v = qkv.reshape(height * width, 3, heads, -1).unbind(1)
    out = torch.zeros_like(q)
    places = [(row, column) for row in range(height) for column in range(width)]
    for head in range(heads):
        scores = torch.full((len(places), len(places)), -math.inf, dtype=torch.float64)
        for i, (qr, qc) in enumerate(places):
            for j, (kr, kc) in enumerate(places):
                if (qr // side, qc // side) == (kr // side, kc // side):
                    bias = table[head % len(table), qr - kr + side - 1, qc - kc + side - 1]
                    scores[i, j] = q[i, head] @ k[j, head] / math.sqrt(q.shape[-1]) + bias
        out[:, head] = scores.softmax(-1) @ v[:, head]
    return (out.flatten(1) @ attention.proj.weight.T + attention.proj.bias).reshape(height, width, -1)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("grid", [(4, 6), (5, 4), (2, 3), (1, 1), (7, 2)])
@torch.no_grad()
def test_windowed_attention_is_a_dense_one_that_sees_its_window(grid, shared):
    torch.manual_seed(0)
    attention = WindowAttention(6, 5, heads=2, head_width=3, window=3, shared_bias=shared).double()
    attention.relative_position_bias_table.normal_()
    x = torch.randn(2, *grid, 6, dtype=torch.float64)
    expected = torch.stack([dense(attention, image) for image in x])
    assert torch.allclose(attention(x), expected, rtol=1e-10, atol=1e-12)


def test_a_shared_table_is_the_same_table_for_every_head():
    torch.manual_seed(0)
    per_head = WindowAttention(6, 6, heads=3, head_width=4, window=4)
    shared = WindowAttention(6, 6, heads=3, head_width=4, window=4, shared_bias=True)
    state = per_head.state_dict()
    table = torch.randn(1, 7, 7)
    per_head.load_state_dict(state | {"relative_position_bias_table": table.repeat(3, 1, 1)})
    shared.load_state_dict(state | {"relative_position_bias_table": table})
    x = torch.randn(2, 8, 9, 6)
    assert torch.equal(per_head(x), shared(x))


@settings(max_examples=20, deadline=None)
@given(window=st.integers(1, 5), height=st.integers(1, 9), width=st.integers(1, 9))
@torch.no_grad()
def test_a_window_sees_itself_only(window, height, width):
    """Changing one place of the grid changes exactly the outputs of its window."""
    torch.manual_seed(0)
    attention = WindowAttention(4, 4, heads=1, head_width=4, window=window).double()
    x = torch.randn(1, height, width, 4, dtype=torch.float64)
    changed = x.clone()
    changed[0, height - 1, 0] += 1
    moved = (attention(x) != attention(changed)).any(-1)[0]
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    assert torch.equal(moved, (rows // window == (height - 1) // window) & (columns // window == 0))


@pytest.mark.parametrize("act", ["relu", "gelu"])
@pytest.mark.parametrize("kind", [MsaBlock, PostActMsaBlock])
def test_a_block_written_out(kind, act):
    torch.manual_seed(0)
    block = kind(8, 4, 2, head_width=4, window=3, msa_act=act).double()
    x = torch.randn(3, 8, 5, 4, dtype=torch.float64)
    block.train()(x)
    block.eval()
    activate = {"relu": torch.relu, "gelu": torch.nn.functional.gelu}[act]

    def attend(y):
        return block.attn(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    if kind is MsaBlock:
        expected = x + attend(block.norm2(block.conv(activate(block.norm1(x)))))
    else:
        expected = activate(x + block.norm2(attend(block.norm1(block.conv(x)))))
    assert torch.allclose(block(x), expected, rtol=1e-12)


@pytest.mark.parametrize("keywords", [{}, {"shared_bias": True, "msa_act": "gelu"}])
@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
@pytest.mark.parametrize("name", ["alternet18", "alternet50"])
def test_every_parameter_gets_a_gradient_and_the_state_comes_back(name, stem, keywords):
    torch.manual_seed(0)
    network = timm.create_model(name, stem=stem, drop_path_rate=0.1, **SMALL, **keywords)
    x = torch.randn(4, 3, 40, 56)
    network.eval()(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    again = timm.create_model(name, stem=stem, **SMALL, **keywords)
    again.load_state_dict(network.state_dict())
    assert torch.equal(again.eval()(x), network(x))


def test_one_set_of_weights_fits_images_of_every_size():
    network = timm.create_model("alternet50", **SMALL).eval()
    assert all(network(torch.randn(1, 3, *size)).shape == (1, 5) for size in [(32, 32), (40, 104), (224, 224)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype):
    torch.manual_seed(0)
    network = timm.create_model("alternet50", stem="cifar", **SMALL).eval()
    x = torch.randn(2, 3, 20, 20)
    plain = network(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(network(x).float(), plain, atol=0.1 * plain.abs().max().item())
    converted = network.to(dtype)(x.to(dtype))
    assert converted.dtype == dtype
    assert torch.allclose(converted.float(), plain, atol=0.1 * plain.abs().max().item())


def test_its_attention_can_be_recorded():
    network = timm.create_model("alternet50", stem="cifar", **SMALL).eval()
    x = torch.randn(2, 3, 20, 20)
    anatomy = Anatomy.of(network, x)
    seen = {}
    with record_attention(anatomy.of_kind("msa"), lambda one: seen.__setitem__(one.unit.name, one)):
        network(x)
    assert list(seen) == ["layer2.1.msa", "layer3.1.msa", "layer4.1.msa", "layer4.3.msa"]
    shapes = {name: tuple(one.weights.shape) for name, one in seen.items()}
    # Grids of 10, 5 and 3; windows of 4, so 9, 4 and (one that is as small as the grid) 1.
    assert shapes["layer2.1.msa"] == (2 * 9, 1, 16, 16)
    assert shapes["layer3.1.msa"] == (2 * 4, 2, 16, 16)
    assert shapes["layer4.3.msa"] == (2 * 1, 2, 9, 9)
    padding = seen["layer3.1.msa"].positions()[..., 0].repeat(2, 1) < 0
    assert padding.any()
    assert seen["layer3.1.msa"].weights.transpose(1, 3)[padding].abs().max() == 0


def test_two_steps_of_training(tmp_path):
    model = {"name": "alternet50", "stem": "cifar", "msas": [0, 1, 1, 2]} | SMALL
    del model["num_classes"]
    recipe = {
        "model": {key: list(value) if isinstance(value, tuple) else value for key, value in model.items()},
        "data": {"source": "digits", "limit": 60, "augment": "none"},
        "batch_size": 20,
        "steps": 2,
        "out": str(tmp_path / "run"),
    }
    run = train(recipe)
    assert [row["step"] for row in run.metrics if row["kind"] == "train"][-1] == 2
    network = load_model(run.path)
    assert pattern(network.backbone) == ["C", "CM", "CM", "CMCM"]
    assert network(torch.rand(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"msas": [0, 1, 4, 2]}, r"a stage of 6 blocks has room for 0 to 3 MSAs, not for 4\."),
        ({"msas": [0, 1]}, r"msas and heads must have one number per stage"),
        ({"heads": [3, 6]}, r"msas and heads must have one number per stage"),
        ({"msa_act": "silu"}, r"msa_act is 'silu'; write one of relu, gelu\."),
        ({"stem": "tiny"}, r"stem is 'tiny'"),
    ],
)
def test_what_cannot_be_built_is_a_sentence(keywords, sentence):
    with pytest.raises(ModelError, match=sentence):
        create_model("alternet50", **keywords)


def test_timm_s_registry_has_them_once_our_models_are_imported():
    script = (
        "import sys, vitclinic\n"
        "assert 'timm' not in sys.modules, 'import vitclinic must stay fast'\n"
        "import timm, vitclinic.models\n"
        "network = timm.create_model('alternet18', stem='cifar', num_classes=10)\n"
        "assert timm.is_model('preact_resnet50')\n"
        "print(type(network).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "AlterNet"
