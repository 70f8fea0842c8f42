"""The task vqa: one question an image in training, all of them in validation, and runs that stop, resume and divide."""

import json
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.processes import run_ranks
from tests.rows import drop_timing
from tests.training.test_resume import killed_and_resumed
from vitclinic._core.callback import Callback
from vitclinic._core.distributed import ALONE
from vitclinic._core.errors import VitclinicError
from vitclinic.data import evaluation_batches, open_data
from vitclinic.tasks import Vqa
from vitclinic.tasks.vqa_accuracy import find_kind, score_answer
from vitclinic.training import Run, build_recipe, load_model, resume, train
from vitclinic.training.plan import plan_run
from vitclinic.training.trainer import Trainer

PLAIN = {
    "task": "vqa",
    "model": {"name": "vit_tiny_fitted", "patch_size": 16, "embed_dim": 24, "depth": 2, "num_heads": 2},
    "data": {"source": "scenes:48"},
    "optimizer": {"lr": 0.002},
    "batch_size": 8,
    "steps": 6,
}


@pytest.fixture
def make(tmp_path):
    return lambda **changes: {**PLAIN, "out": str(tmp_path / "run"), **changes}


def trainer_of(plain, steps=6):
    recipe = build_recipe(plain)
    return Trainer(recipe, open_data(recipe.data), steps, ALONE, torch.device("cpu"))


def same_weights(one, other, tolerance=0.0):
    return all((value - other[name]).abs().max() <= tolerance for name, value in one.items())


def test_a_run_has_its_words_and_answers(make):
    run = train(make(ema=0.9))
    assert run.status["status"] == "finished"
    assert {"accuracy", "accuracy_yes_no"} <= run.results["test"].keys()
    network = load_model(run.path)
    dataset = open_data(run.recipe.data)
    assert network.backbone.text == dataset.text
    assert network.classes == dataset.classes
    score = run.recipe.task.evaluate(network, dataset, "test", ALONE)
    assert {key: run.results["test"][key] for key in score} == score
    scores = network(Image.new("RGB", (80, 64)), ["is there a star"])
    assert scores.shape == (1, len(dataset.classes))


def test_scores_are_those_of_one_question_after_another(make):
    trainer = trainer_of(make())
    score = trainer.task.evaluate(trainer.network, trainer.dataset, "val", ALONE)
    network, answers = trainer.network.eval(), trainer.dataset.classes
    right = {"yes_no": [], "number": [], "other": []}
    for batch in evaluation_batches(trainer.dataset, "val", 1):
        for question in batch.annotations.questions[0]:
            best = int(network(batch.images, [question.text]).argmax())
            right[find_kind(question.answers)].append(score_answer(answers[best], question.answers))
    everything = [value for values in right.values() for value in values]
    assert score["questions"] == len(everything)
    assert score["count"] == len(trainer.dataset.val)
    assert score["accuracy"] == pytest.approx(np.mean(everything))
    for kind, values in right.items():
        assert score[f"accuracy_{kind}"] == pytest.approx(np.mean(values))
        assert score[f"count_{kind}"] == len(values)
    assert score["accuracy_low"] <= score["accuracy"] <= score["accuracy_high"]


def test_a_sample_s_question_does_not_depend_on_its_batch(make):
    stream = trainer_of(make()).stream
    whole = stream[range(0, 96)]
    parts = [stream[range(start, start + 5)] for start in range(0, 90, 5)]
    asked = [found for part in parts for found in part.annotations.questions]
    assert list(whole.annotations.questions[:90]) == asked
    assert torch.equal(whole.targets[:90], torch.cat([part.targets for part in parts]))
    first, second = (stream[range(start, start + 48)] for start in (0, 48))
    by_image = [dict(zip(b.indices.tolist(), b.annotations.questions, strict=True)) for b in (first, second)]
    assert sum(by_image[0][image] != by_image[1][image] for image in range(48)) > 20  # another question each time


def test_several_questions_of_an_image_are_all_asked_before_one_comes_again(make):
    trainer = trainer_of(make(task={"name": "vqa", "questions": 20}))
    among = trainer.dataset.train.annotate(np.arange(len(trainer.dataset.train)))
    batch = trainer.stream[range(0, 8)]
    for image, asked in zip(batch.indices.tolist(), batch.annotations.questions, strict=True):
        everything = among[image].questions
        assert len(asked) == 20
        assert sorted(q.text for q in asked[: len(everything)]) == sorted(q.text for q in everything)


