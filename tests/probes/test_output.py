"""What networks return and how they are called: every form gives the numbers of the plain tensor."""

from __future__ import annotations

import logging
import re
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import timm
import torch
from torch import nn

import vitclinic
from tests.probes.subjects import CLASSES, SIZE, noise, vit
from vitclinic._core.errors import ModelError
from vitclinic.models import Normalized
from vitclinic.models.factory import image_keyword
from vitclinic.probes import (
    FGSM,
    NTK,
    Accuracy,
    Cost,
    DoesNotApply,
    Norms,
    ProbeCollection,
    Sharpness,
    Subject,
    load_subject,
    measure,
    parse_probes,
)
from vitclinic.probes.output import Adapted, are_probabilities, are_sigmoids, read_output

Named = namedtuple("Named", ["features", "logits"])


@dataclass
class Record:
    features: torch.Tensor
    logits: torch.Tensor


class Returning(nn.Module):
    """A ViT whose logits are wrapped by a function, and which can be called only as told."""

    def __init__(self, wrap: Any, network: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module, self.wrap = vit() if network is None else network, wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.module(x))


class KeywordOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module = vit()

    def forward(self, input_ids: Any = None, *, pixel_values: torch.Tensor) -> torch.Tensor:
        assert input_ids is None
        out: torch.Tensor = self.module(pixel_values)
        return out


FORMS = {
    "dict": lambda y: {"features": y[:, :2], "logits": y},
    "dict of one": lambda y: {"scores": y, "loss": None},
    "tuple": lambda y: (y, y[:, :2]),
    "list": lambda y: [y],
    "loss first": lambda y: (y.logsumexp(1).mean(), y),
    "named tuple": lambda y: Named(y[:, :2], y),
    "dataclass": lambda y: Record(y[:, :2], y),
}


@pytest.fixture
def loader() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    return [(torch.rand(8, 3, SIZE, SIZE), torch.arange(8) % CLASSES) for _ in range(2)]


@pytest.fixture
def plain() -> nn.Module:
    torch.manual_seed(0)
    return vit()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("probe", [Accuracy(), FGSM(images=16), NTK(images=16, block=4), Norms()], ids=lambda p: p.name)
def test_every_form_of_output_gives_the_numbers_of_a_tensor(form, probe, plain, loader):
    expected = probe(plain, loader)
    found = probe(Returning(FORMS[form]), loader)
    assert found.scalars == expected.scalars
    assert found.units == expected.units


def test_the_first_tensor_of_a_tuple_is_told(loader, caplog):
    with caplog.at_level(logging.WARNING):
        load_subject(Returning(FORMS["tuple"]), loader, name="mine").outputs  # noqa: B018
    assert f"mine returns 2 tensors (0: [1, {CLASSES}], 1: [1, 2]); the first is measured." in caplog.text
    caplog.clear()
    load_subject(Returning(FORMS["named tuple"]), loader).outputs  # noqa: B018
    assert not caplog.text


@pytest.mark.parametrize("wrap", [lambda y: "text", lambda y: None], ids=["text", "none"])
def test_an_output_that_cannot_be_told_asks_for_a_function(wrap, loader):
    with pytest.raises(ModelError, match="Pass output=, a function from what the network returns"):
        Accuracy()(Returning(wrap), loader)


@pytest.mark.parametrize(
    "wrap",
    [lambda y: {"a": y, "b": y}, lambda y: {"loss": y.sum(), "maps": y[:, :, None, None], "more": y}],
    ids=["two", "maps"],
)
def test_of_a_dict_without_logits_all_is_measured_that_needs_no_scores(wrap, plain, loader):
    names = ["accuracy", "lesion", "norms", "fourier", "cka", "attention_entropy", "cost"]
    found = measure(load_subject(Returning(wrap), loader), parse_probes(names))
    assert {each.probe: each.status for each in found} == {
        **dict.fromkeys(names[:2], "does_not_apply"),
        **dict.fromkeys(names[2:], "ok"),
    }
    assert re.match(
        r"the network has no class scores: it returns a dict with \d tensors \(.*\), none of them called 'logits'\."
        r" Pass output=, a function from what the network returns to its class scores \[B, K\], to choose\.$",
        found[0].reason,
    )
    expected = measure(load_subject(plain, loader), parse_probes(["cka"]))
    assert found[4].scalars == expected[0].scalars
    with pytest.raises(ModelError, match=r"^The network returns a dict with"):
        read_output(wrap(torch.rand(2, CLASSES)))


