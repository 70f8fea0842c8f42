"""The list of functions: documented, with plain arguments, and the same code as that of probes and treatments."""

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import vitclinic
from vitclinic import functional as F
from vitclinic import probes, treatments

FUNCTIONS = [name for name in F.__all__ if not inspect.isclass(getattr(F, name))]
PAGE = Path(__file__).parents[2] / "docs" / "functional.md"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_says_what_it_returns_with_an_example(name: str) -> None:
    function = getattr(F, name)
    text = inspect.getdoc(function) or ""
    assert text.split()[0] not in ("The", "A", "An", "What", "Of", "Whether", "Where", "How"), "begin with a verb"
    assert ">>> " in text
    taken = " ".join(str(parameter.annotation) for parameter in inspect.signature(function).parameters.values())
    assert not any(noun in taken for noun in ("Subject", "Unit", "Batch", "Anatomy", "Dataset"))


@pytest.mark.parametrize("name", F.__all__)
def test_each_name_is_in_the_table_of_the_docs(name: str) -> None:
    assert f"`{name}" in PAGE.read_text(encoding="utf-8")


ROWS = re.findall(r"^\| `(\w+)(\(.*?\))`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def described(arguments: ast.arguments) -> list[tuple[str, str, str | None]]:
    """Return kind, name and default of each parameter, as they are written."""
    places = [*arguments.posonlyargs, *arguments.args]
    values = [*[None] * (len(places) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
    kinds = [*["place"] * len(places), *["keyword"] * len(arguments.kwonlyargs)]
    names = [one.arg for one in (*places, *arguments.kwonlyargs)]
    texts = [None if value is None else ast.unparse(value) for value in values]
    return list(zip(kinds, names, texts, strict=True))


@pytest.mark.parametrize(("name", "signature"), ROWS, ids=[name for name, _ in ROWS])
def test_the_table_has_the_signature_of_each_function(name: str, signature: str) -> None:
    """Its last parameters may be left out where they have defaults."""
    (real,) = ast.parse(textwrap.dedent(inspect.getsource(getattr(F, name)))).body
    (written,) = ast.parse(f"def {name}{signature}: ...").body
    assert isinstance(real, ast.FunctionDef)
    assert isinstance(written, ast.FunctionDef)
    taken, shown = described(real.args), described(written.args)
    assert [one for one in taken if one in shown] == shown
    assert all(default is not None for one in taken if one not in shown for default in one[2:])


def test_the_table_has_each_function_once() -> None:
    assert sorted(name for name, _ in ROWS) == sorted(FUNCTIONS)


def test_it_is_a_public_package_that_is_imported_when_used() -> None:
    assert "functional" in dir(vitclinic)
    code = "import sys, vitclinic; sys.exit('torch' in sys.modules or 'vitclinic.functional' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (F.hsic, [(5, 3), (5, 2)]),
        (F.cka, [(5, 3), (5, 2)]),
        (lambda x, y: F.minibatch_cka([[x, y]]), [(5, 3), (5, 2)]),
        (lambda x: F.block_structure(x, [0, 0, 1]), [(3, 3)]),
        (F.patch_similarity, [(2, 5, 3)]),
        (F.relative_log_amplitude, [(2, 3, 4, 4)]),
        (F.feature_variance, [(2, 3, 4, 4)]),
        (F.active_neurons, [(2, 5)]),
        (F.activation_norm, [(2, 5)]),
        (lambda x: F.weight_norm([x]), [(2, 5)]),
        (F.attention_entropy, [(1, 2, 4, 4)]),
        (F.upper_attention_entropy, [(1, 2, 4, 4)]),
        (lambda a: F.attention_distance(a, (2, 2)), [(1, 2, 4, 4)]),
        (lambda a: F.attention_map(a, (2, 2), 0), [(1, 2, 4, 4)]),
        (F.cb_scale_ratio, [(5,)]),
        (F.nep, [(5,)]),
        (F.ape, [(5,)]),
        (lambda x: F.condition_number(x @ x.mT), [(3, 4)]),
        (F.polar_coordinates, [(4, 3)]),
        (lambda x: F.accuracy(x, torch.tensor([0, 1])), [(2, 3)]),
        (lambda x: F.expected_calibration_error(x, torch.tensor([0, 1])), [(2, 3)]),
        (lambda x: F.accuracy_on_valid(x, torch.ones(2, 3, dtype=torch.bool)), [(2, 3)]),
    ],
)
def test_a_measurement_takes_tensors_inside_a_graph(function, shapes: list[tuple[int, ...]]) -> None:
    generator = torch.Generator().manual_seed(0)
    function(*(torch.rand(shape, generator=generator).requires_grad_() for shape in shapes))


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    torch.manual_seed(0)
    return timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=5
    ).eval()


