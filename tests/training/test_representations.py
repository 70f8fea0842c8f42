"""The tasks that learn features: dino and contrastive."""

import json
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tests.processes import run_ranks
from tests.rows import drop_timing
from tests.training.test_resume import killed_and_resumed
from vitclinic._core.callback import Callback
from vitclinic._core.distributed import ALONE
from vitclinic._core.errors import VitclinicError
from vitclinic.data import open_data
from vitclinic.data.randomness import IdentityOrder
from vitclinic.tasks import Dino
from vitclinic.tasks.criterion import Moment
from vitclinic.training import Run, build_recipe, load_model, resume, train
from vitclinic.training.plan import plan_run
from vitclinic.training.trainer import Trainer

DIGITS = {"source": "digits", "limit": 200, "augment": {"level": "light", "flip": False}}
DINO = {"name": "dino", "outputs": 32, "hidden": 32, "bottleneck": 16, "local_crops": 2, "momentum": 0.9}
CONTRASTIVE = {"name": "contrastive", "hidden": 32, "projection": 8}
RETRIEVAL = {"name": "retrieval", "instances": 4}
TASKS = {
    "dino": DINO,
    "sinkhorn": {**DINO, "centring": "sinkhorn"},
    "contrastive": CONTRASTIVE,
    "retrieval": RETRIEVAL,
}
SCORES = {"dino": "knn_accuracy", "sinkhorn": "knn_accuracy", "contrastive": "knn_accuracy", "retrieval": "map"}


@pytest.fixture
def make(tiny):
    """Makes a recipe of a task that learns features."""
    return lambda task, **changes: tiny(task=TASKS[task], **{"data": DIGITS, "optimizer": {"lr": 0.002}, **changes})


def trainer_of(plain, steps=20):
    recipe = build_recipe(plain)
    return Trainer(recipe, open_data(recipe.data), steps, ALONE, torch.device("cpu"))


def same_weights(one, other, tolerance=0.0):
    return all((value - other[name]).abs().max() <= tolerance for name, value in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("task", ["contrastive", "retrieval"])
def test_features_get_better_than_those_of_the_untrained_network(make, task):
    """DINO learns too little from digits of 8 pixels; docs/results/representations.md has it on photographs."""
    plain = make(task, steps=150, model={"name": "vit_tiny_fitted", "embed_dim": 48, "depth": 2, "num_heads": 2})
    first = trainer_of(plain)
    before = first.task.evaluate(first.network, first.dataset, "val", ALONE)
    run = train({**plain, "validation": {"every": "50%"}})
    assert run.status["status"] == "finished"
    assert run.results["val"][SCORES[task]] > before[SCORES[task]] + 0.02
    assert run.results["val"]["rank"] > 1.2
    assert "failure" not in run.status
    assert load_model(run.path)(torch.rand(2, 1, 8, 8)).shape == (2, 48)


@pytest.mark.parametrize("task", TASKS)
def test_a_stopped_run_goes_on_to_the_same_bits(make, task, tmp_path):
    class Stop(Callback):
        def on_step(self, trainer):
            if trainer.step == 5:
                raise KeyboardInterrupt

    optimizer = {"lr": 0.002, "weight_decay": 0.04, "weight_decay_end": 0.4}
    plain = make(task, steps=8, checkpoint={"every": "2 steps"}, treatments=[{"sam": {"m": 10}}], optimizer=optimizer)
    whole = train({**plain, "out": str(tmp_path / "whole")})
    with pytest.raises(KeyboardInterrupt):
        train({**plain, "out": str(tmp_path / "cut")}, callbacks=[Stop()])
    cut = resume(tmp_path / "cut")
    assert drop_timing(cut.metrics) == drop_timing(whole.metrics)
    (weights, state), (others, again) = whole.checkpoints.read("last"), cut.checkpoints.read("last")
    assert same_weights(weights, others)
    assert same_weights(state["criterion"], again["criterion"])
    assert whole.results == cut.results


@pytest.mark.slow
@pytest.mark.parametrize("task", ["dino", "contrastive", "retrieval"])
def test_killed(make, task, tmp_path):
    plain = make(task, steps=40, checkpoint={"every": "7 steps"}, workers=1)
    whole = train({**plain, "out": str(tmp_path / "whole")})
    killed = killed_and_resumed(
        lambda **changes: {**plain, **changes}, tmp_path, [random.Random(time.time()).randint(8, 35)], {}
    )
    assert drop_timing(killed.metrics) == drop_timing(whole.metrics)
    assert same_weights(whole.checkpoints.read_model("last"), killed.checkpoints.read_model("last"))
    assert same_weights(whole.checkpoints.read("last")[1]["criterion"], killed.checkpoints.read("last")[1]["criterion"])


@pytest.mark.parametrize("task", ["dino", pytest.param("sinkhorn", marks=pytest.mark.slow), "contrastive", "retrieval"])
def test_two_processes_make_the_steps_of_one_also_with_sam(make, task, tmp_path):
    """Each process climbs on its own 20 images; in one process that is m = 20. timm resamples in float32."""
    plain = make(task, steps=6, precision="fp64", treatments=[{"sam": {"m": 20, "start": 0.5}}])
    alone = train({**plain, "out": str(tmp_path / "alone")})
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({**plain, "out": str(tmp_path / "both")}))
    done = run_ranks("train", "-q", str(file))
    assert done.returncode == 0, done.stderr
    both = Run(tmp_path / "both")
    (weights, state), (others, theirs) = alone.checkpoints.read("last"), both.checkpoints.read("last")
    tolerance = 1e-10 if task in ("contrastive", "retrieval") else 1e-8
    assert same_weights(weights, others, tolerance)
    assert same_weights(state["criterion"], theirs["criterion"], tolerance)
    for ours, row in zip(alone.metrics, both.metrics, strict=True):
        assert row["loss"] == pytest.approx(ours["loss"], abs=10 * tolerance)


