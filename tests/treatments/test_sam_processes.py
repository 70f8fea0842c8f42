"""SAM and adversarial training in two real gloo processes."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.processes import in_two_processes
from tests.treatments.passes import Counted, batch, grads, net, sam_gradient
from vitclinic._core.distributed import Distributed
from vitclinic.data import Batch, open_data
from vitclinic.training import build_recipe
from vitclinic.training.checkpoint import Checkpoints
from vitclinic.training.passes import InputAscentStep
from vitclinic.training.trainer import Trainer
from vitclinic.treatments import SAM, FastGradientSign, parse_treatments


def rule(**options):
    (treatment,) = parse_treatments([{"sam": options}])
    return treatment.step_rule()


class Quadratic(nn.Module):
    """The mean over images of |w - x|^2 / 2: its gradient is w minus the images' mean."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, part: Batch) -> dict[str, Tensor]:
        return {"task": (self.w - part.images.flatten(1)).square().sum(1).mean() / 2}


def points(*rows: tuple[float, float]) -> Batch:
    images = torch.tensor(rows, dtype=torch.float64)[:, None, None, :]
    places = torch.arange(len(rows))
    return Batch(images, places, places, places)


SHARDS = [points((2.0, 4.0), (4.0, 4.0)), points((0.0, -2.0), (0.0, -2.0))]


class OfTask(Counted):
    """Passes of a module that is its own task, synchronised by DDP."""

    def __init__(self, task: nn.Module) -> None:
        super().__init__(task, ddp=DistributedDataParallel(task))
        self.module = self.alone = task
        self.wrapped = self.ddp
        self.parameters = list(task.parameters())


def small_things(rank: int) -> dict[str, Tensor]:
    """Everything that needs two processes and no data, in one start of them."""
    found = {}
    task = Quadratic()
    passes = OfTask(task)
    rule(rho=0.5)([SHARDS[rank]], passes)
    found["shards"] = task.w.grad.clone()

    # One process alone sees a gradient that is not finite.
    task.w.grad = None
    bad = points((math.inf, 0.0)) if rank == 1 else SHARDS[0]
    look = rule(rho=0.5, every=2)
    look([bad], passes)
    found["bad"], found["bad w"], found["bad steps"] = task.w.grad.clone(), task.w.detach().clone(), look.reused.steps

    # LookSAM: what is reused is the same in both, made from the mean of both first gradients.
    task.w.grad = None
    look([SHARDS[rank]], passes)
    found["direction"] = look.reused.direction[0]

    network = net(unused=False)
    wrapped = DistributedDataParallel(network)
    sam = SAM(torch.optim.SGD(network.parameters(), lr=0.1), rho=0.3, every=2, module=wrapped)

    def closure():
        part = batch(rank)
        loss = nn.functional.cross_entropy(wrapped(part.images), part.targets)
        loss.backward()
        return loss

    sam.step(closure)
    found.update({f"wrapper {name}": g for name, g in grads(network).items()})
    found["wrapper direction"] = torch.cat([v.flatten() for v in sam.reused.direction])

    task = Images()
    passes = OfTask(task)
    InputAscentStep(FastGradientSign(0.1, 0.125))([batch(rank), batch(rank + 2)], passes)
    found["adversarial"] = task.second.weight.grad.clone()

    # The next step hands out the leading process's running statistics: what differed is the same in both again.
    task.norm.running_mean.fill_(float(rank))
    InputAscentStep(FastGradientSign(0.1, 0.125))([batch(5), batch(6)], passes)
    found["statistics"] = task.norm.running_mean.clone()

    sam = SAM(torch.optim.SGD(network.parameters(), lr=0.1), rho=0.3, module=wrapped)
    network.load_state_dict(net(unused=False).state_dict())
    parts = [partial(passed, wrapped, number) for number in (rank, rank + 2)]
    sam.gradients(*parts)
    found.update({f"micro-batches {name}": g for name, g in grads(network).items()})
    return found


def passed(wrapped: nn.Module, number: int) -> Tensor:
    part = batch(number)
    loss = nn.functional.cross_entropy(wrapped(part.images), part.targets) / 2
    loss.backward()
    return loss


