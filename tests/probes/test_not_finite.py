"""One image for which a network computes something that is no number: a mean over all images would be wrong."""

from __future__ import annotations

import pytest
import torch

from tests.probes.subjects import subject
from vitclinic.anatomy import Anatomy
from vitclinic.probes import StreamingProbe, known_probes, measure

READING = sorted(
    name
    for name, probe in known_probes().items()
    if name in ("lesion", "attention_maps")
    or (issubclass(probe, StreamingProbe) and probe.__module__.startswith("vitclinic."))
)


@pytest.mark.parametrize("name", READING)
def test_one_spoilt_image_is_a_failure_that_says_so(name):
    patient = subject("vit", count=8)
    core = Anatomy.of(patient.network).network
    patient.anatomy  # noqa: B018 (examined while it is healthy: its check would find it otherwise)

    def spoil(module, args, output):
        spoilt = output.clone()
        spoilt[len(output) // 2] = torch.nan
        return spoilt if len(output) > 1 else output

    with torch.no_grad():
        core.blocks[1].mlp.act.register_forward_hook(spoil)
    (found,) = measure(patient, [known_probes()[name]()])
    assert found.status == "failed"
    assert "finite" in str(found.reason)
