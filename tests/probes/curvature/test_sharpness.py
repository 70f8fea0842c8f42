"""The probes `sharpness` and `hessian_spectrum` against dense float64 Hessians."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.probes import subjects
from tests.probes.curvature.networks import CLASSES, SIZE, dense_hessian, hurried, network
from vitclinic._core.records import Measurement
from vitclinic.data import Augment, Dataset
from vitclinic.probes import Subject, Training, measure, parse_probes
from vitclinic.probes.curvature import sharpness
from vitclinic.probes.curvature.clock import Clock
from vitclinic.probes.curvature.hessian import Hessian
from vitclinic.probes.curvature.hessian_spectrum import jackknife, negative_proportion, negative_share, positive_mean
from vitclinic.probes.curvature.lanczos import Eigenpairs
from vitclinic.probes.curvature.loss_surface import LossSurface
from vitclinic.probes.curvature.sharpness import components


def data(count: int = 13) -> Dataset:
    whole = subjects.noise(count, CLASSES)
    split = whole.train
    split.images.pixels = split.images.pixels[:, :SIZE, :SIZE]
    return replace(whole, size=(SIZE, SIZE))


def patient(name: str, **options: object) -> Subject:
    return Subject(network(name), data(), batch_size=5, **options)


def measured(subject: Subject, **entry: object) -> Measurement:
    (measurement,) = measure(subject, parse_probes([entry]))
    return measurement


@cache
def dense(name: str) -> Tensor:
    subject = patient(name).on("train", 13)
    return dense_hessian(subject.network.eval(), list(subject.batches()))


def largest(matrix: Tensor) -> float:
    values = torch.linalg.eigvalsh(matrix)
    return float(values[values.abs().argmax()])


@pytest.mark.parametrize("name", ["vit", "convnet"])
def test_lambda_max_and_trace_are_those_of_the_dense_matrix(name: str) -> None:
    found = measured(patient(name), sharpness={"tolerance": 1e-8, "trace_draws": 40})
    assert found.status == "ok", found.reason
    assert found.scalars["lambda_max"].value == pytest.approx(largest(dense(name)), rel=1e-6)
    trace = found.scalars["trace"]
    error = (trace.high - trace.low) / 4  # about the standard error
    assert abs(trace.value - float(dense(name).trace())) < 4 * error


def test_the_curvature_of_the_sigmoid_loss_is_that_of_the_dense_matrix() -> None:
    subject = patient("vit").on("train", 13)
    exact = largest(dense_hessian(subject.network.eval(), list(subject.batches()), sigmoid=True))
    found = measured(patient("vit"), sharpness={"tolerance": 1e-8, "components": False, "loss": "sigmoid"})
    assert found.scalars["lambda_max"].value == pytest.approx(exact, rel=1e-6)
    assert exact != pytest.approx(largest(dense("vit")), rel=0.01)


def test_the_columns_of_table_4_are_apart_for_a_mixer() -> None:
    """Token and channel MLPs are columns of their own, and so is the embedding, without positions."""
    mixer = subjects.subject("mixer")
    owned = {component: names for component, row, names in components(mixer) if row is None}
    assert owned.keys() == {"embedding", "token_mlp", "mlp"}
    assert all("mlp_tokens" in name or "norm1" in name for name in owned["token_mlp"])
    assert all("mlp_channels" in name or "norm2" in name for name in owned["mlp"])


def test_components_are_the_diagonal_blocks() -> None:
    subject = patient("vit")
    found = measured(subject, sharpness={"tolerance": 1e-8})
    names = [name for name, _ in subject.network.named_parameters()]
    sizes = [p.numel() for p in subject.network.parameters()]
    offsets = np.cumsum([0, *sizes])
    values = {name: scalar.value for name, scalar in found.scalars.items()}
    values |= {row.name: row.values["lambda_max"].value for row in found.units}
    seen = []
    for component, row, owned in components(subject):
        rows = torch.cat([torch.arange(offsets[names.index(n)], offsets[names.index(n) + 1]) for n in owned])
        exact = largest(dense("vit")[rows][:, rows])
        assert values[component if row else f"lambda_max_{component}"] == pytest.approx(exact, rel=1e-6)
        seen.append(component)
    assert seen == ["embedding", "position", "msa", "mlp", "blocks.0", "blocks.1"]


def test_the_components_of_a_vit_by_their_names() -> None:
    """The class token belongs to no unit, and so to no component."""
    both = ("weight", "bias")
    msa = [
        [f"blocks.{i}.{part}.{kind}" for part in ("attn.qkv", "attn.proj", "norm1") for kind in both] for i in range(2)
    ]
    mlp = [[f"blocks.{i}.{part}.{kind}" for part in ("mlp.fc1", "mlp.fc2", "norm2") for kind in both] for i in range(2)]
    assert {component: sorted(owned) for component, _, owned in components(patient("vit"))} == {
        "embedding": ["patch_embed.proj.bias", "patch_embed.proj.weight"],
        "position": ["pos_embed"],
        "msa": sorted(msa[0] + msa[1]),
        "mlp": sorted(mlp[0] + mlp[1]),
        "blocks.0": sorted(msa[0] + mlp[0]),
        "blocks.1": sorted(msa[1] + mlp[1]),
    }


class Noisy(nn.Module):
    """Random in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network("mlp")

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + torch.randn(CLASSES, dtype=x.dtype)


