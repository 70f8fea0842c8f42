"""Fast adversarial training against its formula, alone and with SAM."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.training.conftest import tiny  # noqa: F401
from tests.treatments.passes import Counted, batch, grads, loss_and_gradient, net, sam_gradient, weights
from vitclinic._core.errors import RecipeError, TreatmentError
from vitclinic.data import Batch
from vitclinic.data.annotations.batch import Annotations
from vitclinic.training import train
from vitclinic.training.passes import InputAscentStep, choose_step_rule
from vitclinic.treatments import FastGradientSign, StepRule, Treatment, parse_treatments

ATTACK = FastGradientSign(epsilon=0.1, step=0.125)


def rule(*entries) -> StepRule:
    return choose_step_rule(parse_treatments(entries))


def image_gradient(network, part, images):
    images = images.detach().clone().requires_grad_()
    torch.manual_seed(int(part.keys[0]) & (2**63 - 1))
    loss = nn.functional.cross_entropy(network(images), part.targets)
    return torch.autograd.grad(loss, images)[0]


def attacked(network, part):
    """The formula, written out."""
    x, x0 = part.images, ATTACK.start(part).images.detach()
    delta = (x0 - x + 0.125 * torch.sign(image_gradient(network, part, x0))).clip(-0.1, 0.1)
    return dataclasses.replace(part, images=(x + delta).clip(0, 1))


OPTIONS = {"adversarial": {"epsilon": 0.1, "step": 1.25}}


def test_the_step_trains_on_the_images_of_the_formula():
    network, reference = net(dropout=0.3), net(dropout=0.3)
    passes = Counted(network)
    losses = rule(OPTIONS)([batch()], passes)
    worse = attacked(net(dropout=0.3), batch())
    assert torch.allclose(passes.seen[1], worse.images, atol=1e-14)
    loss, gradient = loss_and_gradient(reference, worse)
    assert losses["task"] == pytest.approx(loss.item(), abs=1e-12)  # the loss of the images trained on
    found = grads(network)
    assert found.keys() == gradient.keys()
    assert all(torch.allclose(found[k], g, atol=1e-12) for k, g in gradient.items())
    assert [sync for _, sync, _ in passes.calls] == [False, True]
    # BatchNorm's statistics are those of the images trained on; every parameter learns again.
    assert all(torch.equal(v, weights(reference)[k]) for k, v in weights(network).items())
    assert all(p.requires_grad for p in network.parameters())


def test_the_first_pass_leaves_no_gradient_to_the_weights_also_when_it_fails():
    network = net()

    class Fails(Counted):
        def __call__(self, batch, sync=True, weight=1.0):
            super().__call__(batch, sync, weight)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        rule(OPTIONS)([batch()], Fails(network))
    assert grads(network) == {}
    assert all(p.requires_grad for p in network.parameters())


def test_with_sam_one_backward_pass_gives_both_ascents():
    """[chen2022 Eq. 5]: eps and delta both from (w, x0), then one pass at (w + eps, x + delta)."""
    network = net(dropout=0.3)
    passes = Counted(network)
    losses = rule({"sam": {"rho": 0.3}}, OPTIONS)([batch()], passes)
    started = ATTACK.start(batch())
    start = dataclasses.replace(started, images=started.images.detach())
    worse = attacked(net(dropout=0.3), batch())
    loss, _, second = sam_gradient(net(dropout=0.3), start, 0.3, second=worse)
    assert len(passes.calls) == 2
    assert torch.equal(passes.seen[0], start.images)
    assert torch.allclose(passes.seen[1], worse.images, atol=1e-14)
    assert losses["task"] == pytest.approx(loss.item(), abs=1e-12)
    found = grads(network)
    assert found.keys() == second.keys()
    assert all(torch.allclose(found[k], g, atol=1e-12) for k, g in second.items())
    assert network.norm.num_batches_tracked == 1


@given(seed=st.integers(0, 100), epsilon=st.floats(0, 0.5), step=st.floats(0, 2), extreme=st.booleans())
@settings(max_examples=40, deadline=None)
def test_images_stay_in_the_ball_and_in_the_pixels_range(seed, epsilon, step, extreme):
    part = batch(seed)
    if extreme:
        part = dataclasses.replace(part, images=part.images.round())
    attack = FastGradientSign(epsilon, step * epsilon)
    started = attack.start(part)
    started.images.grad = torch.randn(part.images.shape, generator=torch.Generator().manual_seed(seed)).double()
    for images in (started.images.detach(), attack.finish(part, started).images):
        assert (images - part.images).abs().max() <= epsilon + 1e-12
        assert images.min() >= 0
        assert images.max() <= 1


def test_starts_fill_the_ball_and_differ_between_samples_and_epochs():
    part = batch(size=2000)
    part = dataclasses.replace(part, images=torch.full_like(part.images, 0.5))
    offsets = (ATTACK.start(part).images.detach() - 0.5) / 0.1
    assert offsets.mean().abs() < 4 / math.sqrt(3 * offsets.numel())
    assert offsets.var() == pytest.approx(1 / 3, rel=0.05)
    assert len(offsets.flatten(1).unique(dim=0)) == 2000


def test_what_an_image_becomes_does_not_depend_on_its_batch():
    whole = batch(size=9)
    parts = whole.split(4)
    network = net(norm=False)
    starts = torch.cat([ATTACK.start(part).images for part in parts])
    assert torch.equal(starts, ATTACK.start(whole).images)
    together, apart = Counted(network), Counted(network, accumulate=3)
    rule(OPTIONS)([whole], together)
    rule(OPTIONS)(parts, apart)
    divided = [images for images, (_, sync, _) in zip(apart.seen, apart.calls, strict=True)]
    assert torch.allclose(torch.cat(divided[3:]), together.seen[1], atol=1e-14)
    small = Counted(network)
    rule({"sam": {"m": 4}}, OPTIONS)([whole], small)
    assert torch.allclose(torch.cat(small.seen[1::2]), together.seen[1], atol=1e-14)


def test_a_gradient_that_is_no_number_leaves_the_pixel_at_its_start():
    started = ATTACK.start(batch())
    started.images.grad = torch.full_like(started.images, math.nan)
    images = ATTACK.finish(batch(), started).images
    assert torch.allclose(images, started.images.detach(), atol=1e-14)
    with pytest.raises(ValueError, match="No backward pass"):
        ATTACK.finish(batch(), ATTACK.start(batch()))


@pytest.mark.parametrize("treatments", [["adversarial"], ["adversarial", "sam"]])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_it_trains(tiny, treatments, precision):  # noqa: F811
    run = train(tiny(treatments=treatments, precision=precision, steps=10))
    rows = [row for row in run.metrics if row["kind"] == "train"]
    assert run.status["status"] == "finished"
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_sam_of_length_zero_leaves_adversarial_training_alone():
    assert isinstance(rule({"sam": {"rho": 0.0}}, "adversarial"), InputAscentStep)


def test_what_does_not_go_together_is_a_sentence():
    with pytest.raises(TreatmentError, match="adversarial cannot be combined with sam's every above 1"):
        rule({"sam": {"every": 5}}, "adversarial")
    with pytest.raises(RecipeError, match=r"'treatments.adversarial.epsilon'"):
        parse_treatments([{"adversarial": {"epsilon": 2.0}}])

    class Other(Treatment):
        name = "other"

        def step_rule(self):
            from vitclinic.training.passes import PlainStep

            return PlainStep()

    with pytest.raises(RecipeError, match="has no first pass in which the images could be perturbed"):
        choose_step_rule([Other(), *parse_treatments(["adversarial"])])


def test_division_keeps_every_part_of_a_batch_together():
    views = (torch.arange(5.0), torch.arange(5.0, 10.0))
    masks = Annotations(masks=torch.arange(20, dtype=torch.uint8).view(5, 2, 2))
    part = dataclasses.replace(
        batch(size=5), patch_targets=torch.arange(10).view(5, 2), crops=views, teacher=views[0], annotations=masks
    )
    pieces = part.split(2)
    assert [len(piece) for piece in pieces] == [2, 2, 1]
    for name in {field.name for field in dataclasses.fields(Batch)} - {"crops", "annotations"}:
        assert torch.equal(torch.cat([getattr(p, name) for p in pieces]), getattr(part, name))
    assert torch.equal(torch.cat([piece.annotations.masks for piece in pieces]), masks.masks)
    for view, *cut in zip(views, *(piece.crops for piece in pieces), strict=True):
        assert torch.equal(torch.cat(cut), view)
    assert batch().split(None)[0].patch_targets is None
    assert batch().split(2)[0].patch_targets is None
