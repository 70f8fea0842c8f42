import json

import pytest
import torch

from vitclinic._core.callback import Callback
from vitclinic._core.errors import RunError
from vitclinic.training import resume, train


class Poison(Callback):
    """Makes the weights NaN after a step, as a real divergence would."""

    def __init__(self, step):
        self.step = step

    def on_step(self, trainer):
        if trainer.step == self.step:
            with torch.no_grad():
                next(trainer.network.parameters()).fill_(float("nan"))


def test_a_divergence_is_a_result_and_keeps_the_last_good_checkpoint(tiny):
    run = train(tiny(steps=20, validation={"every": 100}), callbacks=[Poison(12)])
    assert run.status["status"] == "diverged"
    assert run.status["step"] == 13
    assert "step 13" in run.status["reason"]
    model, state = run.checkpoints.read("last")
    assert state["step"] == 10
    assert all(torch.isfinite(value).all() for value in model.values())
    assert run.metrics[-1]["step"] == 13
    assert run.metrics[-1]["kind"] == "train"
    with pytest.raises(RunError, match="diverged"):
        resume(run.path)


@pytest.mark.parametrize("words", [{}, {"validation": {"every": "1 steps"}}, {"logging": {"every": 7}}])
def test_weights_that_exploded_just_before_a_checkpoint_do_not_replace_good_ones(tiny, words):
    """The step's loss is that of the weights before it: a checkpoint right after it is checked by what comes next."""
    run = train(
        tiny(steps=20, checkpoint={"every": "1 steps"}, validation={"every": 100}, **words)
        if "validation" not in words
        else tiny(steps=20, checkpoint={"every": "1 steps"}, **words),
        callbacks=[Poison(12)],
    )
    assert run.status["status"] == "diverged"
    for name in run.checkpoints.names():
        model, state = run.checkpoints.read(name)
        assert state["step"] <= 12
        if name in ("last", "best"):
            assert all(torch.isfinite(value).all() for value in model.values()), name


def test_a_learning_rate_that_is_far_too_high_diverges(tiny):
    run = train(tiny(steps=60, optimizer={"name": "sgd", "lr": 1e4}, schedule="constant", clip=None))
    assert run.status["status"] == "diverged"


def test_metrics_of_a_divergence_are_strict_json(tiny):
    run = train(tiny(steps=20), callbacks=[Poison(2)])
    for line in (run.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