@pytest.mark.parametrize("name", ["sharpness", "hessian_spectrum", "flatness", "landscape"])
def test_a_network_that_is_random_in_eval_mode_is_refused(name: str) -> None:
    found = measured(Subject(Noisy(), data(), batch_size=5), **{name: {}})
    assert found.status == "failed"
    assert "random in eval mode" in " ".join(found.reason.split())
    assert not found.scalars


def test_the_densitys_moments_are_those_of_the_random_vectors() -> None:
    """With one draw v of signs, sum weight node^k = v^T H^k v / |v|^2: of the trace in expectation."""
    found = measured(patient("vit"), sharpness={"density_draws": 20, "density_steps": 4, "components": False})
    nodes, weights = found.arrays["density_nodes"], found.arrays["density_weights"]
    assert weights.sum() == pytest.approx(1)
    matrix, n = dense("vit"), len(dense("vit"))
    for power in (1, 2):
        exact = float(torch.linalg.matrix_power(matrix, power).trace()) / n
        off = torch.linalg.matrix_power(matrix, power)
        spread = float((2 * (off.square().sum() - off.diagonal().square().sum())).sqrt()) / n / 20**0.5
        assert abs((weights * nodes**power).sum() - exact) < 4 * spread


def test_a_network_without_anatomy_has_no_components_and_is_measured() -> None:
    found = measured(patient("mlp"), sharpness={})
    assert found.status == "ok"
    assert not found.units
    assert "lambda_max_msa" not in found.scalars


def test_a_spent_budget_gives_what_there_is_and_says_so() -> None:
    found = measured(patient("vit"), sharpness={"budget": 0.001})
    assert found.status == "not_converged"
    assert "lambda_max" in found.reason
    assert "trace (0 of 10 draws)" in found.reason
    assert np.isfinite(found.scalars["lambda_max"].value)


def test_an_eigenvalue_that_has_not_converged_has_no_interval() -> None:
    found = measured(patient("vit"), sharpness={"max_products": 1, "components": False})
    assert found.status == "not_converged"
    assert (found.scalars["lambda_max"].low, found.scalars["lambda_max"].high) == (None, None)
    spent = measured(patient("vit"), sharpness={"budget": 0.001, "components": False})
    assert spent.status == "not_converged"
    assert (spent.scalars["lambda_max"].low, spent.scalars["lambda_max"].high) == (None, None)


def test_the_interval_of_a_converged_eigenvalue_holds() -> None:
    found = measured(patient("vit"), sharpness={"components": False}).scalars["lambda_max"]
    assert found.low < found.high
    assert found.low - 1e-12 <= largest(dense("vit")) <= found.high + 1e-12


def test_the_batch_size_does_not_matter() -> None:
    one, other = patient("vit"), patient("vit")
    other.batch_size = 4
    a, b = (measured(s, sharpness={"components": False, "tolerance": 1e-9}) for s in (one, other))
    assert a.scalars["lambda_max"].value == pytest.approx(b.scalars["lambda_max"].value, rel=1e-9)