def test_several_questions_are_the_mean_of_each_alone(make):
    trainer = trainer_of(make(task={"name": "vqa", "questions": 3}, precision="fp64"))
    batch = trainer._convert(trainer.stream[range(0, 4)])
    together = trainer.criterion(trainer.network, batch)[1]["task"]
    answers, losses = trainer.dataset.classes, []
    for row, asked in enumerate(batch.annotations.questions):
        for question in asked:
            scores = trainer.network(batch.images[row : row + 1], [question.text])[0]
            signs = torch.tensor([1 if answer in question.answers else -1 for answer in answers])
            losses.append(-torch.nn.functional.logsigmoid(signs * scores).sum())
    assert len(losses) == 12
    torch.testing.assert_close(together, torch.stack(losses).mean())


def test_a_plan_counts_the_memory_of_all_questions(make):
    one, four = (plan_run(make(task={"name": "vqa", "questions": count})).memory.activations for count in (1, 4))
    assert one < four < 4 * one  # the patches are made once


@pytest.mark.parametrize("loss", ["sigmoid", "softmax"])
def test_the_loss_is_the_formula(make, loss):
    trainer = trainer_of(make(task={"name": "vqa", "loss": loss}, precision="fp64"))
    batch = trainer._convert(trainer.stream[range(0, 4)])
    _, losses = trainer.criterion(trainer.network, batch)
    expected = []
    for row in range(4):
        (question,) = batch.annotations.questions[row]
        scores = trainer.network(batch.images[row : row + 1], [question.text])[0]
        truth = trainer.dataset.classes.index(question.answers[0])
        if loss == "softmax":
            expected.append(-scores.log_softmax(0)[truth])
        else:
            signs = torch.full_like(scores, -1)
            signs[truth] = 1
            expected.append(-torch.nn.functional.logsigmoid(signs * scores).sum())
    torch.testing.assert_close(losses["task"], torch.stack(expected).mean())


@pytest.mark.parametrize(
    "treatment",
    ["sam", "conv_stem", {"context_broadcasting": {"scaled": True, "tokens": "text"}}, "context_broadcasting"],
    ids=str,
)
def test_treatments_make_two_steps_in_mixed_precision(make, treatment):
    trainer = trainer_of(make(treatments=[treatment], precision="bf16"))
    before = {name: value.clone() for name, value in trainer.network.state_dict().items()}
    rows = [trainer.advance(), trainer.advance()]
    assert all(np.isfinite(row["loss"]) for row in rows)
    changed = [name for name, value in trainer.network.state_dict().items() if not torch.equal(value, before[name])]
    assert any("words" in name for name in changed)
    assert any("blocks.0.attn" in name for name in changed)


def test_half_precision_learns_once_its_scale_is_found(make):
    trainer = trainer_of(make(precision="fp16"), steps=16)
    before = trainer.network.backbone.kinds.detach().clone()
    while trainer.step < 16 and torch.equal(trainer.network.backbone.kinds, before):
        assert np.isfinite(trainer.advance()["loss"])
    assert not torch.equal(trainer.network.backbone.kinds, before)


def test_micro_batches_make_the_step_of_the_whole_batch(make):
    steps = []
    for parts in (1, 4):
        sgd, task = {"name": "sgd", "lr": 1.0}, {"name": "vqa", "questions": 2}
        trainer = trainer_of(make(task=task, precision="fp64", accumulate=parts, clip=None, optimizer=sgd))
        trainer.advance()
        steps.append(trainer.network.state_dict())
    assert same_weights(*steps, 1e-10)


