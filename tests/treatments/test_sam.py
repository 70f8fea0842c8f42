"""SAM's step against dense float64 rewritings, and every rule it promises to keep."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.optim.lamb import Lamb
from torch import nn

from tests.training.conftest import tiny  # noqa: F401
from tests.treatments.passes import (
    Counted,
    batch,
    dense_ascent,
    grads,
    loss_and_gradient,
    net,
    sam_gradient,
    weights,
)
from vitclinic._core.callback import Callback
from vitclinic._core.errors import RecipeError
from vitclinic.training import resume, train
from vitclinic.training.passes import PlainStep
from vitclinic.treatments import parse_treatments
from vitclinic.treatments.sam_core import Ascent, keep_buffers, separate_gradients

OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05, weight_decay=0.1),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "lamb": lambda ps: Lamb(ps, lr=0.05, weight_decay=0.1, max_grad_norm=None),
}


def rule(**options):
    (treatment,) = parse_treatments([{"sam": options}])
    return treatment.step_rule()


def same(found, expected, tolerance=1e-12):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=tolerance), name


# The step


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("adaptive", [False, True])
def test_steps_are_those_of_a_dense_rewriting(name, adaptive):
    ours, dense = net(dropout=0.3), net(dropout=0.3)
    passes = Counted(ours)
    optimizer = OPTIMIZERS[name](passes.parameters)
    reference = OPTIMIZERS[name](dense.parameters())
    sam = rule(rho=0.3, adaptive=adaptive)
    for number in range(5):
        loss, _, second = sam_gradient(dense, batch(number), 0.3, adaptive)
        for key, p in dense.named_parameters():
            p.grad = second.get(key)
        reference.step()
        losses = sam([batch(number)], passes)
        optimizer.step()
        optimizer.zero_grad()
        assert losses["task"] == pytest.approx(loss.item(), abs=1e-12)  # the loss at w
    same(dict(ours.named_parameters()), dict(dense.named_parameters()), 1e-10)
    plain = net()
    assert not torch.allclose(plain.first.weight, ours.first.weight)


def test_rho_zero_is_the_base_optimizer_s_step_to_the_bit(tiny, tmp_path):  # noqa: F811
    plain = train(tiny())
    zero = train(tiny(treatments=[{"sam": {"rho": 0.0, "m": 7}}], out=str(tmp_path / "zero")))
    with_sam = train(tiny(treatments=["sam"], out=str(tmp_path / "sam")))
    stored = zero.checkpoints.read_model("last")
    assert all(torch.equal(value, stored[key]) for key, value in plain.checkpoints.read_model("last").items())
    others = with_sam.checkpoints.read_model("last")
    assert not all(torch.equal(value, others[key]) for key, value in stored.items())


def test_an_ascent_of_length_zero_moves_nothing():
    w = nn.Parameter(torch.randn(3))
    before = w.detach().clone()
    with Ascent(0.0).climb([w], [torch.ones(3)]):
        assert torch.equal(w, before)


@given(scale=st.floats(1e-3, 1e6), rho=st.floats(1e-3, 10), adaptive=st.booleans(), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_the_ascent_is_one_of_length_rho_that_no_scale_changes(scale, rho, adaptive, seed):
    draw = torch.Generator().manual_seed(seed)
    values = {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in [("a", (3, 2)), ("b", (4,))]}
    slopes = {n: torch.randn(v.shape, generator=draw, dtype=torch.float64) for n, v in values.items()}
    parameters = [nn.Parameter(v.clone()) for v in values.values()]
    with Ascent(rho, adaptive).climb(parameters, [scale * g for g in slopes.values()]):
        eps = {n: p.detach() - values[n] for n, p in zip(values, parameters, strict=True)}
    same(eps, dense_ascent(slopes, values, rho, adaptive), 1e-9)
    t = {n: v.abs() + 0.01 if adaptive else torch.ones_like(v) for n, v in values.items()}
    length = math.sqrt(sum(float(((eps[n] / t[n]) ** 2).sum()) for n in eps))
    assert length == pytest.approx(rho)
    assert all(torch.equal(p, values[n]) for n, p in zip(values, parameters, strict=True))


def test_weight_decay_is_not_in_the_ascent_nor_in_the_gradient():
    """The gradient left to step with does not depend on the optimizer at all."""
    network = net()
    rule(rho=0.2)([batch()], Counted(network))
    same(grads(network), sam_gradient(net(), batch(), 0.2)[2])


# Which images an ascent sees


def test_every_micro_batch_has_its_own_ascent():
    network = net()
    passes = Counted(network, accumulate=2)
    losses = rule(rho=0.2)([batch(0), batch(1)], passes)
    one, two = (sam_gradient(net(), batch(n), 0.2) for n in (0, 1))
    same(grads(network), {k: (one[2][k] + two[2][k]) / 2 for k in one[2]})
    assert losses["task"] == pytest.approx(float(one[0] + two[0]) / 2)
    assert [(sync, weight) for _, sync, weight in passes.calls] == [(False, 1), (False, 1), (False, 1), (True, 1)]


def test_one_ascent_for_the_whole_batch():
    network = net(norm=False)
    passes = Counted(network, accumulate=2)
    rule(rho=0.2, ascent="batch")([batch(0), batch(1)], passes)
    whole = batch(0)
    both = type(whole)(
        *(torch.cat([getattr(batch(n), f) for n in (0, 1)]) for f in ("images", "targets", "indices", "keys"))
    )
    same(grads(network), sam_gradient(net(norm=False), both, 0.2)[2])
    assert [sync for _, sync, _ in passes.calls] == [False, False, False, True]


def test_m_images_an_ascent_also_where_they_do_not_divide():
    network = net(dropout=0.4)
    passes = Counted(network)
    losses = rule(rho=0.2, m=4)([batch(size=10)], passes)
    parts = batch(size=10).split(4)
    found = [sam_gradient(net(dropout=0.4), part, 0.2) for part in parts]
    shares = [0.4, 0.4, 0.2]
    same(grads(network), {k: sum(s * f[2][k] for s, f in zip(shares, found, strict=True)) for k in found[0][2]})
    assert losses["task"] == pytest.approx(sum(s * float(f[0]) for s, f in zip(shares, found, strict=True)))
    assert [size for size, _, _ in passes.calls] == [4, 4, 4, 4, 2, 2]
    assert [sync for _, sync, _ in passes.calls] == [False] * 5 + [True]


def test_m_of_all_images_is_no_division():
    one, other = net(), net()
    rule(m=6)([batch()], Counted(one))
    rule()([batch()], Counted(other))
    assert all(torch.equal(g, grads(other)[k]) for k, g in grads(one).items())


def test_m_and_one_ascent_contradict_each_other():
    with pytest.raises(RecipeError, match="'m' divides a batch into ascents"):
        parse_treatments([{"sam": {"m": 4, "ascent": "batch"}}])


@pytest.mark.parametrize("options", [{"rho": -0.1}, {"rho": math.nan}, {"every": 0}, {"m": 0}, {"ascent": "image"}])
def test_mistakes_are_sentences(options):
    (name,) = options
    with pytest.raises(RecipeError, match=f"'treatments.sam.{name}'"):
        parse_treatments([{"sam": options}])


# What comes back


def test_weights_come_back_to_the_bit_also_without_a_second_gradient_and_after_an_exception():
    network = net(torch.float32)
    before = weights(network)

    class Fails(Counted):
        def __call__(self, batch, sync=True, weight=1.0):
            if sync:
                raise RuntimeError("out of memory")
            return super().__call__(batch, sync, weight)

    with pytest.raises(RuntimeError):
        rule(rho=3.0)([batch(dtype=torch.float32)], Fails(network))
    after = weights(network)
    moving = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert all(torch.equal(before[k], after[k]) for k in before.keys() - moving)
    assert all(p.grad is None for p in network.parameters())

    class Dies(Counted):
        """In pass two the first layer has no gradient any more."""

        def __call__(self, batch, sync=True, weight=1.0):
            network.first.requires_grad_(not sync)
            return super().__call__(batch, sync, weight)

    rule(rho=3.0)([batch(dtype=torch.float32)], Dies(network))
    assert network.first.weight.grad is None
    assert network.second.weight.grad is not None
    after = weights(network)
    assert all(torch.equal(before[k], after[k]) for k in before.keys() - moving)


def test_a_zero_gradient_makes_no_nan():
    w = nn.Parameter(torch.ones(3))
    for adaptive in (False, True):
        with Ascent(0.1, adaptive).climb([w], [torch.zeros(3)]) as finite:
            assert finite
            assert torch.equal(w, torch.ones(3))
    with Ascent(0.1).climb([w], [None]) as finite:
        assert finite


def test_gradients_of_the_first_pass_are_apart():
    w = nn.Parameter(torch.ones(2))
    w.grad = before = torch.full((2,), 7.0)
    with separate_gradients([w]) as found:
        (3 * w).sum().backward()
    assert w.grad is before
    assert torch.equal(w.grad, torch.full((2,), 7.0))
    assert torch.equal(found[0], torch.full((2,), 3.0))


def test_running_statistics_move_in_the_first_pass_only():
    network, once = net(dropout=0.5), net(dropout=0.5)
    rule(rho=2.0)([batch()], Counted(network))
    loss_and_gradient(once, batch())
    for name, buffer in once.named_buffers():
        assert torch.equal(dict(network.named_buffers())[name], buffer), name
    assert network.norm.num_batches_tracked == 1
    momentum = network.norm.momentum
    assert momentum == 0.1


def test_statistics_stand_still_when_asked_twice_and_after_an_exception_and_move_again():
    network = net()
    before = weights(network)

    def fail():
        with keep_buffers(network), keep_buffers(network):
            network(torch.full((4, 1, 2, 4), math.nan, dtype=torch.float64))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert all(torch.equal(before[k], v) for k, v in weights(network).items())
    network(batch().images)
    assert network.norm.num_batches_tracked == 1
    assert not torch.equal(network.norm.running_mean, before["norm.running_mean"])


# Gradients that are not finite


class Explodes(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


def explode_at(trainer, steps):
    """Makes the network's gradient infinite in some steps, its loss staying what it is."""

    def hook(module, arguments, output):
        return Explodes.apply(output) if trainer.step in steps else None

    trainer.network.register_forward_hook(hook)


