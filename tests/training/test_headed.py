"""A task with a head of its own on the backbone, and images that come with masks: the loop knows it as any other."""

import pytest
import torch
from torch import nn

from tests.rows import drop_timing
from vitclinic._core.callback import Callback
from vitclinic._core.errors import RecipeError
from vitclinic.anatomy import Anatomy
from vitclinic.data import open_data
from vitclinic.models import Headed
from vitclinic.tasks import Metric, Task, register
from vitclinic.tasks.task import TASKS
from vitclinic.training import build_recipe, load_model, plan_run, resume, train
from vitclinic.training.init import read_initial_weights
from vitclinic.training.layer_decay import freeze_units, rate_scales
from vitclinic.training.network import build_network


class Painter(Headed):
    """Class scores of each pixel: of its colours, and the same for all pixels by the backbone's features."""

    def __init__(self, backbone, features, classes):
        super().__init__(backbone)
        self.pixels, self.image = nn.Conv2d(3, classes, 1), nn.Linear(features, classes)

    def forward(self, images):
        return self.pixels(images) + self.image(self.backbone(images))[:, :, None, None]


class Painting(Task):
    """Predict the class of each pixel."""

    name = "painting"
    title = "painting"
    metrics = (Metric("error"),)
    selects = "error"
    higher_is_better = False
    loss_metric = "error"
    target = "mask"
    default_source = "scenes:12"

    def num_outputs(self, spec):
        return 0

    def attach(self, backbone, spec):
        return Painter(backbone, backbone.num_features, spec.num_classes)

    def losses(self, outputs, batch):
        return {"task": nn.functional.cross_entropy(outputs, batch.annotations.masks.long())}

    def measure(self, outputs, batch):
        loss = self.losses(outputs.double(), batch)["task"] * len(batch)
        return torch.stack([torch.tensor(float(len(batch))).double(), loss])

    def summarize(self, sums):
        count, error = sums
        return {"error": error / count, "count": int(count)}


MODEL = {"name": "vit_tiny_patch16_224", "depth": 2, "embed_dim": 16, "num_heads": 2}


@pytest.fixture
def recipe(monkeypatch, tmp_path):
    monkeypatch.setattr(TASKS, "_known", dict(TASKS._known))
    register(Painting)
    base = {"task": "painting", "model": MODEL, "batch_size": 4, "steps": 6, "checkpoint": "2 steps", "device": "cpu"}
    return lambda **keys: {**base, "out": str(tmp_path / "run"), "workers": 0, **keys}


def test_the_task_says_where_its_data_is_from_and_what_images_come_with(recipe):
    data = build_recipe(recipe()).data
    assert (data.source, data.target) == ("scenes:12", "mask")
    assert build_recipe(recipe(data={"source": "scenes:20", "limit": 15})).data.target == "mask"
    assert build_recipe(build_recipe(recipe()), epochs=2).data.source == "scenes:12"
    with pytest.raises(RecipeError, match=r"task painting learns from a data.target of mask, not objects: remove it"):
        build_recipe(recipe(data={"source": "scenes", "target": "objects"}))
    with pytest.raises(RecipeError, match=r"task classification learns from a data.target of class, not mask"):
        build_recipe({"data": {"source": "scenes", "target": "mask"}})


@pytest.mark.parametrize("treatments", [[], ["sam", "context_broadcasting"]])
def test_it_trains_resumes_and_loads_with_its_head(recipe, tmp_path, treatments):
    class Stop(Callback):
        def on_step(self, trainer):
            if trainer.step == 4:
                raise KeyboardInterrupt

    keys = {"treatments": treatments, "ema": 0.9}
    whole = train(recipe(**keys))
    with pytest.raises(KeyboardInterrupt):
        train(recipe(**keys, out=str(tmp_path / "cut")), callbacks=[Stop()])
    cut = resume(tmp_path / "cut")
    assert drop_timing(cut.metrics) == drop_timing(whole.metrics)
    assert cut.results == whole.results
    network = load_model(whole.path)
    images = torch.rand(2, 3, 64, 64)
    assert network(images).shape == (2, 7, 64, 64)
    assert network.classes[0] == "background"
    assert torch.equal(network(images), load_model(cut.path)(images))
    assert isinstance(network.backbone, Headed)
    assert network.trunk is network.backbone.backbone


def test_the_anatomy_is_that_of_the_backbone_and_rates_know_the_head(recipe):
    built = build_recipe(recipe(layer_decay=0.5, freeze=["backbone"]))
    run = train(recipe(steps=1))
    network = load_model(run.path)
    assert [block.name for block in Anatomy.of(network, torch.rand(1, 3, 64, 64)).blocks] == ["blocks.0", "blocks.1"]
    scales = rate_scales(built, network, run.spec)
    assert id(network.backbone.image.weight) not in scales
    assert scales[id(network.trunk.cls_token)] < 1
    network.train()
    freeze_units(built, network, run.spec)
    learning = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert learning == {f"backbone.{part}.{kind}" for part in ("pixels", "image") for kind in ("weight", "bias")}


def test_it_is_planned_without_its_data(recipe):
    plan = plan_run(recipe())
    assert plan.classes == 7
    assert plan.network == "VisionTransformer"
    assert plan.memory.activations > 0


def test_initial_weights_of_a_run_say_which_parts_of_its_head_are_left_out(recipe):
    run = train(recipe(steps=1, test=False))
    second = build_recipe(recipe(init=str(run.path)))
    init = read_initial_weights(second)
    _, loaded = build_network(second, open_data(second.data), init)
    assert f"left out of {run.path}, as its task's head: image, pixels" in loaded.notices
    assert not loaded.found.unused