def test_a_stopped_run_goes_on_to_the_same_bits(make, tmp_path):
    class Stop(Callback):
        def on_step(self, trainer):
            if trainer.step == 3:
                raise KeyboardInterrupt

    plain = make(checkpoint={"every": "1 steps"}, ema=0.9)
    whole = train({**plain, "out": str(tmp_path / "whole")})
    with pytest.raises(KeyboardInterrupt):
        train({**plain, "out": str(tmp_path / "stopped")}, callbacks=[Stop()])
    stopped = resume(tmp_path / "stopped")
    assert drop_timing(stopped.metrics) == drop_timing(whole.metrics)
    assert same_weights(whole.checkpoints.read_model("last"), stopped.checkpoints.read_model("last"))


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(make, tmp_path):
    plain = make(steps=40, checkpoint={"every": "7 steps"}, validation={"every": "50%"}, treatments=["sam"], workers=1)
    whole = train({**plain, "out": str(tmp_path / "whole")})
    step = random.Random(time.time()).randint(8, 35)
    killed = killed_and_resumed(lambda **changes: {**plain, **changes}, tmp_path, [step], {})
    assert drop_timing(killed.metrics) == drop_timing(whole.metrics)
    assert same_weights(whole.checkpoints.read_model("last"), killed.checkpoints.read_model("last"))


@pytest.mark.slow
def test_two_processes_make_the_steps_of_one(make, tmp_path):
    plain = make(precision="fp64", treatments=[{"context_broadcasting": {"scaled": True, "tokens": "image"}}])
    alone = train({**plain, "out": str(tmp_path / "alone")})
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({**plain, "out": str(tmp_path / "both")}))
    done = run_ranks("train", "-q", str(file))
    assert done.returncode == 0, done.stderr
    both = Run(tmp_path / "both")
    assert same_weights(alone.checkpoints.read_model("last"), both.checkpoints.read_model("last"), 1e-10)
    for ours, theirs in zip(alone.metrics, both.metrics, strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-9)


def test_what_cannot_be_answered_or_read_is_said(make, tmp_path):
    for number in range(2):
        Image.fromarray(np.full((16, 16, 3), 90 * number, np.uint8)).save(tmp_path / f"{number}.png")
    row = {"image": "0.png", "question": "is it red", "answer": "yes"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    other = {"image": "1.png", "question": "is it now or ever red", "answer": "teal"}
    (tmp_path / "test.jsonl").write_text(json.dumps(other))
    dataset = replace(open_data(build_recipe(make(data={"source": str(tmp_path), "held_out": 0})).data))
    notices = Vqa().notices(dataset)
    assert notices == [
        "1 of 1 test questions have no answer among the 1 of the training questions: they count, as wrong",
        "1 test questions are longer than 3 words, and are cut",
    ]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": "digits"}, "come with class labels, not with questions"),
        ({"data": {"source": "scenes:48", "augment": "deit"}}, "he task vqa takes no data.augment.randaugment"),
        ({"progressive_resizing": {"start": 0.5}}, "reads images at one size"),
        ({"compile": True}, "ompile is not for the task vqa"),
        ({"treatments": ["gap_head"]}, "changes how patches are pooled"),
        ({"treatments": ["patch_diversity"]}, "is for classification or segmentation, not for the task vqa"),
        ({"model": "resnet18"}, "choose a ViT"),
        ({"treatments": [{"local_attention": {"kernel": 3}}]}, "remove the treatment that counts on patches alone"),
        ({"task": "classification", "data": "digits", "treatments": [{"context_broadcasting": {"tokens": "text"}}]},
         "context_broadcasting with these options is for vqa, not for the task classification"),
        ({"loss": "sigmoid"}, "'loss' is only for the task classification"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence(make, changes, sentence):
    with pytest.raises(VitclinicError) as error:
        trainer_of(make(**changes))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value).strip()


def test_mirrored_questions_of_left_and_right_are_refused(make, tmp_path):
    Image.new("RGB", (16, 16)).save(tmp_path / "0.png")
    row = {"image": "0.png", "question": "what is on the left", "answer": "it"}
    (tmp_path / "q.jsonl").write_text(json.dumps(row))
    data = {"source": str(tmp_path / "q.jsonl"), "held_out": 0}
    with pytest.raises(VitclinicError, match=r"speak of left or right.*data.augment.flip=false"):
        trainer_of(make(data=data, batch_size=1))
    trainer_of(make(data={**data, "augment": {"level": "light", "flip": False}}, batch_size=1))


def test_the_plan_of_a_run(make):
    plan = plan_run(build_recipe(make()))
    assert plan.classes == 19
    assert plan.memory is not None
