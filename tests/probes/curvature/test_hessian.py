"""Products with the Hessian against a dense float64 Hessian computed by another route."""

from __future__ import annotations

import gc
import weakref
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.probes.curvature.networks import NETWORKS, batches, dense_hessian, network
from vitclinic._core.errors import ModelError
from vitclinic.probes.curvature import hessian as hessian_module
from vitclinic.probes.curvature.hessian import Hessian, free_memory
from vitclinic.probes.curvature.lanczos import largest_eigenpairs
from vitclinic.probes.curvature.loss_surface import LossSurface


@pytest.fixture(params=NETWORKS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def net(name: str) -> nn.Module:
    return network(name)


@cache
def dense(name: str, soft: bool = False) -> torch.Tensor:
    """Of the networks and images that most tests here share, without regulariser."""
    return dense_hessian(network(name), batches(soft=soft))


def products(hessian: Hessian, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    vectors = torch.randn(3, n, generator=generator, dtype=torch.float64)
    return vectors, torch.stack([hessian.product(v) for v in vectors])


@pytest.mark.parametrize("memory", [None, 0], ids=["kept graph", "recomputed"])
@pytest.mark.parametrize("soft", [False, True], ids=["labels", "shares"])
def test_products_equal_those_of_the_dense_matrix(name: str, net: nn.Module, memory: int | None, soft: bool) -> None:
    surface = LossSurface(net, batches(soft=soft), decay=0.1)
    with surface.gradient_mode():
        hessian = Hessian(surface, memory)
        vectors, found = products(hessian, surface.size)
        assert hessian.keeps == (memory is None)
    torch.testing.assert_close(found, vectors @ dense(name, soft) + 0.1 * vectors, rtol=1e-9, atol=1e-9)


def test_decay_acts_on_the_decayed_parameters_only() -> None:
    net = network("vit")
    decayed = [p for p in net.parameters() if p.ndim > 1]
    mask = torch.cat([torch.full((p.numel(),), float(p.ndim > 1), dtype=torch.float64) for p in net.parameters()])
    assert 0 < mask.sum() < len(mask)
    surface = LossSurface(net, batches(), decay=0.7, decayed=decayed)
    with surface.gradient_mode():
        hessian = Hessian(surface)
        vectors, found = products(hessian, surface.size)
        product, size = hessian.block(["blocks.0.norm1.weight"])
        other = hessian.block(["blocks.0.attn.qkv.weight"])
        plain = Hessian(LossSurface(net, batches()))
        for chosen, (block, length), shift in (
            ("blocks.0.norm1.weight", (product, size), 0.0),
            ("blocks.0.attn.qkv.weight", other, 0.7),
        ):
            v = vectors[0, :length]
            torch.testing.assert_close(block(v), plain.block([chosen])[0](v) + shift * v, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found, vectors @ (dense("vit") + 0.7 * torch.diag(mask)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("context", ["gradient_mode", "evaluation_mode"])
def test_a_network_is_as_it_was_after_an_error_inside(context: str) -> None:
    net = network("convnet")
    net.train()
    net[4].eval()  # type: ignore[operator, index]
    net[0].bias.requires_grad_(False)  # type: ignore[union-attr, index]

    def photograph() -> list[object]:
        norms = [m.track_running_stats for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
        return [[m.training for m in net.modules()], [p.requires_grad for p in net.parameters()], norms]

    before, state = photograph(), {name: value.clone() for name, value in net.state_dict().items()}
    surface = LossSurface(net, batches(), mode="train")

    def fail() -> None:
        with getattr(surface, context)():
            assert photograph() != before
            surface.value()
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert photograph() == before
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_a_bound_that_fits_one_graph_keeps_one_and_gives_the_same() -> None:
    net, data = network("vit"), batches()
    surface = LossSurface(net, data)
    with surface.gradient_mode():
        whole = Hessian(surface)
        _, expected = products(whole, surface.size)
        bounded = Hessian(surface, whole.graph_bytes // 2)
        _, found = products(bounded, surface.size)
    assert [kept is not None for kept in bounded._kept] == [True, False, False]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_batch_norm_by_the_batch_is_another_hessian_and_leaves_the_running_statistics() -> None:
    net, data = network("convnet"), batches((6, 4))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    twin = network("convnet")
    for module in twin.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
            module.track_running_stats = False
            module.running_mean = module.running_var = None
    surface = LossSurface(net, data, mode="train")
    with surface.gradient_mode():
        vectors, found = products(Hessian(surface), surface.size)
    torch.testing.assert_close(found, vectors @ dense_hessian(twin, data), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(found, vectors @ dense_hessian(net, data))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not any(module.training for module in net.modules())


def test_a_block_is_the_submatrix() -> None:
    net, data = network("vit"), batches()
    names = [name for name, _ in net.named_parameters()]
    chosen = {name: p for name, p in net.named_parameters() if name.startswith("blocks.1.mlp")}
    sizes = [p.numel() for p in net.parameters()]
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    rows = torch.cat([torch.arange(offsets[i], offsets[i + 1]) for i, name in enumerate(names) if name in chosen])
    surface = LossSurface(net, data, parameters=chosen)
    with surface.gradient_mode():
        vectors, found = products(Hessian(surface), surface.size)
    torch.testing.assert_close(found, vectors @ dense("vit")[rows][:, rows], rtol=1e-9, atol=1e-9)
    whole = LossSurface(net, data, decay=0.2)
    with whole.gradient_mode():
        product, size = Hessian(whole).block(list(chosen))
        assert size == surface.size
        shared = torch.stack([product(vector) for vector in vectors])
    torch.testing.assert_close(shared, found + 0.2 * vectors, rtol=1e-9, atol=1e-9)


def test_top_eigenvalues_equal_those_of_the_dense_matrix(name: str, net: nn.Module) -> None:
    exact = torch.linalg.eigvalsh(dense(name)) + 0.05
    exact = exact[exact.abs().argsort(descending=True)][:5]
    surface = LossSurface(net, batches(), decay=0.05)
    start = torch.randn(surface.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with surface.gradient_mode():
        found = largest_eigenpairs(Hessian(surface).product, start, 5, tolerance=1e-8)
    torch.testing.assert_close(torch.from_numpy(found.values), exact, rtol=1e-6, atol=0)


def test_frozen_and_unused_parameters_count_as_zero_rows() -> None:
    net = network("mlp")
    net.unused = nn.Parameter(torch.ones(4, dtype=torch.float64))  # type: ignore[assignment]
    net[1].bias.requires_grad_(False)  # type: ignore[union-attr]
    flags = {name: p.requires_grad for name, p in net.named_parameters()}
    data = batches()
    surface = LossSurface(net, data)
    with surface.gradient_mode():
        vectors, found = products(Hessian(surface), surface.size)
    assert {name: p.requires_grad for name, p in net.named_parameters()} == flags
    for p in net.parameters():
        p.requires_grad_(True)
    torch.testing.assert_close(found, vectors @ dense_hessian(net, data), rtol=1e-9, atol=1e-9)


def test_the_gradient_is_that_of_the_mean_loss(net: nn.Module) -> None:
    data = batches()
    surface = LossSurface(net, data, decay=0.3)
    with surface.gradient_mode():
        found, at = surface.gradient(), surface.value()
        step = 1e-6 * found / found.norm()
        with torch.no_grad():
            for p, part in zip(surface.weights, surface.split(step), strict=True):
                p.add_(part)
        assert (surface.value() - at) / 1e-6 == pytest.approx(float(found.norm()), rel=1e-4)


def test_released_graphs_are_freed() -> None:
    surface = LossSurface(network("vit"), batches())
    with surface.gradient_mode():
        hessian = Hessian(surface)
        hessian.product(torch.ones(surface.size, dtype=torch.float64))
        graph = weakref.ref(hessian._kept[0].parts[0])  # type: ignore[union-attr]
        assert hessian.graph_bytes > 0
        hessian.release()
        assert hessian.graph_bytes == 0
        gc.disable()
        try:
            assert graph() is None
        finally:
            gc.enable()


def test_free_memory_counts_what_linux_can_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemFree:   100 kB\nMemAvailable:   700 kB\n")
    monkeypatch.setattr(hessian_module, "_MEMINFO", tmp_path / "meminfo")
    assert free_memory(torch.device("cpu")) == 700 * 1024


def test_free_memory_where_only_the_whole_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, whose sysconf does not know SC_AVPHYS_PAGES."""
    monkeypatch.setattr(hessian_module, "_MEMINFO", tmp_path / "none")
    known = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(hessian_module.os, "sysconf", known.__getitem__)
    assert free_memory(torch.device("cpu")) == 500 * 4096


def test_memory_is_looked_at_only_where_it_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessian_module, "free_memory", lambda device: pytest.fail("looked at"))
    assert Hessian(LossSurface(network("mlp"), batches()), memory=5).memory == 5


def test_a_random_network_is_refused() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network("mlp")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + torch.randn(3, dtype=x.dtype)

    with pytest.raises(ModelError, match="and then"):
        LossSurface(Noisy(), batches()).check()


def test_a_network_with_nan_weights_is_refused() -> None:
    net = network("mlp")
    with torch.no_grad():
        net[1].weight.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="the loss is nan"):
        LossSurface(net, batches()).check()
