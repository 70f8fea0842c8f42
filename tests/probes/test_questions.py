"""Probes of networks that answer questions, against a question at a time and token by token."""

import math

import numpy as np
import pytest
import torch

from tests.tasks.test_vqa import PLAIN
from vitclinic._core.distributed import ALONE
from vitclinic.anatomy import Anatomy, record_attention
from vitclinic.data import open_data
from vitclinic.models.tokens import TokenKinds
from vitclinic.probes import Subject
from vitclinic.probes.attention.token_kinds import TokenKindsProbe, attention_mass, kind_entropy, kind_similarity
from vitclinic.probes.behaviour.vqa import VqaAccuracy
from vitclinic.probes.running import measure
from vitclinic.probes.selection import parse_probes
from vitclinic.training import load_model, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    data = {"source": "scenes:24"}
    return train({**PLAIN, "data": data, "steps": 2, "out": str(tmp_path_factory.mktemp("runs") / "run")})


@pytest.fixture
def subject(run):
    network = load_model(run.path)
    return Subject(network, open_data(run.recipe.data), output_names=network.classes, run=run)


def test_the_accuracy_is_that_of_the_task(run, subject):
    (one,) = measure(subject, [VqaAccuracy(shown=5)])
    assert one.status == "ok", one.reason
    score = run.recipe.task.evaluate(load_model(run.path), subject.dataset, "test", ALONE)
    for name in ("accuracy", "accuracy_yes_no", "accuracy_number", "accuracy_other"):
        assert one.scalars[name].value == pytest.approx(score[name])
    assert (one.scalars["accuracy"].low, one.scalars["accuracy"].n) == (score["accuracy_low"], score["count"])
    assert one.arrays["beginning_questions"].sum() == score["questions"] == one.scalars["questions"].value
    assert np.average(one.arrays["beginning_accuracy"], weights=one.arrays["beginning_questions"]) == pytest.approx(
        score["accuracy"]
    )
    assert len(one.arrays["shown_questions"]) == len(one.arrays["shown_images"]) == 5
    assert (np.diff(one.arrays["shown_scores"]) >= 0).all()


def test_limited_subjects_keep_their_questions(run):
    network = load_model(run.path)
    (one,) = measure(Subject(network, open_data(run.recipe.data), limit=3), [VqaAccuracy()])
    assert one.scalars["accuracy"].n == 3


def test_attention_by_kind_is_the_sum_token_by_token(subject):
    (one,) = measure(subject, [TokenKindsProbe()])
    assert one.status == "ok", one.reason
    network, maps = subject.network, []
    units = Anatomy.of(network, subject.example).of_kind("msa")
    expected = []
    for batch in subject.batches():
        for image, questions in zip(batch.images, batch.annotations.questions, strict=True):
            of_image = []
            for question in questions:
                maps.clear()
                with torch.no_grad(), record_attention(units, lambda seen: maps.append(seen.weights[0].double())):
                    network(image[None], [question.text])
                words = len(network.backbone.text.tokenize(question.text)) + 2
                first = network.backbone.text.length
                masses = [m[:, t, first:].sum(-1).mean() for m in maps[:1] for t in range(words)]
                of_image.append(float(sum(masses)) / words)
            expected.append(np.mean(of_image))
    row = next(row for row in one.units if row.name == "blocks.0.msa")
    assert row.values["text_to_image"].value == pytest.approx(np.mean(expected), rel=1e-5)
    assert row.values["text_to_text"].value == pytest.approx(1 - np.mean(expected), rel=1e-5)
    assert 0 < one.scalars["text_share"].value < 1
    assert {"image_entropy", "image_similarity"} <= row.values.keys()


def test_formulas_on_uniform_attention_and_equal_tokens():
    kinds = TokenKinds(torch.tensor([[False, False, True], [False, True, True]]), patches=4)
    weights = kinds.of("all").double()[:, None, None].expand(2, 3, 7, 7)
    weights = weights / weights.sum(-1, keepdim=True)
    mass = attention_mass(weights, kinds)
    torch.testing.assert_close(mass["image_to_text"], torch.tensor([2 / 6, 1 / 5], dtype=torch.float64))
    torch.testing.assert_close(mass["text_to_image"], torch.tensor([4 / 6, 4 / 5], dtype=torch.float64))
    for values in kind_entropy(weights, kinds).values():
        torch.testing.assert_close(values, torch.ones(2, dtype=torch.float64))
    x = torch.zeros(2, 7, 2, dtype=torch.float64)
    x[:, :, 0] = 1
    x[:, 3] = torch.tensor([0.0, 1.0])
    similarity = kind_similarity(x, kinds)
    expected = 6 / 12  # three equal patches of four: 3 of 6 pairs
    torch.testing.assert_close(similarity["image_similarity"], torch.full((2,), expected, dtype=torch.float64))
    torch.testing.assert_close(similarity["text_similarity"], torch.ones(2, dtype=torch.float64))
    assert math.isclose(float(mass["text_to_text"][1]), 0.2)


def test_a_run_gets_what_has_a_meaning_and_one_sentence_for_the_rest(subject):
    names = ["accuracy", "errors", "vqa", "token_kinds", "norms", "attention_entropy", "cost", "sharpness"]
    found = {one.probe: one for one in measure(subject, parse_probes(names))}
    assert {name: one.status for name, one in found.items()} == {
        "accuracy": "does_not_apply",
        "errors": "does_not_apply",
        "sharpness": "does_not_apply",
        **dict.fromkeys(("vqa", "token_kinds", "norms", "attention_entropy", "cost"), "ok"),
    }
    for name in ("accuracy", "errors", "sharpness"):
        assert found[name].reason.startswith("the network has no class scores")
        assert found[name].reason.count(".") == 1


def test_other_networks_and_data_are_refused_in_one_sentence():
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    for one in measure(Subject(network, open_data("digits"), limit=20), [VqaAccuracy()]):
        assert one.status == "does_not_apply"
        assert one.reason == "the network takes images alone; questions are for runs of the task vqa."
