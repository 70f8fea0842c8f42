import numpy as np
import pytest
import torch
from scipy import stats

from vitclinic.data.augment import Mixing, cut_boxes, soft_targets
from vitclinic.data.randomness import sample_keys


def keys(count):
    return sample_keys(0, np.zeros(count, np.int64), np.arange(count))


def pairs(count):
    return np.arange(count) ^ 1


def test_soft_targets_against_timm():
    from timm.data.mixup import mixup_target

    labels = torch.tensor([0, 3, 2, 1])
    ours = 0.3 * soft_targets(labels, 4, 0.1) + 0.7 * soft_targets(labels.flip(0), 4, 0.1)
    assert torch.allclose(ours, mixup_target(labels, 4, lam=0.3, smoothing=0.1))


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0), (0, 1.0), (0.8, 1.0)])
def test_targets_say_how_much_of_each_image_is_there(mixup, cutmix):
    """Image i is constant 1 where it comes from an even row, 0 elsewhere: its mean is its label's share."""
    images = torch.zeros(200, 1, 16, 16)
    images[::2] = 1
    targets = soft_targets(torch.arange(200) % 2, 2)
    mixed, soft = Mixing(mixup, cutmix)(images, targets, pairs(200), keys(200))
    assert torch.allclose(mixed.mean(dim=(1, 2, 3)), soft[:, 0], atol=1e-6)
    assert torch.allclose(soft.sum(1), torch.ones(200))
    blended = ((mixed > 0) & (mixed < 1)).flatten(1).any(dim=1).float().mean()
    assert 0.35 < blended < 0.65 if mixup and cutmix else blended == float(mixup > 0)


def test_lambda_is_beta_distributed():
    keep, cut = Mixing(0.8, 0).lambdas(keys(4000))
    assert not cut.any()
    assert stats.kstest(keep, stats.beta(0.8, 0.8).cdf).pvalue > 0.01


def test_boxes_have_the_area_they_should_before_clipping():
    keep = np.full(2000, 0.75)
    boxes = cut_boxes(keep, keys(2000), 32, 64)
    inside = (boxes[:, 0] > 0) & (boxes[:, 1] < 32) & (boxes[:, 2] > 0) & (boxes[:, 3] < 64)
    area = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2]) / (32 * 64)
    assert inside.sum() > 200
    assert np.abs(area[inside] - 0.25).max() < 0.02


def test_some_images_are_left_alone():
    images = torch.rand(400, 1, 4, 4)
    mixed, soft = Mixing(0.8, 1.0, probability=0.5)(images, torch.eye(2)[torch.arange(400) % 2], pairs(400), keys(400))
    same = (mixed == images).flatten(1).all(dim=1)
    assert 150 < same.sum() < 260
    assert (soft[same].max(dim=1).values == 1).float().mean() > 0.85


def test_mixing_is_of_the_sample_not_of_the_batch():
    images, targets = torch.rand(40, 3, 8, 8), soft_targets(torch.arange(40) % 5, 5)
    mix = Mixing(0.8, 1.0)
    whole = mix(images, targets, pairs(40), keys(40))
    for start in range(0, 40, 4):
        part = mix(images[start : start + 4], targets[start : start + 4], pairs(4), keys(40)[start : start + 4])
        assert torch.equal(part[0], whole[0][start : start + 4])
        assert torch.equal(part[1], whole[1][start : start + 4])