class Images(type(net())):
    """The small network as its own task."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(unused=False)
        self.double()

    def forward(self, part: Batch) -> dict[str, Tensor]:
        return {"task": nn.functional.cross_entropy(super().forward(part.images), part.targets)}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return in_two_processes(small_things, tmp_path_factory.mktemp("processes"))


def test_each_process_climbs_on_its_own_shard(both):
    """By hand: g = -(3, 4) of length 5 and (0, 2) of length 2, so that rho = 0.5 makes them 1.1 and 1.25 times as long.

    The mean is (-1.65, -0.95); one ascent for both would give (-1.916, -1.277).
    """
    for found in both:
        assert torch.allclose(found["shards"], torch.tensor([-1.65, -0.95], dtype=torch.float64), atol=1e-14)


def test_a_gradient_that_is_not_finite_in_one_process_is_so_in_both(both):
    for found in both:
        assert not found["bad"].isfinite().any()
        assert torch.equal(found["bad w"], torch.zeros(2, dtype=torch.float64))
        assert found["bad steps"] == 0


def test_looksam_reuses_one_vector_in_all_processes(both):
    """Second gradient (-1.65, -0.95), first gradient (-1.5, -1): what is left at right angles to the first."""
    second, first = torch.tensor([-1.65, -0.95]).double(), torch.tensor([-1.5, -1.0]).double()
    left = second - second @ first / (first @ first) * first
    for found in both:
        assert torch.allclose(found["direction"], left / left.norm(), atol=1e-12)


def test_the_wrapper_synchronises_the_second_gradient_only(both):
    one, two = (sam_gradient(net(unused=False), batch(n), 0.3) for n in (0, 1))
    for found in both:
        for name in one[2]:
            assert torch.allclose(found[f"wrapper {name}"], (one[2][name] + two[2][name]) / 2, atol=1e-12), name
    assert torch.equal(both[0]["wrapper direction"], both[1]["wrapper direction"])


def test_the_wrapper_s_micro_batches_climb_apart_and_are_synchronised_at_the_end(both):
    seconds = [sam_gradient(net(unused=False), batch(n), 0.3)[2] for n in range(4)]
    for found in both:
        for name in seconds[0]:
            expected = sum(second[name] for second in seconds) / 4
            assert torch.allclose(found[f"micro-batches {name}"], expected, atol=1e-12), name


def test_adversarial_training_hands_out_the_leading_process_s_statistics(both):
    assert torch.equal(both[0]["statistics"], both[1]["statistics"])


def test_adversarial_training_synchronises_once(both):
    task = Images()
    InputAscentStep(FastGradientSign(0.1, 0.125))([batch(n) for n in range(4)], Counted(task_of(task), accumulate=4))
    for found in both:
        assert torch.allclose(found["adversarial"] / 2, task.second.weight.grad, atol=1e-12)


def task_of(module):
    from vitclinic.training.network import Learner

    class Own(Learner):
        def __init__(self):
            nn.Module.__init__(self)
            self.inner = module

        def forward(self, part):
            return self.inner(part)

    return Own()


HARD = {
    "model": {"name": "resnet18", "channels": [4, 4, 8, 8]},
    "data": {"source": "digits", "limit": 200, "augment": "light"},
    "treatments": [{"sam": {"rho": 0.05, "every": 2}}],
    "optimizer": {"lr": 0.005},
    "batch_size": 40,
    "accumulate": 2,
    "clip": 0.5,
    "precision": "fp16",
    "steps": 8,
}


def straight_and_resumed(rank: int, folder: str) -> dict[str, Tensor]:
    def trainer() -> Trainer:
        recipe = build_recipe(HARD)
        return Trainer(recipe, open_data(recipe.data), 8, Distributed(rank, 2), torch.device("cpu"))

    straight = trainer()
    overflows(straight)
    norms = [straight.advance()["grad_norm"] for _ in range(8)]
    first = trainer()
    overflows(first)
    for _ in range(5):
        first.advance()
    checkpoints = Checkpoints(Path(folder) / "checkpoints")
    if rank == 0:
        checkpoints.save(["last"], first.evaluation_network.state_dict(), first.state_dict())
    dist.barrier()
    second = trainer()
    second.load_state_dict(*checkpoints.read("last"))
    for _ in range(3):
        second.advance()
    state = {"scale": straight.scaler.get_scale(), "norms": torch.tensor(norms)}
    for name, one in [("straight", straight), ("resumed", second)]:
        state.update({f"{name} {key}": value for key, value in one.network.state_dict().items()})
        for number, vector in enumerate(one.rules.own.state_dict()["direction"]):
            state[f"{name} direction {number}"] = vector
        state[f"{name} scale"] = torch.tensor(one.scaler.get_scale())
    return state


def overflows(trainer: Trainer) -> None:
    """A first loss scale that is too high: the first steps are skipped."""
    trainer.scaler = trainer.passes.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)


@pytest.mark.slow
def test_accumulation_fp16_batchnorm_clipping_and_two_processes_resume_to_the_same_bits(tmp_path):
    open_data(build_recipe(HARD).data)  # decoded once, before two processes ask for it
    both = in_two_processes(straight_and_resumed, tmp_path, str(tmp_path))
    for rank, found in enumerate(both):
        pairs = [(key, "resumed" + key.removeprefix("straight")) for key in found if key.startswith("straight")]
        assert len(pairs) > 60
        for one, other in pairs:
            own = "running" in one or "tracked" in one
            if rank == 0 or not own:  # running statistics are the leading process's
                assert torch.equal(found[one], found[other]), one
    weights = [key for key in both[0] if key.startswith("straight") and "running" not in key]
    assert all(torch.equal(both[0][key], both[1][key]) for key in weights)
    assert not both[0]["norms"][0].isfinite(), "the scale should have been too high at first"
    assert both[0]["norms"][-1].isfinite()