@pytest.mark.parametrize("task", TASKS)
def test_micro_batches_make_the_step_of_the_whole_batch(make, task):
    gradients = []
    for parts in (1, 4):
        trainer = trainer_of(
            make(task, precision="fp64", accumulate=parts, clip=None, optimizer={"name": "sgd", "lr": 1})
        )
        before = [p.detach().clone() for p in trainer.parameters]
        row = trainer.advance()
        gradients.append(
            (row["loss"], torch.cat([(a - b).flatten() for a, b in zip(before, trainer.parameters, strict=True)]))
        )
    assert gradients[0][0] == pytest.approx(gradients[1][0], abs=1e-10)
    torch.testing.assert_close(gradients[0][1], gradients[1][1], rtol=1e-7, atol=1e-8)


def test_the_teacher_follows_the_student_and_is_what_a_run_exports(make):
    trainer = trainer_of(make("dino"))
    teacher, student = trainer.criterion.teacher, trainer.network
    assert trainer.evaluation_network is teacher
    start = {name: value.clone() for name, value in teacher.named_parameters()}
    trainer.advance()
    momentum = trainer.task.momentum_at(0)
    for name, value in student.named_parameters():
        torch.testing.assert_close(teacher.get_parameter(name), momentum * start[name] + (1 - momentum) * value)
        assert not teacher.get_parameter(name).requires_grad
    assert not any(p is q for p in trainer.parameters for q in trainer.criterion.teacher.parameters())


def test_the_centre_is_a_moving_average_of_the_teacher_s_outputs(make):
    trainer = trainer_of(make("dino", precision="fp64"))
    batch = trainer._convert(trainer.stream[range(0, 40)])
    with torch.no_grad():
        views = torch.cat([batch.images, batch.crops[0]])
        mean = trainer.criterion.teacher_head(trainer.criterion.teacher(views)).mean(0)
    trainer.advance()
    torch.testing.assert_close(trainer.criterion.centre, 0.1 * mean)


def test_prototypes_stay_while_they_are_frozen(make):
    plain = make("dino")
    trainer = trainer_of({**plain, "task": {**DINO, "freeze_prototypes": 0.5}}, steps=4)
    weight = trainer.criterion.head.prototypes.weight
    seen = []
    for _ in range(4):
        before = torch.nn.functional.normalize(weight.detach(), dim=1)
        trainer.advance()
        seen.append(bool(torch.allclose(before, torch.nn.functional.normalize(weight.detach(), dim=1), atol=1e-6)))
    assert seen == [True, True, False, False]


def test_schedules():
    task = Dino(momentum=0.9, warmup_temperature=0.04, teacher_temperature=0.08, temperature_warmup=0.5)
    assert [round(task.teacher_temperature_at(x), 3) for x in (0, 0.25, 0.5, 0.9)] == [0.04, 0.06, 0.08, 0.08]
    assert [round(task.momentum_at(x), 3) for x in (0, 0.5, 1)] == [0.9, 0.95, 1.0]