def test_the_spectrum_is_that_of_each_regularised_mini_batch() -> None:
    decayed = frozenset(name for name, _ in network("vit").named_parameters())
    training = Training(Augment(level="none", mixup=0.4), 0.3, decayed)
    subject = patient("vit", training=training)
    options = {"batches": 3, "batch": 6, "top": 4, "tolerance": 1e-8}
    found = measured(subject, hessian_spectrum=options)
    assert found.status == "ok", found.reason
    view = subject.on("train")
    values = []
    for batch in view.augmented_batches(6, 3):
        assert batch.targets.ndim == 2  # mixed
        exact = torch.linalg.eigvalsh(dense_hessian(view.network.eval(), [batch], decay=0.3))
        values.append(exact[exact.abs().argsort(descending=True)][:4].numpy())
    np.testing.assert_allclose(found.arrays["eigenvalues"], np.stack(values), rtol=1e-6)
    assert found.scalars["nep"].value == pytest.approx((np.stack(values) < 0).mean())
    plain = measured(subject, hessian_spectrum={**options, "regulariser": False})
    assert not np.allclose(plain.arrays["eigenvalues"], found.arrays["eigenvalues"])


def test_a_spent_budget_of_the_spectrum() -> None:
    found = measured(patient("mlp"), hessian_spectrum={"batches": 50, "batch": 4, "top": 2, "budget": 0.05})
    assert found.status == "not_converged"
    assert "of 50 mini-batches" in found.reason


def test_a_mini_batch_that_the_budget_cuts_off_is_left_out_unless_it_is_the_first() -> None:
    options = {"batches": 3, "batch": 4, "top": 3, "tolerance": 1e-10}
    whole = measured(patient("vit"), hessian_spectrum=options)
    per_batch = whole.scalars["products"].value / 3
    assert per_batch > 5
    with hurried(3):
        first = measured(patient("vit"), hessian_spectrum={**options, "budget": "10m"})
    assert first.status == "not_converged"
    assert first.scalars["products"].value == 3
    assert first.arrays["eigenvalues"].shape == (1, 3)
    assert "1 of 1 mini-batches have not converged in 3 products" in first.reason
    with hurried(int(per_batch) + 5):
        second = measured(patient("vit"), hessian_spectrum={**options, "budget": "10m"})
    assert second.reason == "the budget ended after 1 of 3 mini-batches."
    np.testing.assert_array_equal(second.arrays["eigenvalues"], whole.arrays["eigenvalues"][:1])


def test_a_draw_of_the_density_that_the_budget_cuts_off_is_dropped() -> None:
    options = {"components": False, "trace_draws": 0, "density_draws": 2, "density_steps": 6}
    looks = int(measured(patient("vit"), sharpness={**options, "density_draws": 0}).scalars["products"].value)
    with hurried(looks + 8):  # the clock's start and each product but the last, the first draw, a bit of the second
        found = measured(patient("vit"), sharpness={**options, "budget": "10m"})
    assert found.reason is not None
    assert "density (1 of 2 draws)" in found.reason
    assert found.scalars["products"].value < looks + 12
    assert len(found.arrays["density_nodes"]) == 6


def test_the_clock_of_sharpness_starts_before_images_are_read() -> None:
    subject = patient("vit")
    with mock.patch.object(
        Subject, "own_batches", lambda self: pytest.fail("read") if not made else Subject.batches(self)
    ):
        made: list[object] = []
        with mock.patch.object(sharpness, "Clock", lambda *a, **k: made.append(a) or Clock(*a, **k)):
            assert measured(subject, sharpness={"components": False}).status == "ok"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    "entry", [{"sharpness": {"max_products": 30}}, {"hessian_spectrum": {"batches": 2, "batch": 4, "max_products": 30}}]
)
def test_half_precision_has_not_converged_and_says_why(dtype: torch.dtype, entry: dict[str, object]) -> None:
    subject = Subject(network("mlp").to(dtype), data(), batch_size=5)
    found = measured(subject, **entry)
    assert found.status == "not_converged", found.reason
    assert f"computes in {str(dtype)[6:]}, whose rounding" in found.reason
    exact = measured(patient("mlp"), **entry)
    key = "lambda_max" if "sharpness" in entry else "largest"
    assert found.scalars[key].value == pytest.approx(exact.scalars[key].value, rel=0.05)


