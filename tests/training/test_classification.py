import math

import pytest
import torch

from vitclinic.tasks.classification import sigmoid_loss, softmax_loss


def test_softmax_loss_by_hand():
    logits, targets = torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]]), torch.tensor([1, 0])
    by_hand = 0.0
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        by_hand -= row[target] - math.log(sum(math.exp(v) for v in row))
    assert softmax_loss(logits, targets).item() == pytest.approx(by_hand / 2)


def test_sigmoid_loss_by_hand():
    logits, targets = torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]]), torch.tensor([1, 0])
    by_hand = 0.0
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        for k, value in enumerate(row):
            p = 1 / (1 + math.exp(-value))
            by_hand -= math.log(p) if k == target else math.log(1 - p)
    assert sigmoid_loss(logits, targets).item() == pytest.approx(by_hand / 2)


@pytest.mark.parametrize("loss", [softmax_loss, sigmoid_loss])
def test_hard_targets_are_soft_targets_of_one_class(loss):
    logits, targets = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 3, 1, 1, 2])
    assert torch.allclose(loss(logits, targets), loss(logits, torch.eye(4, dtype=torch.float64)[targets]))


@pytest.mark.parametrize("loss", [softmax_loss, sigmoid_loss])
def test_losses_of_half_precision_logits_are_computed_in_full(loss):
    logits = torch.randn(5, 4).to(torch.bfloat16)
    assert torch.equal(loss(logits, torch.zeros(5, dtype=torch.long)), loss(logits.float(), torch.zeros(5).long()))