def tensors(trainer):
    """Everything that a step may change, the loss scale aside."""
    optimizer, state = trainer.optimizer.state_dict()["state"], trainer.rules.own.state_dict()
    found = [*trainer.network.state_dict().values(), *trainer.evaluation_network.state_dict().values()]
    found += [value for entry in optimizer.values() for value in entry.values()]
    found += [torch.tensor(state.get("steps", 0)), *(state.get("direction") or [])]
    return [value.clone() for value in found]


class Explode(Callback):
    """Notes for each exploding step whether it changed anything."""

    def __init__(self, *steps):
        self.steps, self.before, self.kept = steps, [], []

    def on_train_start(self, trainer):
        explode_at(trainer, self.steps)
        self.before = tensors(trainer)

    def on_step(self, trainer):
        now = tensors(trainer)
        if trainer.step - 1 in self.steps:
            same = len(now) == len(self.before)
            self.kept.append(same and all(torch.equal(a, b) for a, b in zip(now, self.before, strict=True)))
        self.before = now


@pytest.mark.parametrize("treatments", [["sam"], [{"sam": {"every": 3}}], ["sam", "adversarial"], []])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_first_gradient_that_is_not_finite_skips_the_step(tiny, treatments, precision):  # noqa: F811
    watch = Explode(0, 3, 4)
    plain = tiny(treatments=treatments, precision=precision, ema=0.9, schedule={"warmup": 0})
    run = train(plain, callbacks=[watch])
    assert run.status["status"] == "finished"
    assert watch.kept == [True, True, True]
    rows = [row for row in run.metrics if row["kind"] == "train"]
    assert [row["grad_norm"] is None for row in rows] == [True, False, False, True, True, False]
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_run_whose_gradients_are_never_finite_has_diverged(tiny, monkeypatch):  # noqa: F811
    monkeypatch.setattr("vitclinic.training.divergence.STUCK", 3)
    run = train(tiny(steps=9, treatments=["sam"]), callbacks=[Explode(1, 2, *range(4, 9))])
    assert run.status["status"] == "diverged"
    assert run.status["reason"] == "no finite gradient in the 3 steps up to step 7"


