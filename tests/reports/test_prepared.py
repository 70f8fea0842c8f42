"""A page shows no absolute path, and tells networks of one name apart."""

import pytest

from tests.reports.made import measurement, vit
from vitclinic.reports.figure import ExamView
from vitclinic.reports.page import prepare_exams, strip_folders


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/runs/a", "a"),
        ("/home/me/runs/a/", "a"),
        ("~/runs/a", "a"),
        ("timm:vit@/tmp/w.safetensors", "timm:vit@w.safetensors"),
        ("cannot read '/a/b c/d.png'.", "cannot read 'b c/d.png'."),
        ("in /a/b, and /c/d.", "in b, and d."),
        ("runs/a", "runs/a"),
        ("../runs/a", "../runs/a"),
        ("4/255 of the images/second, and/or", "4/255 of the images/second, and/or"),
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),
        ("source=/a/b", "source=b"),
        ("https://example.org/a/b", "https://example.org/a/b"),
    ],
)
def test_of_an_absolute_path_the_last_part_is_left(text, shown):
    assert strip_folders(text) == shown


def test_paths_go_from_everything_that_is_shown():
    failed = measurement("fgsm", status="failed", reason="no '/x/y'", config={"data": "/x/y", "more": ["/x/z"]})
    (one,) = prepare_exams([ExamView("/home/me/a", {"fgsm": failed}, facts={"Data": "/data/photos"})])
    found = one.measurements["fgsm"]
    assert (one.name, one.facts) == ("a", {"Data": "photos"})
    assert (found.reason, found.config) == ("no 'y'", {"data": "y", "more": ["z"]})


def test_networks_of_one_name_get_numbers():
    names = [one.name for one in prepare_exams([vit(name="/x/a"), vit(name="b"), vit(name="/y/a")])]
    assert names == ["a (1)", "b", "a (3)"]