@pytest.mark.parametrize("shape", ["plain", "reshaped"])
def test_probabilities_of_each_class_are_no_logits(shape, plain, loader):
    class MultiLabel(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = plain

        def forward(self, x):
            scores = self.network(x).sigmoid()
            return scores if shape == "plain" else scores[:, :, None].squeeze(-1)

    subject = load_subject(MultiLabel(), loader)
    assert subject.returns_sigmoids
    found = {each.probe: each for each in measure(subject, parse_probes(["accuracy", "lesion", "norms", "cka"]))}
    assert [each.status for each in found.values()] == ["does_not_apply"] * 2 + ["ok"] * 2
    assert (
        "returns the probability of each class by itself (a sigmoid: they do not sum to 1)" in found["accuracy"].reason
    )
    expected = Accuracy()(plain, loader).scalars["nll"].value
    assert Accuracy()(MultiLabel(), loader, output=torch.logit).scalars["nll"].value == pytest.approx(
        expected, rel=1e-4
    )


def test_logits_that_lie_between_0_and_1_by_accident_are_logits():
    logits = torch.rand(4, 3, requires_grad=True) * 1.0
    assert not are_sigmoids(logits)
    assert not are_sigmoids(logits.sigmoid() * 0.9)  # scaled, it may be anything
    assert are_sigmoids(torch.rand(16, 20))


def test_a_function_chooses_the_output_everywhere(plain, loader, tmp_path):
    expected = Accuracy()(plain, loader)
    network = Returning(lambda y: {"a": y[:, :2], "b": 2 * y})
    halve = lambda out: out["b"] / 2  # noqa: E731
    alone = Accuracy()(network, loader, output=halve)
    exam = vitclinic.examine(network, loader, probes=["accuracy"], output=halve, out=tmp_path)
    with torch.no_grad(), ProbeCollection(network.eval(), ["accuracy"], output=halve) as collection:
        for images, labels in loader:
            network(images)
            collection.update(labels)
    for found in (alone, exam["accuracy"], collection.compute()["accuracy"]):
        for name, scalar in expected.scalars.items():  # other batches, so another order of summing
            assert found.scalars[name].value == pytest.approx(scalar.value, rel=1e-12), name
    assert (
        alone.subject != Accuracy()(network, loader, output=lambda out: out["b"]).subject
    )  # other scores, other digest
    with pytest.raises(ModelError, match="output= returns a dict; expected a tensor"):
        Accuracy()(network, loader, output=lambda out: out)


def test_a_network_that_returns_a_tensor_is_not_wrapped_and_keeps_its_digest(plain, loader):
    subject = load_subject(plain, loader)
    assert subject.network is plain
    wrapped = load_subject(Returning(FORMS["dict"]), loader)
    assert isinstance(wrapped.network, Adapted)
    assert wrapped.digest == load_subject(Returning(FORMS["dict"]), loader).digest


def test_images_by_keyword(plain, loader):
    assert image_keyword(KeywordOnly()) == "pixel_values"
    for options in ({}, {"mean": [0.5] * 3, "std": [0.25] * 3}):
        expected, found = (Accuracy()(network, loader, **options) for network in (plain, KeywordOnly()))
        assert found.scalars == expected.scalars
    assert Norms()(KeywordOnly(), loader).status == "ok"


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (lambda y: {"last_hidden_state": y[:, None].repeat(1, 3, 1), "pooler_output": y}, "pooler_output"),
        (lambda y: {"last_hidden_state": y[:, None].repeat(1, 3, 1)}, "last_hidden_state"),
        (lambda y: y[:, None].repeat(1, 3, 1), r"features of shape \[3, 5\]"),
        (lambda y: y[:, :, None, None].repeat(1, 1, 2, 2), r"features of shape \[5, 2, 2\]"),
    ],
    ids=["pooler", "hidden", "tokens", "map"],
)
def test_an_encoder_has_features_and_no_class_scores(form, told, plain, loader):
    subject = load_subject(Returning(form), loader)
    assert subject.outputs == CLASSES
    with torch.no_grad(), vitclinic.anatomy.eval_mode(plain):  # repeated, so the mean over positions is the same
        torch.testing.assert_close(Returning(form).eval().module(loader[0][0]), plain(loader[0][0]))
        torch.testing.assert_close(read_output(form(plain(loader[0][0]))), plain(loader[0][0]))
    with pytest.raises(DoesNotApply, match=f"no class scores: it returns {told}"):
        Accuracy()(Returning(form), loader)


