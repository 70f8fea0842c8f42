"""What a finished exam looks like on a terminal or in a pipe."""

import io

from rich.console import Console

from tests.probes.subjects import noise, subject
from vitclinic.exam import examine
from vitclinic.exam.display import show_exams


def test_probes_that_do_not_apply_for_one_reason_share_a_sentence(tmp_path):
    exams = [
        examine(subject(name).network, noise(8), probes=["norms", "cka", "variance", "accuracy"], out=tmp_path)
        for name in ("unknown", "vit")
    ]
    text = io.StringIO()
    show_exams(exams, Console(file=text, width=300))
    (line,) = [line for line in text.getvalue().splitlines() if " apply (" in line]
    assert line.startswith("cka, variance do not apply (Unknown): one forward pass of Unknown shows no units")


def test_one_probe_is_singular(tmp_path):
    exam = examine(subject("resnet").network, noise(8), probes=["attention_entropy", "norms"], out=tmp_path)
    text = io.StringIO()
    show_exams([exam], Console(file=text, width=300))
    assert "attention_entropy does not apply (ResNet): a timm ResNet has no attention maps." in text.getvalue()
