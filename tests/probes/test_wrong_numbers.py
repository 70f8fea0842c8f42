"""Networks of which a number would be wrong: each is told, and no probe gives it with the status ok."""

from __future__ import annotations

import math
import warnings

import pytest
import timm
import torch
from torch import nn

from tests.probes.subjects import CLASSES, SIZE, Unknown, vit
from vitclinic._core.errors import ModelError
from vitclinic.probes import (
    Accuracy,
    AttentionMaps,
    Cost,
    DoesNotApply,
    Norms,
    ProbeCollection,
    load_subject,
    measure,
    parse_probes,
)

QUICK = {
    "sharpness": {"images": 8, "tolerance": 0.3, "trace_draws": 1, "density_draws": 0},
    "hessian_spectrum": {"batches": 1, "batch": 4, "top": 1, "tolerance": 0.3},
    "flatness": {"draws": 2, "images": 8},
    "landscape": {"points": 3, "images": 8},
    "cost": {"repeats": 1, "batch": 2},
    "corruptions": {"images": 4, "names": ["fog"], "severities": [1]},
    "ntk": {"images": 8, "block": 4},
}


@pytest.fixture
def loader() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    return [(torch.rand(8, 3, SIZE, SIZE), torch.arange(8) % CLASSES) for _ in range(2)]


def statuses(network, loader, *names, **options):
    probes = parse_probes([{name: QUICK.get(name, {})} for name in names])
    return {
        each.probe: (each.status, each.reason) for each in measure(load_subject(network, loader, **options), probes)
    }


LOSS = (
    "accuracy",
    "train_nll",
    "lesion",
    "fgsm",
    "pgd",
    "sharpness",
    "hessian_spectrum",
    "flatness",
    "landscape",
    "ntk",
    "saliency",
)


def test_probabilities_have_no_loss_and_no_curvature(loader):
    torch.manual_seed(0)
    network = vit()
    softmax = nn.Sequential(network, nn.Softmax(1))
    found = statuses(softmax, {"train": loader, "test": loader}, *LOSS, "occlusion", "missing_rate")
    for name in LOSS:
        assert found[name][0] == "does_not_apply", name
        assert found[name][1] == (
            "the network returns probabilities, and the loss is computed from logits. Leave out its softmax, or pass"
            " output=torch.log."
        )
    assert found["occlusion"][0] == found["missing_rate"][0] == "ok"  # who is largest is the same
    expected, logged = Accuracy()(network, loader), Accuracy()(softmax, loader, output=torch.log)
    for name, scalar in expected.scalars.items():
        assert logged.scalars[name].value == pytest.approx(scalar.value, rel=1e-5), name


