"""SAM around anybody's optimizer, in anybody's loop."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn

from tests.treatments.passes import Counted, batch, grads, net, sam_gradient, weights
from tests.treatments.test_sam import OPTIMIZERS, rule
from vitclinic._core.errors import TreatmentError
from vitclinic.training.passes import PlainStep
from vitclinic.treatments import SAM


def closure_of(network, part, scaler=None, clear=None):
    def closure():
        if clear is not None:
            clear.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
            loss = nn.functional.cross_entropy(network(part.images).double(), part.targets)
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss

    return closure


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"adaptive": True}, {"every": 3, "alpha": 0.4}])
def test_it_makes_the_steps_of_the_training_loop_s_rule(name, options):
    """One implementation, two ways in: and the rule is held against dense rewritings."""
    ours, theirs = net(), net()
    passes = Counted(theirs)
    optimizer = OPTIMIZERS[name](passes.parameters)
    sam = SAM(OPTIMIZERS[name](ours.parameters()), rho=0.2, module=ours, **options)
    step = rule(rho=0.2, **options)
    for number in range(5):
        step([batch(number)], passes)
        optimizer.step()
        optimizer.zero_grad()
        sam.step(closure_of(ours, batch(number)))
    assert all(torch.equal(value, weights(theirs)[key]) for key, value in weights(ours).items())


def test_the_gradient_is_that_of_a_dense_rewriting_whatever_was_in_grad():
    network = net()
    sam = SAM(OPTIMIZERS["sgd"](network.parameters()), rho=0.3)
    network.second.bias.grad = torch.full((3,), 100.0, dtype=torch.float64)
    loss = sam.gradients(closure_of(network, batch(), clear=sam))  # a closure may clear gradients, as torch's do
    expected = sam_gradient(net(), batch(), 0.3)
    assert loss.item() == pytest.approx(expected[0].item())
    found = grads(network)
    assert found.keys() == expected[2].keys()
    assert all(torch.allclose(found[k], v, atol=1e-12) for k, v in expected[2].items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rho_zero_is_the_optimizer_itself_in_one_pass(name):
    ours, theirs = net(dropout=0.5), net(dropout=0.5)
    sam, plain = SAM(OPTIMIZERS[name](ours.parameters()), rho=0), OPTIMIZERS[name](theirs.parameters())
    for optimizer, network in [(sam, ours), (plain, theirs)]:
        torch.manual_seed(3)
        for number in range(4):
            optimizer.zero_grad()
            optimizer.step(closure_of(network, batch(number)))
    assert all(torch.equal(value, weights(theirs)[key]) for key, value in weights(ours).items())


def test_dropout_masks_are_the_same_in_both_passes_and_go_on_as_after_one():
    network = net(dropout=0.5)
    seen = []
    network.dropout.register_forward_hook(lambda module, arguments, output: seen.append(output == 0))
    sam = SAM(OPTIMIZERS["sgd"](network.parameters()), rho=0.1, module=network)
    torch.manual_seed(5)
    sam.step(closure_of(network, batch()))
    after = torch.rand(1)
    assert torch.equal(seen[0], seen[1])
    torch.manual_seed(5)
    network(batch().images)
    assert torch.equal(torch.rand(1), after)


def test_running_statistics_move_once_where_the_module_is_given():
    for given, count in [(True, 1), (False, 2)]:
        network = net()
        SAM(OPTIMIZERS["sgd"](network.parameters()), module=network if given else None).step(
            closure_of(network, batch())
        )
        assert network.norm.num_batches_tracked == count


def test_schedulers_see_the_optimizer_s_groups():
    network = net()
    sam = SAM(torch.optim.SGD(network.parameters(), lr=1.0), rho=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(sam, step_size=1, gamma=0.1)
    sam.step(closure_of(network, batch()))
    scheduler.step()
    assert sam.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    other = torch.optim.lr_scheduler.StepLR(sam.optimizer, step_size=1, gamma=0.5)
    sam.step(closure_of(network, batch()))
    other.step()
    assert sam.param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_group_added_later_is_trained_and_ends_what_is_reused():
    network = net(norm=False)
    sam = SAM(torch.optim.SGD(network.second.parameters(), lr=0.1), rho=0.1, every=5)
    sam.step(closure_of(network, batch()))
    sam.add_param_group({"params": list(network.first.parameters())})
    before = network.first.weight.clone()
    sam.step(closure_of(network, batch()))
    assert not torch.equal(network.first.weight, before)
    assert len(sam.reused.direction) == 4


@pytest.mark.parametrize("every", [1, 3])
def test_saved_and_loaded_it_goes_on_to_the_same_bits(every):
    def start():
        network = net()
        return network, SAM(OPTIMIZERS["adamw"](network.parameters()), rho=0.2, every=every, module=network)

    whole, optimizer = start()
    for number in range(7):
        optimizer.step(closure_of(whole, batch(number)))
    network, optimizer = start()
    for number in range(4):
        optimizer.step(closure_of(network, batch(number)))
    file = io.BytesIO()
    torch.save([network.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    resumed, optimizer = start()
    stored = torch.load(file, weights_only=True)
    resumed.load_state_dict(stored[0])
    optimizer.load_state_dict(stored[1])
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    for number in range(4, 7):
        optimizer.step(closure_of(resumed, batch(number)))
    assert all(torch.equal(value, weights(resumed)[key]) for key, value in weights(whole).items())


def test_a_gradient_scaler_changes_nothing_but_rounding_and_skips_overflows():
    plain, scaled = net(torch.float32), net(torch.float32)
    one, two = (SAM(torch.optim.SGD(n.parameters(), lr=0.1), rho=0.2, module=n) for n in (plain, scaled))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    skipped = 0
    for _ in range(3):
        part = batch(0, dtype=torch.float32)
        one.gradients(closure_of(plain, part))
        nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        one.step()
        while True:
            before = weights(scaled)
            two.gradients(closure_of(scaled, part, scaler))
            scaler.unscale_(two)
            norm = nn.utils.clip_grad_norm_(scaled.parameters(), 0.3)
            scaler.step(two)
            scaler.update()
            if math.isfinite(norm):
                break
            skipped += 1
            after = weights(scaled)
            assert all(torch.equal(before[k], after[k]) for k in before if not k.startswith("norm."))
    assert skipped > 0
    for key, p in plain.named_parameters():
        assert torch.allclose(p, scaled.get_parameter(key), atol=1e-3), key


def test_a_gradient_that_is_not_finite_skips_the_step():
    network = net()
    sam = SAM(OPTIMIZERS["adamw"](network.parameters()), rho=0.2, every=2, module=network)
    before = weights(network)
    part = batch()
    part.images[0] = math.inf
    sam.step(closure_of(network, part))
    assert all(torch.equal(p, before[key]) for key, p in network.named_parameters())
    assert not sam.state
    assert sam.reused.steps == 0


def halves(network):
    def half(part):
        loss = nn.functional.cross_entropy(network(part.images), part.targets) / 2
        loss.backward()
        return loss

    return half


@pytest.mark.parametrize("options", [{}, {"adaptive": True}, {"every": 2, "alpha": 0.4}, {"rho": 0}])
@pytest.mark.parametrize("ascent", ["micro_batch", "batch"])
def test_accumulation_in_both_senses_is_the_rule_s(ascent, options):
    """Several closures: an eps each. One closure that loops: one eps for all."""
    options = {"rho": 0.3, **options}
    ours, theirs = net(), net()
    half, passes = halves(ours), Counted(theirs, accumulate=2)
    optimizer = torch.optim.SGD(passes.parameters, lr=0.1)
    sam = SAM(torch.optim.SGD(ours.parameters(), lr=0.1), module=ours, **options)
    step = rule(**options, ascent=ascent) or PlainStep()
    for number in range(3):
        one, two = batch(number), batch(number + 10)
        losses = step([one, two], passes)
        optimizer.step()
        optimizer.zero_grad()
        if ascent == "micro_batch":
            loss = sam.step(lambda one=one: half(one), lambda two=two: half(two))
        else:
            loss = sam.step(lambda one=one, two=two: half(one) + half(two))
        assert loss.item() == pytest.approx(losses["task"].item(), abs=1e-12)
    assert all(torch.allclose(v, weights(theirs)[k], atol=1e-12) for k, v in weights(ours).items())


def test_micro_batches_with_an_ascent_each_are_not_one_ascent():
    found = []
    for together in (True, False):
        network = net()
        half = halves(network)
        parts = [lambda half=half, n=n: half(batch(n)) for n in range(2)]
        sam = SAM(torch.optim.SGD(network.parameters(), lr=0.1), rho=0.3, module=network)
        sam.gradients(lambda parts=parts: sum(part() for part in parts)) if together else sam.gradients(*parts)
        found.append(network.second.weight.grad)
    assert not torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize("every", [1, 3])
def test_a_copy_goes_on_alone_with_the_module_copied_with_it(every):
    network = net()
    sam = SAM(OPTIMIZERS["adamw"](network.parameters()), rho=0.2, every=every, module=network)
    for number in range(2):
        sam.step(closure_of(network, batch(number)))
    twin = copy.deepcopy(sam)
    assert twin.param_groups is twin.optimizer.param_groups
    assert {id(p) for p in twin.param_groups[0]["params"]} == {id(p) for p in twin.module.parameters()}
    before = weights(network)
    for number in range(2, 5):
        twin.step(closure_of(twin.module, batch(number)))
    assert all(torch.equal(value, weights(network)[key]) for key, value in before.items())
    for number in range(2, 5):
        sam.step(closure_of(network, batch(number)))
    assert all(torch.equal(value, weights(twin.module)[key]) for key, value in weights(network).items())


def test_an_optimizer_that_it_cannot_wrap_is_a_sentence():
    parameters = list(net().parameters())
    sam = SAM(torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(TreatmentError, match=r"already wrapped by SAM; wrap it once\.$"):
        SAM(sam)
    with pytest.raises(TreatmentError, match=r"^LBFGS runs its own passes .* such as AdamW or SGD\.$"):
        SAM(torch.optim.LBFGS(parameters))


@pytest.mark.parametrize(
    "options",
    [{"rho": -1.0}, {"rho": math.nan}, {"rho": math.inf}, {"every": 0}, {"eta": -0.1}, {"eta": math.inf}],
)
def test_mistakes_are_sentences(options):
    with pytest.raises(ValueError, match="must be finite and not negative"):
        SAM(OPTIMIZERS["sgd"](net().parameters()), **options)