def test_the_weight_decay_follows_a_cosine(tiny):
    trainer = trainer_of(tiny(optimizer={"weight_decay": 0.04, "weight_decay_end": 0.4}), steps=4)
    seen = []
    for _ in range(4):
        trainer.advance()
        seen.append([round(group["weight_decay"], 4) for group in trainer.optimizer.param_groups])
    assert seen == [[0.04, 0], [0.0927, 0], [0.22, 0], [0.3473, 0]]


def test_collapse_is_said(make):
    """Without centring, a sharp and fast teacher soon gives every image the same output."""
    said = []

    class Listen(Callback):
        def on_failure(self, sentence):
            said.append(sentence)

    task = {**DINO, "centre_momentum": 1.0, "momentum": 0.0, "teacher_temperature": 0.01, "warmup_temperature": 0.01}
    run = train({**make("dino", steps=60, optimizer={"lr": 0.01}), "task": task}, callbacks=[Listen()])
    assert len(said) == 1
    assert "collapsed" in said[0]
    assert run.status["failure"] == said[0]


def test_views_of_a_sample_do_not_depend_on_its_batch(make):
    stream = trainer_of(make("dino")).stream
    whole, part = stream[range(0, 8)], stream[range(4, 8)]
    assert [tuple(crop.shape[2:]) for crop in whole.crops] == [(8, 8), (4, 4), (4, 4)]
    for one, other in zip((whole.images, *whole.crops), (part.images, *part.crops), strict=True):
        assert torch.equal(one[4:], other)
    assert not torch.equal(whole.images, whole.crops[0])
    assert not torch.equal(whole.crops[1], whole.crops[2])


@pytest.mark.parametrize(
    ("task", "changes", "sentence"),
    [
        ("dino", {"ema": 0.9}, "moving average of its own"),
        ("dino", {"data": {**DIGITS, "augment": "deit"}}, "takes no data.augment.mixup"),
        ("dino", {"data": {**DIGITS, "augment": "none"}}, "draws its own crops"),
        ("dino", {"progressive_resizing": 0.5}, "remove progressive_resizing"),
        ("contrastive", {"treatments": ["adversarial"]}, "perturbs images one by one"),
        ("contrastive", {"treatments": ["patch_diversity"]}, "is for classification"),
        (
            "contrastive",
            {"data": {**DIGITS, "augment": {"level": "light", "smoothing": 0.1}}},
            "data.augment.smoothing",
        ),
        ("contrastive", {"compile": True}, "ompile is not for"),
        ("sinkhorn", {"batch_size": 10}, "task.outputs to 20 or fewer"),
        ("retrieval", {"batch_size": 42}, "not a multiple of task.instances 4"),
        ("retrieval", {"data": {**DIGITS, "group": "camera"}}, "has no column 'camera'"),
        ("contrastive", {"loss": "sigmoid"}, "'loss' is only for"),
    ],
)
def test_what_does_not_fit_is_one_sentence(make, task, changes, sentence):
    with pytest.raises(VitclinicError, match=sentence):
        train(make(task, **changes))


def test_a_network_that_takes_no_small_crops_is_told_how_to_go_on(make):
    with pytest.raises(VitclinicError, match=r"task\.local_crops=0"):
        trainer_of(make("dino", model={"name": "mixer_s16_224", "img_size": 8, "patch_size": 2, "num_blocks": 1}))


def test_the_plan_of_a_run(make):
    plan = plan_run(make("dino"))
    heads = 32 * 32 + 32 + 32 * 32 + 32 + 32 * 16 + 16 + 16 * 32
    assert plan.objective_parameters == heads
    assert plan.passes == pytest.approx(2 + 2 / 3 + 2 / 4)
    assert plan.memory.activations
    others = [plan_run(make(task)) for task in ("contrastive", "retrieval")]
    assert [other.passes for other in others] == [2, 1]
    assert all(other.memory.activations and other.notes == () for other in others)