def test_logits_that_sum_to_one_by_accident_in_one_image_are_logits(loader):
    first = next(iter(loader))[0][:1]

    class Accident(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = vit()

        def forward(self, x):
            logits = self.inner(x)
            return torch.where((x == first).flatten(1).all(1, keepdim=True), logits.softmax(1), logits)

    assert Accuracy()(Accident(), loader).status == "ok"


def test_the_loop_of_a_user_is_told_of_probabilities(loader):
    network = nn.Sequential(vit(), nn.Softmax(1)).eval()
    with torch.no_grad(), ProbeCollection(network, ["accuracy"]) as collection:
        network(loader[0][0])
        collection.update(loader[0][1])
    assert collection.compute()["accuracy"].status == "does_not_apply"


class Flipped(nn.Module):
    """Averages its network over an image and its mirror image, in two calls or in one."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module, self.twice = vit(), twice

    def forward(self, x):
        if self.twice:
            return (self.module(x) + self.module(x.flip(3))) / 2
        return self.module(torch.cat([x, x.flip(3)])).unflatten(0, (2, -1)).mean(0)


READING = (
    "norms",
    "fourier",
    "variance",
    "cka",
    "token_similarity",
    "sparsity",
    "attention_entropy",
    "attention_distance",
)


@pytest.mark.parametrize("twice", [True, False])
def test_a_network_that_runs_itself_twice_is_told_and_its_accuracy_is_right(twice, loader):
    found = statuses(Flipped(twice=twice), loader, *READING, "attention_maps", "accuracy")
    for name in (*READING, "attention_maps"):
        status, reason = found[name]
        assert status == "failed", name
        assert "which sees each image once" in reason
    told = "several times for the same images" if twice else "32 images through its PatchEmbed for a batch of 16"
    assert told in found["norms"][1]
    assert Accuracy()(Flipped(twice=twice), loader).scalars["accuracy"].n == 16


def test_maps_of_a_network_that_sees_images_twice(loader):
    with pytest.raises(ModelError, match="has 16 attention maps for 8 images"):
        AttentionMaps(images=8)(Flipped(twice=True), loader)


def quantize(network: nn.Module) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # torch retires this, and people have such networks
        return torch.ao.quantization.quantize_dynamic(network, {nn.Linear}, dtype=torch.qint8)


@pytest.fixture
def quantized() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    network = vit().eval()
    return network, quantize(network)


def test_a_quantized_network_has_no_gradients_and_all_its_parameters(quantized, loader):
    network, int8 = quantized
    gradients = ("sharpness", "hessian_spectrum", "flatness", "landscape", "ntk")
    found = statuses(int8, loader, *gradients, "fgsm", "accuracy", "cka")
    packed = sum(p.numel() for m in network.modules() if isinstance(m, nn.Linear) for p in m.parameters())
    for name in gradients:
        assert found[name] == (
            "does_not_apply",
            f"{packed:,} of the network's weights are quantized and have no gradient.",
        )
    assert found["fgsm"][0] == "does_not_apply"
    assert found["accuracy"][0] == found["cka"][0] == "ok"
    cost = Cost(repeats=1, batch=2)
    expected, counted = cost(network, loader).scalars, cost(int8, loader).scalars
    assert counted["parameters"] == expected["parameters"]
    assert counted["flops"] == expected["flops"]
    assert counted["peak_memory_bytes"].value < expected["peak_memory_bytes"].value
    norms = [Norms()(each, loader).scalars["weight_norm"].value for each in (network, int8)]
    assert norms[1] == pytest.approx(norms[0], rel=0.01)
    assert norms[1] != norms[0]


def test_the_digest_of_a_quantized_network_covers_its_packed_weights(quantized, loader):
    network, int8 = quantized
    with torch.no_grad():
        network.blocks[0].mlp.fc1.weight[0, 0] += 1
    assert load_subject(int8, loader).digest != load_subject(quantize(network), loader).digest


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("cait_xxs24_224", {"img_size": 32, "depth": 2, "embed_dim": 48}),
        ("pit_ti_224", {"img_size": 64}),
        ("vit_base_patch16_siglip_224", {"img_size": 32, "depth": 1, "embed_dim": 48, "num_heads": 3}),
    ],
)
def test_flops_where_a_token_is_an_expanded_parameter(name, keywords):
    network = timm.create_model(name, num_classes=CLASSES, **keywords)
    side = keywords["img_size"]
    cost = Cost(repeats=1, batch=2)(network, [(torch.rand(2, 3, side, side), torch.arange(2))])
    weights = sum(m.weight.numel() for m in network.modules() if isinstance(m, nn.Linear | nn.Conv2d))
    assert cost.scalars["flops"].value > weights  # each weight is used at least once, in a product and a sum
    assert all(p.requires_grad for p in network.parameters())


def test_a_network_without_a_second_derivative_says_which(loader):
    network = timm.create_model("mobilenetv3_small_050", num_classes=CLASSES)
    found = statuses(network, loader, "sharpness", "hessian_spectrum", "flatness")
    for name in ("sharpness", "hessian_spectrum"):
        assert found[name] == (
            "does_not_apply",
            "torch has no second derivative of hardsigmoid, which the network uses, and so no curvature.",
        )
    assert found["flatness"][0] in ("ok", "not_converged")  # values of the loss are enough


def test_weight_norms_need_no_anatomy(loader):
    network = Unknown()
    found = Norms()(network, loader)
    squares = sum(float(p.detach().double().square().sum()) for p in network.parameters())
    assert found.scalars["weight_norm"].value == pytest.approx(math.sqrt(squares), rel=1e-12)
    with torch.no_grad():
        network.head.weight[0, 0] = math.nan
    with pytest.raises(ModelError, match="not finite"):
        Norms()(network, loader)


def test_a_freshly_drawn_classifier_has_no_accuracy(loader):
    names = ("accuracy", "sharpness", "shift", "saliency")
    found = statuses(vit(), loader, *names, "norms", drawn=("head.weight", "head.bias"))
    for name in names:
        assert found[name][0] == "does_not_apply"
        assert "drawn at random" in found[name][1]
        assert "(head.weight, head.bias)" in found[name][1]
    assert found["norms"][0] == "ok"
    with pytest.raises(DoesNotApply):
        Accuracy()(vit(), loader, drawn=("head.weight",))


def test_one_output_has_no_saliency_and_features_none_either(loader):
    for outputs, reason in ((1, "a single output"), (0, "no class scores")):
        status, why = statuses(vit(num_classes=outputs), loader, "saliency")["saliency"]
        assert status == "does_not_apply"
        assert reason in why


def test_a_forward_without_gradients_is_a_sentence(loader):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = vit()

        @torch.no_grad()
        def forward(self, x):
            return self.inner(x)

    found = statuses(Frozen(), loader, "saliency", "sharpness")
    sentence = "the network's output has no gradient: its forward runs without (torch.no_grad, detach)."
    assert found == dict.fromkeys(("saliency", "sharpness"), ("failed", sentence))


class LinearProbe(nn.Module):
    """A classifier on the features of a backbone that runs without gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.classifier = vit(num_classes=0), nn.Linear(24, CLASSES)

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.classifier(features)


def test_weights_without_a_gradient_have_no_curvature(loader):
    data = {"train": loader, "test": loader}
    network = LinearProbe()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    found = statuses(network, data, "sharpness", "hessian_spectrum", "ntk", "saliency", "flatness")
    for name in ("sharpness", "hessian_spectrum", "ntk"):
        status, reason = found[name]
        assert status == "does_not_apply", name
        assert "without gradients" in reason
    assert found["saliency"][0] == "does_not_apply"
    assert found["flatness"][0] in ("ok", "not_converged")  # it moves the weights and needs no gradient
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_a_weight_that_nothing_uses_has_a_gradient_of_zero(loader):
    network = vit()
    network.unused = nn.Linear(3, 3)
    found = statuses(network, {"train": loader, "test": loader}, "sharpness", "ntk")
    assert {status for status, _ in found.values()} <= {"ok", "not_converged"}


class Changed(nn.Module):
    """A network with a function behind it."""

    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.change = vit(), change

    def forward(self, x):
        return self.change(self.inner(x))


@pytest.mark.parametrize(
    "change",
    [
        lambda z: z.half().softmax(1).float(),
        lambda z: z.softmax(1) + 1e-3,
        lambda z: z.softmax(1) * 100,
        lambda z: torch.cat((z, z[:, :1]), 1).softmax(1)[:, :-1],
        lambda z: (z.softmax(1) + (2 * z).softmax(1)) / 2,
    ],
    ids=["half", "raised", "percent", "a class dropped", "two averaged"],
)
def test_probabilities_are_told_by_the_softmax_that_made_them(change, loader):
    status, reason = statuses(Changed(change), loader, "accuracy")["accuracy"]
    assert status == "does_not_apply"
    assert "returns probabilities" in reason


def test_sigmoids_written_by_hand_are_told(loader):
    network = Changed(lambda z: 1 / (1 + (-z).exp()))
    status, reason = statuses(network, loader, "accuracy")["accuracy"]
    assert status == "does_not_apply"
    assert "of each class by itself" in reason


@pytest.mark.parametrize("change", [lambda z: z.log_softmax(1), lambda z: -z.log_softmax(1), lambda z: z.relu()])
def test_what_a_softmax_did_not_make_is_logits(change, loader):
    assert statuses(Changed(change), loader, "accuracy")["accuracy"][0] == "ok"


def test_logits_of_a_frozen_layer_behind_a_sigmoid_are_logits(loader):
    network = Changed(nn.Sequential(nn.Sigmoid(), nn.Linear(CLASSES, CLASSES)))
    network.requires_grad_(False)
    with torch.no_grad():
        network.change[1].weight.abs_()
        network.change[1].bias.abs_()
    assert statuses(network, loader, "accuracy")["accuracy"][0] == "ok"


class Int8(nn.Module):
    """A linear layer with its weight as integers."""

    def __init__(self, layer, register):
        super().__init__()
        scale = layer.weight.abs().max().detach() / 127
        register(self, "weight", (layer.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = layer.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def as_parameter(module, name, value):
    module.register_parameter(name, nn.Parameter(value, requires_grad=False))


@pytest.mark.parametrize("register", [as_parameter, nn.Module.register_buffer])
def test_integers_of_a_layers_own_have_no_norm_and_no_curvature_and_are_counted(register, loader):
    torch.manual_seed(0)
    network = vit().eval()
    expected = Cost(repeats=1, batch=2)(network, loader).scalars["parameters"]
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.Linear):
            network.set_submodule(name, Int8(module, register))
    found = statuses(network, loader, "sharpness", "ntk", "norms", "accuracy")
    for name in ("sharpness", "ntk"):
        assert found[name][0] == "does_not_apply"
        assert "quantized" in found[name][1]
    assert found["norms"][0] == "does_not_apply"
    assert "integers" in found["norms"][1]
    assert found["accuracy"][0] == "ok"
    assert Cost(repeats=1, batch=2)(network, loader).scalars["parameters"] == expected


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8])
def test_the_first_parameter_may_be_of_any_type(dtype, loader):
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
            self.inner = vit()

        def forward(self, x):
            return self.inner(x)

    assert statuses(First(), loader, "accuracy")["accuracy"][0] == "ok"


def test_a_network_that_answers_by_chance_is_called_by_its_name(loader):
    class Chance(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.first, self.second = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x):
            x = self.stem(x).flatten(2).mT
            x = x + self.first(x).relu()
            x = x + self.second(x).relu()
            return {"logits": nn.functional.dropout(self.head(x.mean(1)), 0.5, training=True)}

    status, reason = statuses(Chance(), loader, "lesion")["lesion"]
    assert status == "failed"
    assert reason.startswith("Chance answers differently")