def test_the_loss_scale_does_not_change_the_gradient():
    plain, scaled = net(), net()
    rule()([batch()], Counted(plain))
    rule()([batch()], Counted(scaled, scale=2.0**16))
    assert all(torch.equal(g * 2.0**16, grads(scaled)[k]) for k, g in grads(plain).items())


# LookSAM


def looksam_gradients(network, optimizer, batches, rho, every, alpha):
    """As the paper's algorithm writes it, on long vectors."""
    g_v = None
    for number, part in enumerate(batches):
        _, first, second = sam_gradient(network, part, rho)
        loss_and_gradient(network, part)
        g, g_s = (torch.cat([v.flatten() for v in d.values()]) for d in (first, second))
        if number % every == 0:
            cosine = g @ g_s / (g.norm() * g_s.norm())
            g_v = g_s - g_s.norm() * cosine * g / g.norm()
        else:
            g_s = g + alpha * (g.norm() / g_v.norm()) * g_v
        parts = torch.split(g_s, [v.numel() for v in first.values()])
        for name, value in zip(first, parts, strict=True):
            network.get_parameter(name).grad = value.view_as(first[name]).clone()
        yield {k: v.clone() for k, v in grads(network).items()}
        optimizer.step()


def test_looksam_is_the_paper_s_algorithm():
    ours, dense = net(), net()
    passes = Counted(ours)
    optimizer = OPTIMIZERS["sgd"](passes.parameters)
    look = rule(rho=0.3, every=3, alpha=0.5)
    batches = [batch(n) for n in range(8)]
    expected = looksam_gradients(dense, OPTIMIZERS["sgd"](dense.parameters()), batches, 0.3, 3, 0.5)
    for part, gradient in zip(batches, expected, strict=True):
        look([part], passes)
        same(grads(ours), gradient, 1e-10)
        optimizer.step()
        optimizer.zero_grad()
    assert len(passes.calls) == 8 + 3  # one pass a step, and one more in steps 0, 3 and 6