def test_the_identity_loss_reads_batch_normalized_features(make):
    """By torch's own layers and pytorch-metric-learning's loss and miner."""
    from pytorch_metric_learning.distances import LpDistance
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.miners import BatchHardMiner
    from pytorch_metric_learning.reducers import MeanReducer

    trainer = trainer_of(make("retrieval", precision="fp64", optimizer={"name": "sgd", "lr": 1}, clip=None))
    batch, weight = trainer._convert(trainer.stream[range(40)]), trainer.criterion.classifier.weight
    features = trainer.network(batch.images)
    neck = torch.nn.BatchNorm1d(32, affine=False, dtype=torch.float64)
    identity = torch.nn.functional.cross_entropy(neck(features) @ weight.T, batch.targets)
    distance = LpDistance(normalize_embeddings=False)
    hardest = BatchHardMiner(distance=distance)(features, batch.targets)
    triplet = TripletMarginLoss(0.3, distance=distance, reducer=MeanReducer())(features, batch.targets, hardest)
    parameters = [p for p in trainer.parameters if p is not weight]
    slopes = torch.autograd.grad(identity + triplet, [*parameters, weight])
    start = [p.detach().clone() for p in (*parameters, weight)]
    row, factor = trainer.advance(), trainer.rate(0)
    assert row["losses"] == pytest.approx({"identity": identity.item(), "triplet": triplet.item()}, abs=1e-10)
    decays = {id(p): group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    for parameter, slope, before in zip((*parameters, weight), slopes, start, strict=True):
        expected = before - factor * (slope + decays[id(parameter)] * before)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-9, atol=1e-9)


def test_retrieval_scores_are_those_of_a_search_by_hand(make):
    trainer = trainer_of(make("retrieval", data={"source": "digits", "limit": 60}))
    score = trainer.task.evaluate(trainer.network, trainer.dataset, "val", ALONE)
    val = trainer.dataset.val
    with torch.no_grad():
        pixels = torch.from_numpy(val.read(np.arange(len(val)))).permute(0, 3, 1, 2) / 255
        features = torch.nn.functional.normalize(trainer.network.eval()(pixels), dim=1)
    first = []
    for query in range(len(val)):
        others = [i for i in range(len(val)) if i != query]
        nearest = max(others, key=lambda i: float(features[query] @ features[i]))
        first.append(val.labels[nearest] == val.labels[query])
    assert score["rank1"] == pytest.approx(np.mean(first), abs=1.5 / len(val))
    assert score["count"] == len(val)


def test_a_batch_has_k_images_of_each_identity_and_each_sample_its_own_numbers():
    labels = np.array([0] * 7 + [1] * 3 + [2] * 9)
    order = IdentityOrder(labels, seed=1, instances=4)
    assert order.count == 8 + 4 + 12
    images, showings = order(np.arange(3 * order.count))
    assert all(len(set(labels[group])) == 1 for group in images.reshape(-1, 4))
    assert len(set(zip(images.tolist(), showings.tolist(), strict=True))) == len(images)
    assert set(images[: order.count]) == set(range(19))  # nobody is left out
    again, _ = IdentityOrder(labels, seed=1, instances=4)(np.arange(30, 40))
    assert np.array_equal(again, images[30:40])


def test_options_are_refused_without_torch():
    code = (
        "import sys\nfrom vitclinic.tasks import parse_task\n"
        "try: parse_task({'name': 'dino', 'momentun': 1})\nexcept Exception as e: print(e)\n"
        "print('torch' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=True
    ).stdout
    assert "momentum" in told
    assert told.strip().endswith("False")


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["backbone", "blocks.0"])
def test_two_processes_keep_what_is_frozen(tiny, frozen, tmp_path):
    plain = tiny(freeze=[frozen], precision="fp64", model={**tiny()["model"], "depth": 2}, steps=3)
    alone = train({**plain, "out": str(tmp_path / "alone")})
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({**plain, "out": str(tmp_path / "both")}))
    done = run_ranks("train", "-q", str(file))
    assert done.returncode == 0, done.stderr
    one, two = (run.checkpoints.read_model("last") for run in (alone, Run(tmp_path / "both")))
    assert same_weights(one, two, 1e-10)
    start = trainer_of(plain).network.state_dict()
    changed = {name for name, value in two.items() if not torch.equal(value, start[name])}
    assert changed
    assert all("head" in name if frozen == "backbone" else f"{frozen}." not in name for name in changed)


def test_reranked_scores_are_those_of_the_ranking(make):
    plain = make("retrieval", data={"source": "digits", "limit": 60})
    scores = []
    for rerank in (False, True):
        trainer = trainer_of({**plain, "task": {**RETRIEVAL, "rerank": rerank}})
        scores.append(trainer.task.evaluate(trainer.network, trainer.dataset, "val", ALONE))
    assert scores[0]["map"] != scores[1]["map"]
    assert all(score["rank1"] <= score["rank5"] <= score["rank10"] <= 1 for score in scores)


def test_moments():
    assert Moment(5, 20).progress == 0.25