@pytest.fixture(scope="module")
def seen(vit: nn.Module) -> dict[str, torch.Tensor]:
    """What a user's own hooks see: the states after both blocks, and the last block's attention."""
    images = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = {"images": images, "labels": torch.arange(8) % 5}
    blocks = vit.blocks
    handles = [
        blocks[i].register_forward_hook(lambda _, __, output, i=i: found.__setitem__(f"block{i}", output))
        for i in (0, 1)
    ]
    handles.append(blocks[1].mlp.act.register_forward_hook(lambda _, __, output: found.__setitem__("act", output)))
    attention = blocks[1].attn

    def note(_: nn.Module, args: tuple[torch.Tensor, ...], __: torch.Tensor) -> None:
        q, k, _ = attention.qkv(args[0]).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
        found["attention"] = F.talking_heads_attention(q, k)

    handles.append(attention.register_forward_hook(note))
    with torch.no_grad():
        found["logits"] = vit(images)
    for handle in handles:
        handle.remove()
    return found


def last(measurement, value: str, kind: str = "mlp") -> float:
    return [unit.values[value].value for unit in measurement.units if unit.kind == kind][-1]


def test_features_by_hand_are_the_probes_numbers(vit: nn.Module, seen: dict[str, torch.Tensor]) -> None:
    loader = [(seen["images"], seen["labels"])]
    tokens = seen["block1"][:, 1:]
    maps = tokens.transpose(1, 2).unflatten(2, (4, 4))
    similarity = probes.TokenSimilarity()(vit, loader)
    assert last(similarity, "cosine") == pytest.approx(F.patch_similarity(tokens).mean().item(), rel=1e-5)
    absolute = F.patch_similarity(tokens, absolute=True).mean().item()
    assert last(similarity, "absolute_cosine") == pytest.approx(absolute, rel=1e-5)
    amplitude = F.relative_log_amplitude(maps)[:, -1].mean().item()
    assert last(probes.Fourier()(vit, loader), "delta_log_amplitude") == pytest.approx(amplitude, rel=1e-5)
    assert last(probes.Variance()(vit, loader), "variance") == pytest.approx(F.feature_variance(maps).mean().item())
    assert last(probes.Sparsity()(vit, loader), "active") == pytest.approx(F.active_neurons(seen["act"]).mean().item())
    norm = F.activation_norm(seen["block1"]).mean().item()
    assert last(probes.Norms()(vit, loader), "activation_norm") == pytest.approx(norm)
    cka = probes.CKA()(vit, loader)
    rows = [unit.name for unit in cka.units if unit.kind == "mlp"]
    names = [unit.name for unit in cka.units]
    found = cka.arrays["cka"][names.index(rows[0]), names.index(rows[1])]
    assert found == pytest.approx(F.cka(seen["block0"][:, 1:], tokens).item(), rel=1e-5)


def test_attention_and_answers_by_hand_are_the_probes_numbers(vit: nn.Module, seen: dict[str, torch.Tensor]) -> None:
    loader = [(seen["images"], seen["labels"])]
    attention = seen["attention"]
    entropy = probes.AttentionEntropy()(vit, loader)
    assert last(entropy, "entropy", "msa") == pytest.approx(F.attention_entropy(attention).mean().item(), rel=1e-5)
    assert last(entropy, "upper", "msa") == pytest.approx(F.upper_attention_entropy(attention).mean().item(), rel=1e-5)
    distance = F.attention_distance(attention, (4, 4), prefix=1).mean().item()
    found = probes.AttentionDistance()(vit, loader)
    assert last(found, "relative_distance", "msa") == pytest.approx(distance, rel=1e-5)
    accuracy = probes.Accuracy()(vit, loader)
    assert accuracy.scalars["accuracy"].value == F.accuracy(seen["logits"], seen["labels"])
    error = F.expected_calibration_error(seen["logits"], seen["labels"])
    assert accuracy.scalars["ece"].value == pytest.approx(error, rel=1e-5)


def test_curvature_by_hand_is_the_probe_s(vit: nn.Module, seen: dict[str, torch.Tensor]) -> None:
    probe = probes.Sharpness(components=False, trace_draws=0, density_draws=0, tolerance=1e-4)
    measured = probe(vit, [(seen["images"], seen["labels"])])
    loss = (vit, nn.functional.cross_entropy, [(seen["images"], seen["labels"])])
    found = F.hessian_eigenvalues(loss, vit.parameters(), k=1, tolerance=1e-4)
    assert found.item() == pytest.approx(measured.scalars["lambda_max"].value, rel=1e-3)


def test_layers_compute_by_the_functions() -> None:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(treatments.ContextBroadcasting()(x), F.context_broadcasting(x))
    scaled = treatments.ScaledContextBroadcasting(8, 0.3)
    assert torch.equal(scaled(x), F.context_broadcasting(x, scaled.scale))
    gate = treatments.SqueezeExcitation(8, 2)
    assert torch.equal(gate(x), F.squeeze_excitation(x, gate.squeeze.weight, gate.excite.weight))
    maps = x[..., None]
    assert torch.equal(treatments.Blur()(maps), F.spatial_smoothing(maps))


@pytest.mark.parametrize("adaptive", [False, True])
def test_sam_climbs_by_the_perturbation(adaptive: bool) -> None:
    w = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))
    gradient = torch.tensor([0.3, 0.1, -0.7])
    (eps,) = F.sam_perturbation([w], 0.2, adaptive, gradients=[gradient])
    with treatments.Ascent(0.2, adaptive).climb([w], [gradient.clone()]):
        torch.testing.assert_close(w.detach(), torch.tensor([0.5, -1.0, 2.0]) + eps)
