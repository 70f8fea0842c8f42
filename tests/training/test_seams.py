"""The seams through which treatments change a run, with treatments made here."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from vitclinic._core.callback import Callback
from vitclinic._core.errors import RecipeError
from vitclinic.training import load_model, resume, train
from vitclinic.treatments import Objective, Treatment, register
from vitclinic.treatments.treatment import TREATMENTS


class Scaled(nn.Module):
    def __init__(self, inner, factor):
        super().__init__()
        self.inner, self.factor = inner, nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        return self.inner(x) * self.factor


class HeadPenalty(Objective):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, batch, logits):
        return self.weight.square() * logits.square().mean()


class Twice:
    """A step rule that counts its steps and doubles the gradient by calling twice."""

    def __init__(self):
        self.steps = torch.zeros(1)

    def __call__(self, batches, losses_and_gradients):
        self.steps += 1
        for batch in batches:
            losses = losses_and_gradients(batch)
            again = losses_and_gradients(batch)
            assert torch.equal(losses["task"], again["task"])  # the same dropout masks in both passes
        return losses

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


@pytest.fixture(autouse=True)
def treatments():
    before = dict(TREATMENTS._known)

    @register
    class Scale(Treatment):
        name: ClassVar[str] = "scale"
        factor: float = 2.0

        def operate(self, network, spec):
            network.head = Scaled(network.head, self.factor)
            return network

    @register
    class Penalty(Treatment):
        name: ClassVar[str] = "penalty"

        def objectives(self, network, spec):
            return {"penalty": HeadPenalty(0.5)}

    @register
    class Dim(Treatment):
        name: ClassVar[str] = "dim"

        def batch_transform(self, network, spec):
            from dataclasses import replace

            return lambda batch: replace(batch, images=batch.images * 0.5)

    @register
    class Double(Treatment):
        name: ClassVar[str] = "double"

        def step_rule(self):
            return Twice()

    @register
    class Other(Double):
        name: ClassVar[str] = "other"

    yield
    TREATMENTS._known.clear()
    TREATMENTS._known.update(before)


ALL = [{"scale": {"factor": 3.0}}, "penalty", "dim", "double"]


def test_all_seams_in_one_run(tiny):
    run = train(tiny(treatments=ALL))
    row = run.metrics[0]
    assert set(row["losses"]) == {"task", "penalty"}
    assert row["loss"] == pytest.approx(sum(row["losses"].values()))
    model, state = run.checkpoints.read("last")
    assert "backbone.head.factor" in model
    assert not any("penalty" in name for name in model)  # an objective's parameters are not exported
    assert state["objectives"]["penalty.weight"] != 0.5  # but trained
    assert state["rule"]["steps"] == 6


def test_a_treated_network_loads_back(tiny):
    run = train(tiny(treatments=ALL))
    assert isinstance(load_model(run.path).backbone.head, Scaled)


def test_a_treated_run_resumes_exactly(tiny, tmp_path):
    class Stop(Callback):
        def on_step(self, trainer):
            if trainer.step == 8:
                raise RuntimeError("power cut")

    model = {**tiny()["model"], "drop_path_rate": 0.5, "proj_drop_rate": 0.3}
    plain = tiny(treatments=ALL, steps=12, model=model, checkpoint="3 steps")
    whole = train({**plain, "out": str(tmp_path / "whole")})
    with pytest.raises(RuntimeError):
        train(plain, callbacks=[Stop()])
    resumed = resume(plain["out"])
    for name, value in whole.checkpoints.read_model("last").items():
        assert torch.equal(value, resumed.checkpoints.read_model("last")[name]), name
    assert resumed.checkpoints.read("last")[1]["rule"]["steps"] == 12


def test_at_most_one_step_rule(tiny):
    with pytest.raises(RecipeError, match="At most one"):
        train(tiny(treatments=["double", "other"]))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["scal"], "Did you mean 'scale'"),
        ([{"scale": {"facto": 1}}], r"'treatments.scale.facto'. Did you mean 'factor'"),
        (["dim", "dim"], "listed twice"),
        ([{"scale": {}, "dim": {}}], "write a name or"),
    ],
)
def test_mistakes_in_treatments_are_found_before_the_data_is_read(tiny, entries, message):
    with pytest.raises(RecipeError, match=message):
        train(tiny(treatments=entries, data="/nowhere"))
