"""The probes that docs/examine.md shows are probes."""

import re
import runpy
from pathlib import Path

import pytest
import torch

from tests.probes.subjects import subject
from vitclinic.probes import measure, parse_probes
from vitclinic.probes.probe import PROBES

PAGE = Path(__file__).parents[2] / "docs" / "examine.md"


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setattr(PROBES, "_known", dict(PROBES._known))
    _, _, section = PAGE.read_text().partition("## Writing a probe")
    (tmp_path / "shown.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL)))
    return runpy.run_path(str(tmp_path / "shown.py"))


@pytest.mark.usefixtures("written")
def test_what_the_page_shows_measures():
    patient = subject("vit")
    confidence, means = measure(patient, parse_probes([{"confidence": {"temperature": 2.0}}, "means"]))
    images = torch.cat([batch.images for batch in patient.batches()])
    expected = (patient.network.eval()(images) / 2).softmax(1).amax(1).mean()
    assert confidence.scalars["confidence"].value == pytest.approx(expected.item(), rel=1e-5)
    assert [row.name for row in means.units] == [unit.name for unit in patient.anatomy.units]
