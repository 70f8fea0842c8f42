"""Spatial smoothing: the blur is the mean of four, and stands at the end of each stage."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.anatomy.networks import NETWORKS, shaken
from tests.treatments.test_contract import FITS, ONE_EACH
from vitclinic.anatomy import Anatomy, taps
from vitclinic.treatments import Blur, treat

FAMILIES = FITS["spatial_smoothing"]
BUILDS = [network for family in FAMILIES for network in ONE_EACH[family]]


def written_out(x: Tensor) -> Tensor:
    rows, columns = x.shape[-2:]
    y = torch.empty_like(x)
    for i in range(rows):
        for j in range(columns):
            below, right = min(i + 1, rows - 1), min(j + 1, columns - 1)
            y[..., i, j] = (x[..., i, j] + x[..., below, j] + x[..., i, right] + x[..., below, right]) / 4
    return y


@given(rows=st.integers(1, 5), columns=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_the_blur_is_the_mean_of_four_with_the_border_repeated(rows: int, columns: int, seed: int) -> None:
    x = torch.randn(2, 3, rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(Blur()(x), written_out(x))
    padded = F.avg_pool2d(F.pad(x, (0, 1, 0, 1), mode="replicate"), 2, stride=1)
    torch.testing.assert_close(Blur()(x), padded)
    constant = x[..., :1, :1].expand_as(x)
    torch.testing.assert_close(Blur()(constant), constant)


def test_the_blur_is_a_low_pass_filter() -> None:
    """A sine of angular frequency f along an axis is multiplied by |cos(f / 2)| there: 0 at pi."""
    columns = torch.arange(16, dtype=torch.float64)
    for cycles in (0, 2, 4, 8):
        frequency = 2 * torch.pi * cycles / 16
        x = torch.cos(frequency * columns).expand(1, 1, 4, 16)
        inner = Blur()(x)[0, 0, 0, :-1]
        expected = torch.cos(torch.tensor(frequency / 2)) * torch.cos(frequency * (columns[:-1] + 0.5))
        torch.testing.assert_close(inner, expected.double(), rtol=0, atol=1e-7)


def build(network: str) -> nn.Module:
    torch.manual_seed(0)
    return shaken(NETWORKS[network]()).eval()


@pytest.mark.parametrize("network", BUILDS)
def test_every_stage_ends_in_a_blur_and_units_are_read_behind_it(network: str) -> None:
    plain, treated = build(network), treat(build(network), "spatial_smoothing")
    before, after = Anatomy.of(plain), Anatomy.of(treated)
    assert [unit.name for unit in after.units] == [unit.name for unit in before.units]
    assert set(treated.state_dict()) == set(plain.state_dict())
    blocks = [unit for unit in after.units if unit.kind in ("conv", "msa")]
    stages = {unit.stage for unit in blocks}
    blurs = [module for module in treated.modules() if isinstance(module, Blur)]
    assert len(blurs) == len(stages)

    units = {unit.name: unit for unit in after.units}
    ends = [max((u for u in blocks if u.stage == s), key=lambda u: u.depth) for s in stages]
    # Up to the first blur both networks agree, and what the first stage gives is blurred.
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    first = ends[0].name
    with torch.no_grad(), taps({"end": before.unit(first).output}) as seen:
        plain(x)
    expected = written_out(seen["end"])
    following = after.units[units[first].depth + 1]
    with torch.no_grad(), taps({"end": units[first].output, "next": following.input}) as blurred:
        treated(x)
    torch.testing.assert_close(blurred["end"], expected)
    torch.testing.assert_close(blurred["next"], expected)


@pytest.mark.parametrize("network", BUILDS)
def test_every_unit_can_still_be_removed(network: str) -> None:
    treated = treat(build(network), "spatial_smoothing")
    anatomy = Anatomy.of(treated)
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = treated(x)
        for unit in anatomy.of_kind("conv"):
            if unit.removal is not None:
                with anatomy.remove(unit):
                    assert (treated(x) - whole).abs().max() > 0
        assert torch.equal(treated(x), whole)
