"""Treatments of the class token where the patches come column by column, or the class token last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.anatomy.token_orders import CLASSES, SIDE, OrderedViT
from vitclinic._core.errors import TreatmentError
from vitclinic.data import ImageSpec
from vitclinic.treatments import treat

IMAGES = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def treated(order: Any, treatment: str) -> nn.Module:
    network = OrderedViT(order).eval()
    torch.manual_seed(1)
    return treat(network, treatment, spec=ImageSpec(CLASSES, 3, (SIDE, SIDE))).eval()


TREATMENTS = ("gap_head", "sequence_pooling", "registers")


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_patches_may_come_column_by_column(treatment: str) -> None:
    with torch.no_grad():
        expected = treated("plain", treatment)(IMAGES)
        assert not torch.allclose(expected, OrderedViT().eval()(IMAGES), atol=1e-4)
        torch.testing.assert_close(treated("columns", treatment)(IMAGES), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_class_token_behind_the_patches_is_a_sentence(treatment: str) -> None:
    with pytest.raises(TreatmentError, match="class token is not the first"):
        treated("class last", treatment)