def test_a_timm_encoder_has_all_probes_that_need_no_labels(loader):
    network = vit(num_classes=0)
    subject = load_subject(network, loader)
    assert len(subject.classes) == CLASSES  # 24 features are not 24 classes
    names = ["accuracy", "sharpness", "ntk", "norms", "cka", "fourier", "attention_entropy", "cost"]
    found = {each.probe: each.status for each in measure(subject, parse_probes(names))}
    assert found == dict.fromkeys(names[:3], "does_not_apply") | dict.fromkeys(names[3:], "ok")
    headed = nn.Sequential(network, nn.Linear(24, CLASSES))  # a head behind it: these are class scores
    assert Accuracy()(headed, loader).status == "ok"


def test_hugging_face_encoders_and_classifiers(loader):
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sizes = {"image_size": SIZE, "patch_size": 8}
    classifier = hf.ViTForImageClassification(hf.ViTConfig(**small, **sizes, num_labels=CLASSES))
    encoders = [
        hf.ViTModel(hf.ViTConfig(**small, **sizes)),
        hf.CLIPVisionModel(hf.CLIPVisionConfig(**small, **sizes)),
        hf.Dinov2Model(hf.Dinov2Config(**small, **sizes)),
    ]
    assert Accuracy()(classifier, loader).status == "ok"
    for encoder in encoders:
        with pytest.raises(DoesNotApply, match="no class scores: it returns pooler_output"):
            Accuracy()(encoder, loader)
        assert Cost(repeats=1, batch=2)(encoder, loader).status == "ok"
        assert Norms()(encoder, loader).status == "ok"


ALL = ["accuracy", "norms", "fourier", "variance", "cka", "token_similarity", "sparsity", "attention_entropy"]
ALL += ["attention_distance", "attention_maps", "lesion", "cost", "flatness", "landscape", "ntk", "occlusion", "fgsm"]
SMALL = {"landscape": {"points": 3}, "flatness": {"draws": 2}, "ntk": {"block": 4}, "cost": {"repeats": 1, "batch": 2}}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_measured_by_every_probe(dtype, plain):
    names = [{name: SMALL.get(name, {})} for name in ALL]
    half = Normalized(plain.to(dtype), [0.5] * 3, [0.25] * 3)
    found = measure(Subject(half, noise(8), batch_size=8), parse_probes(names))
    assert {each.probe: each.reason for each in found if each.status not in ("ok", "not_converged")} == {}
    exact = measure(Subject(Normalized(plain.float(), [0.5] * 3, [0.25] * 3), noise(8)), parse_probes(["norms", "cka"]))
    for each, other in zip([m for m in found if m.probe in ("norms", "cka")], exact, strict=True):
        for name, scalar in other.scalars.items():
            assert each.scalars[name].value == pytest.approx(scalar.value, rel=0.05), name


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda net: torch.compile(net, backend="eager")], ids=["data parallel", "compiled"]
)
def test_parallel_and_compiled_networks(wrap, plain, loader):
    for probe in (Accuracy(), Norms(), Sharpness(images=4, tolerance=0.3, trace_draws=1, density_draws=0)):
        expected, found = probe(plain, loader), probe(wrap(plain), loader)
        assert {name: each.value for name, each in found.scalars.items()} == pytest.approx(
            {name: each.value for name, each in expected.scalars.items()}, rel=1e-5
        )


def test_probabilities_are_told_from_logits_by_all_rows():
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert are_probabilities(logits.to(dtype).softmax(1))
    mixed = logits.softmax(1)
    mixed[3] *= 1.01
    assert not are_probabilities(mixed)  # one row by accident is no proof
    assert not are_probabilities(logits.log_softmax(1))
    assert not are_probabilities(torch.sigmoid(logits))


def test_a_timm_network_is_read_by_name():
    assert read_output(timm.create_model("test_vit", num_classes=3)(torch.rand(1, 3, 160, 160))).shape == (1, 3)