def test_vectors_of_half_precision_networks_are_float32() -> None:
    surface = LossSurface(network("mlp").bfloat16(), [])
    assert surface.vector_dtype == torch.float32
    assert LossSurface(network("mlp"), []).vector_dtype == torch.float64
    seen: list[torch.dtype] = []
    product = Hessian.product

    def noted(self: Hessian, vector: Tensor) -> Tensor:
        image = product(self, vector)
        seen.extend([vector.dtype, image.dtype])
        return image

    with mock.patch.object(Hessian, "product", noted):
        subject = Subject(network("mlp").bfloat16(), data(), batch_size=5)
        measure(subject, parse_probes([{"sharpness": {"max_products": 3, "density_steps": 3}}]))
        measure(subject, parse_probes([{"hessian_spectrum": {"batches": 1, "batch": 4, "max_products": 3}}]))
        measure(subject, parse_probes([{"landscape": {"points": 3, "directions": "eigenvectors"}}]))
    assert set(seen) == {torch.float32}


def test_jackknife_of_a_mean_is_the_t_interval() -> None:
    """Of a plain mean the jackknife's standard error is s / sqrt(n)."""
    values = np.array([[1.0], [2.0], [4.0], [7.0]])
    found = jackknife(values, lambda v: float(v.mean()))
    from scipy import stats

    low, high = stats.t.interval(0.95, 3, loc=3.5, scale=stats.sem([1, 2, 4, 7]))
    assert (found.low, found.high) == pytest.approx((low, high))


def test_nep_and_ape() -> None:
    values = np.array([[2.0, -1.0], [4.0, -3.0]])
    assert negative_share(values) == 0.5
    assert positive_mean(values) == 3.0
    assert np.isnan(positive_mean(-np.abs(values)))


@pytest.mark.parametrize(("sign", "low", "high"), [(1, 0.0, 0.1936), (-1, 0.8064, 1.0)])
def test_nep_of_all_or_none_has_wilsons_interval_over_mini_batches(sign: int, low: float, high: float) -> None:
    found = negative_proportion(sign * np.ones((16, 5)))
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


def test_intervals_end_where_the_numbers_end() -> None:
    values = np.array([[-1.0, 3.0], [2.0, 3.0], [1.0, 90.0]])
    nep = negative_proportion(values)
    assert nep.value == pytest.approx(1 / 6)
    assert nep.low == 0
    assert nep.high < 1
    assert negative_proportion(-values).high == 1
    assert jackknife(values, positive_mean, least=0.0).low == 0


def test_there_is_no_ape_where_no_eigenvalue_is_positive() -> None:
    (probe,) = parse_probes([{"hessian_spectrum": {"batches": 2, "top": 2}}])
    ones = np.ones(2)
    pairs = [Eigenpairs(-ones, ones, ones, torch.empty(0), 3, True)] * 2
    assert "ape" not in probe._result(pairs, None).scalars
    one = jackknife(np.array([[1.0, 2.0], [-1.0, -1.0], [-1.0, -2.0]]), positive_mean)
    assert (one.value, one.low, one.high) == (1.5, None, None)


def test_conditions_say_what_the_loss_had() -> None:
    decayed = frozenset(name for name, _ in network("mlp").named_parameters() if name.endswith("weight"))
    subject = patient("mlp", training=Training(Augment(level="none", mixup=0.4), 0.3, decayed))

    def conditions(subject: Subject, **options: object) -> dict[str, object]:
        return measured(subject, hessian_spectrum={"batches": 1, "batch": 4, "top": 1, **options}).conditions

    known = conditions(subject)
    assert known["augment"]["mixup"] == 0.4
    assert known["weight_decay"] == 0.3
    assert conditions(subject, augment=False, regulariser=False) == {"augment": None, "weight_decay": 0.0}
    assert conditions(patient("mlp")) == {"augment": None, "weight_decay": 0.0}
    other = patient("mlp", training=Training(Augment(level="none", mixup=0.4), 0.3, frozenset()))
    assert conditions(other)["decayed"] != known["decayed"]
