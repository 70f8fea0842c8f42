"""Shape against texture: networks that go by the one, by the other, or by neither."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.probes.subjects import InMemory, subject
from vitclinic._core.statistics import share_interval
from vitclinic.data import Dataset, Split, shapes
from vitclinic.probes import Subject, measure, parse_probes


def dataset(size=32, channels=3, names=shapes.CLASSES):
    images = InMemory(0)
    images.pixels = np.zeros((4, size, size, channels), np.uint8)
    split = Split(images, np.arange(4), np.arange(4))
    return Dataset("shapes", names, (size, size), channels, dict.fromkeys(("train", "val", "test"), split), "d")


class Knowing(nn.Module):
    """Knows every cue-conflict image by its pixels, and answers as it is told: `answer(index, shape, texture)`."""

    def __init__(self, answer, count=180, seed=0):
        super().__init__()
        drawn = [shapes.cue_conflict(seed, index) for index in range(count)]
        self.known = torch.stack([torch.from_numpy(image).permute(2, 0, 1).float() / 255 for image, _, _ in drawn])
        self.answers = torch.tensor([answer(index, s, t) for index, (_, s, t) in enumerate(drawn)])

    def forward(self, x):
        nearest = torch.cdist(x.flatten(1), self.known.flatten(1)).argmin(1)
        return nn.functional.one_hot(self.answers[nearest], 10).float()


def third(shape, texture):
    return next(k for k in range(10) if k not in (shape, texture))


def bias(network, images=180, **options):
    patient = Subject(network, options.pop("dataset", None) or dataset(), **{"batch_size": 32, **options})
    (found,) = measure(patient, parse_probes([{"shape_bias": {"images": images}}]))
    return found


def mostly_shape(index, shape, texture):
    return [shape, shape, texture, third(shape, texture)][(index // 10 + shape // 3) % 4]


@pytest.mark.parametrize("batch_size", [7, 64])
def test_shares_are_counts(batch_size):
    found = bias(Knowing(mostly_shape), batch_size=batch_size)
    assert found.status == "ok", found.reason
    answers = [mostly_shape(index, *shapes.cue_conflict(0, index)[1:]) for index in range(180)]
    truth = [shapes.cue_conflict(0, index)[1:] for index in range(180)]
    by_shape = [answer == shape for answer, (shape, _) in zip(answers, truth, strict=True)]
    by_texture = [answer == texture for answer, (_, texture) in zip(answers, truth, strict=True)]
    decided = sum(by_shape) + sum(by_texture)
    scalar = found.scalars["shape_bias"]
    assert (scalar.value, scalar.n) == (sum(by_shape) / decided, decided)
    assert (scalar.low, scalar.high) == share_interval(sum(by_shape), decided)
    assert found.scalars["shape_decisions"].value == sum(by_shape) / 180
    assert found.scalars["texture_decisions"].value == sum(by_texture) / 180
    for number, name in enumerate(shapes.CLASSES):
        rows = [row for row, (shape, _) in enumerate(truth) if shape == number]
        ours, theirs = sum(by_shape[row] for row in rows), sum(by_texture[row] for row in rows)
        assert found.scalars[f"shape_bias_{name}"].value == ours / (ours + theirs)
        assert found.arrays["shape_decisions"][number] == ours
    assert found.arrays["images"].tolist() == [18] * 10


@pytest.mark.parametrize(("answer", "expected"), [(lambda i, s, t: s, 1.0), (lambda i, s, t: t, 0.0)])
def test_a_network_that_goes_by_one_cue(answer, expected):
    assert bias(Knowing(answer)).scalars["shape_bias"].value == expected
    assert bias(Knowing(answer, seed=3), seed=3).scalars["shape_bias"].value == expected


def test_a_network_that_goes_by_neither():
    found = bias(Knowing(lambda i, s, t: third(s, t)))
    assert found.status == "not_converged"
    assert "shape_bias" not in found.scalars
    assert found.scalars["shape_decisions"].value == 0


def test_other_sizes_and_grey():
    class Constant(nn.Module):
        def forward(self, x):
            assert x.shape[1:] == (1, 48, 48)
            assert 0 <= x.min() <= x.max() <= 1
            return torch.eye(10)[[2] * len(x)]

    found = bias(Constant(), dataset=dataset(48, 1))
    assert found.status == "ok", found.reason
    assert found.scalars["shape_bias"].value == 0.5  # every class is as often a shape as a texture


def test_other_classes_do_not_apply():
    (found,) = measure(subject("unknown"), parse_probes(["shape_bias"]))
    assert (found.status, found.reason) == (
        "does_not_apply",
        "it needs a network trained on the `shapes` data set, and this one has other classes.",
    )
    found = bias(Knowing(mostly_shape), dataset=dataset(names=tuple(f"{k}" for k in range(10))))
    assert found.status == "does_not_apply"