def test_looksam_with_accumulation_reuses_the_part_of_the_whole_gradient():
    network = net()
    look = rule(rho=0.3, every=2, alpha=0.5)
    passes = Counted(network, accumulate=2)
    look([batch(0), batch(1)], passes)
    one, two = (sam_gradient(net(), batch(n), 0.3) for n in (0, 1))
    flat = [torch.cat([(one[k][n] + two[k][n]).flatten() / 2 for n in one[1]]) for k in (1, 2)]
    g_v = flat[1] - flat[1] @ flat[0] / flat[0].norm() ** 2 * flat[0]
    found = torch.cat([v.flatten() for v in look.reused.direction if v.shape != (2,) or v.any()])
    assert torch.allclose(found, g_v / g_v.norm(), atol=1e-10)


def test_parallel_gradients_leave_nothing_to_reuse():
    """In one dimension nothing is at right angles; rounding must not be taken for a direction."""
    w = nn.Parameter(torch.tensor([0.3]))
    look = rule(every=2).reused
    w.grad = torch.tensor([0.7])
    look.learn([w], [torch.tensor([0.1])])
    assert look.direction[0] == 0
    w.grad = torch.tensor([0.5])
    look.reuse([w])
    assert w.grad == 0.5
    assert look.steps == 2


class Stop(Callback):
    def on_step(self, trainer):
        if trainer.step == 8:
            raise RuntimeError("power cut")


@pytest.mark.parametrize("options", [{"every": 4}, {"adaptive": True, "m": 13}, {"every": 3, "ascent": "batch"}])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tiny, tmp_path, options):  # noqa: F811
    model = {**tiny()["model"], "drop_path_rate": 0.5, "proj_drop_rate": 0.3}
    plain = tiny(treatments=[{"sam": options}], steps=12, accumulate=2, model=model, checkpoint="5 steps")
    whole = train({**plain, "out": str(tmp_path / "whole")})
    with pytest.raises(RuntimeError):
        train(plain, callbacks=[Stop()])
    resumed = resume(plain["out"])
    for name, value in whole.checkpoints.read_model("last").items():
        assert torch.equal(value, resumed.checkpoints.read_model("last")[name]), name
    state, other = (run.checkpoints.read("last")[1]["rule"] for run in (whole, resumed))
    assert state["images"] == {"batch": 40}.get(options.get("ascent"), options.get("m", 20))
    if options.get("every"):
        assert state["steps"] == other["steps"] == 12
        assert all(torch.equal(a, b) for a, b in zip(state["direction"], other["direction"], strict=True))


def test_the_plain_rule_and_sam_report_the_same_loss():
    one, other = net(dropout=0.2), net(dropout=0.2)
    batches = [batch(0), batch(1)]
    sam, plain = rule()(batches, Counted(one, 2)), PlainStep()(batches, Counted(other, 2))
    assert sam["task"] == pytest.approx(plain["task"].item(), abs=1e-14)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"eta": 0.1}, "'eta' is only for ASAM: add 'adaptive: true'"),
        ({"alpha": 0.1}, "'alpha' is only for LookSAM: set"),
    ],
)
def test_an_option_that_would_not_be_used_is_a_sentence(options, sentence):
    with pytest.raises(RecipeError, match=sentence):
        parse_treatments([{"sam": options}])
